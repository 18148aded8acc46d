from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))  # tests import rank_pool, tiny_run, ... from here
sys.path.insert(0, str(Path(__file__).parent / "oracles"))  # and smooth_game from here

import advice
import browser
import rank_pool
import standin
import tiny_estimator
import tiny_run
from processes import (
    LONG_RUN_ARG,
    CliProcesses,
    free_port,
    reduce_bn_recalibration,
    run_cli,
    train_args,
    train_tiny,
    usage_error,
)

KILL_FILES = (
    *("test_rank_loss.py", "test_killed_ranks.py", "test_killed_workers.py", "test_slurm.py", "test_mpirun.py"),
    *("test_ray.py", "test_dask.py", "test_replayed_rounds.py", "test_elastic_loggers.py"),
)
LONG_FILES = (
    *("test_contracts.py", "test_remote_run.py", "test_per_label_wcgan.py", "test_strangers.py", "test_advice.py"),
    *("test_examples.py", "test_start.py", "test_kubernetes.py", "test_remote.py", "test_user_code.py"),
    *("test_standin_contracts.py", "test_data_readiness.py", "test_replica_ddp.py", "test_graph_capture.py"),
    *("test_bench.py", "test_memory_advice.py", "test_rollback.py", "test_dry_run.py", "test_replica_failures.py"),
    *("test_layout_tuner.py", "test_eval_sets.py", "test_async_eval.py", "test_choose.py", "test_resume.py"),
    *("test_site.py", "test_notebook.py", "test_release.py", "test_watch_pages.py"),
)

torch.set_num_threads(1)
standin.install()  # autograd serves only the devices that are known at its first backward pass
reduce_bn_recalibration()
# Threads of the programs that tests start would poll for work, on cores that other tests need.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="paragan-tests-")
cloudpickle.register_pickle_by_value(tiny_run)
cloudpickle.register_pickle_by_value(tiny_estimator)


@pytest.fixture(scope="session")
def pool() -> Iterator[rank_pool.RankPool]:
    pool = rank_pool.RankPool()
    yield pool
    pool.close()


@pytest.fixture
def in_foreign_group(pool: rank_pool.RankPool) -> Callable[..., list[Any]]:
    """Return a function that runs job() on so many ranks, in a group that a script has formed for their devices."""

    def run(size: int, job: Callable[[], Any], device: str = "cpu") -> list[Any]:
        port = free_port()

        def form_and_run(world: Any) -> Any:
            from datetime import timedelta
            from unittest import mock

            from paragan.comm.process_group import c10d
            from paragan.comm.world import World
            from paragan.core.devices import backend_of

            backend = backend_of(world.device).dist_backend
            c10d.destroy_process_group()
            with mock.patch.object(World, "_formed_default_group", False):
                address = f"tcp://127.0.0.1:{port}"
                c10d.init_process_group(
                    backend, init_method=address, rank=world.rank, world_size=size, timeout=timedelta(seconds=20)
                )
                return job()

        return pool(size, form_and_run, device)

    return run


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[CliProcesses]:
    started = CliProcesses(tmp_path)
    yield started
    started.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run that has ended. Tests must not change it."""
    return train_tiny(tmp_path_factory.mktemp("finished") / "run", "--kimg=0.16")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with LONG_RUN_ARG that was not interrupted."""
    return train_tiny(tmp_path_factory.mktemp("uninterrupted") / "run", LONG_RUN_ARG)


@pytest.fixture(scope="session")
def uninterrupted_by_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same on two ranks."""
    processes = CliProcesses(tmp_path_factory.mktemp("uninterrupted"))
    ranks = processes.start_ranks(2, *train_args(processes.folder / "run", LONG_RUN_ARG))
    assert [rank.wait() for rank in ranks] == [0, 0]
    yield processes.folder / "run"
    processes.close()


@pytest.fixture(scope="session")
def advice_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of 64 images of 32 px, and what else the commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 32, 32, 3), np.uint8)
    np.savez(folder / "classes.npz", images=images, labels=np.arange(64) % 4)
    np.savez(folder / "plain.npz", images=images)
    values = rng.integers(0, 1024, (64, 8, 8, 1), np.uint16)
    np.savez(folder / "ten_bits.npz", images=values)
    np.savez(folder / "twelve_bits.npz", images=values * 4)
    np.savez(folder / "signed.npz", images=np.clip(values.astype(np.int16) - 500, -500, 499))
    np.savez(folder / "stats.npz", mu=np.zeros(64), sigma=np.eye(64))
    np.savez(folder / "small.npz", images=images[:, :8, :8, :1], labels=np.arange(64) % 10)
    np.savez(folder / "two.npz", images=images[:, :8, :8, :1], labels=np.arange(64) % 2)
    np.save(folder / "floats.npy", images[..., 0] / 255)
    np.savez(folder / "floats.npz", images=images[..., 0] / 255)
    np.savez(folder / "numbers.npz", x=rng.normal(size=(64, 2)).astype(np.float32))
    for name, pixels in zip("aabb", images, strict=False):
        (folder / "folder" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "folder" / name / f"{len([*folder.rglob('*.png')])}.png")
    return folder


@pytest.fixture(scope="session")
def per_label_run(tmp_path_factory: pytest.TempPathFactory, advice_inputs: Path) -> Path:
    """The folder of a run with a generator for each of two labels. Tests must not change it."""
    settings = (f"--data={advice_inputs}/two.npz", "--kimg=0.064", "--strategy=per-label")
    return train_tiny(tmp_path_factory.mktemp("labels") / "run", *settings)


@pytest.fixture
def check_advice(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Return a function that follows the advice of a case.

    In its texts DIR is the folder of `advice_inputs`, RUN the run `finished`, COPY a copy of it that may be changed,
    LABELS the run `per_label_run`, NEW an empty folder.
    """

    fixtures = {"DIR": "advice_inputs", "RUN": "finished", "LABELS": "per_label_run", "NEW": "tmp_path"}

    def find_place(name: str) -> str:
        if name != "COPY":
            return str(request.getfixturevalue(fixtures[name]))
        if not (tmp_path / "copy").exists():
            shutil.copytree(request.getfixturevalue("finished"), tmp_path / "copy")
        return str(tmp_path / "copy")

    def fill_in(text: str) -> str:
        return re.sub(r"\b(DIR|RUN|LABELS|NEW|COPY)\b", lambda match: find_place(match[0]), text)

    def follow_advice(case: advice.Case, base: Sequence[str] = ()) -> None:
        arguments = [*base, *shlex.split(fill_in(case.arguments))]
        assert fill_in(case.advice) in usage_error(*arguments)
        for follow in case.follow:
            result = run_cli(*advice.change(arguments, fill_in(follow)))
            assert result.status == 0, f"{follow}: {result.err}"

    return follow_advice


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> None:
    """Jobs are sent to ranks by value: test modules are not importable there."""
    cloudpickle.register_pickle_by_value(request.module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all tests of a file, for its fixtures, and all that kill, which would starve each other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "kills" if file.endswith(KILL_FILES) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Leave modules and test items out of garbage collection: a tenth of the processor time of the tests."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow too")


def _find_slow(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Return the tests marked slow; of one marked slow(after=n), the cases after the first n."""
    num_cases = Counter[str]()
    for item in items:
        if marker := item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            num_cases[function] += 1
            if num_cases[function] > marker.kwargs.get("after", 0):
                yield item


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, unless asked for, and run the longest files first: workers end at the same time."""
    if not config.getoption("slow"):
        slow = list(_find_slow(items))
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    order = (*KILL_FILES, *LONG_FILES)
    items.sort(key=lambda item: order.index(item.path.name) if item.path.name in order else len(order))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("browser") and not browser.is_enabled():
            item.add_marker(pytest.mark.skip(reason="no Chromium"))
