from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests import rank_pool, tiny_run, ... from here

import browser
import rank_pool
import tiny_run
from processes import LONG_RUN_ARG, CliProcesses, reduce_bn_recalibration, train_args, train_tiny

KILL_FILES = ("test_rank_loss.py", "test_killed_ranks.py", "test_killed_workers.py")
LONG_FILES = ("test_contracts.py", "test_per_label_wcgan.py", "test_fuzz.py", "test_resume.py", "test_gossip_dposg.py")

torch.set_num_threads(1)
reduce_bn_recalibration()
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="paragan-tests-")
cloudpickle.register_pickle_by_value(tiny_run)


@pytest.fixture(scope="session")
def pool() -> Iterator[rank_pool.RankPool]:
    pool = rank_pool.RankPool()
    yield pool
    pool.close()


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that workers end at the same time."""
    order = (*KILL_FILES, *LONG_FILES)
    items.sort(key=lambda item: order.index(item.path.name) if item.path.name in order else len(order))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("browser") and not browser.is_enabled():
            item.add_marker(pytest.mark.skip(reason="no Chromium"))
