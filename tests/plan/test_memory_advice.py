"""A run that is too large for its device ends in one line that names what fits; the stand-in says what does."""

from __future__ import annotations

import re

import pytest
import torch

import standin
from advice import ROOT, Case
from paragan.cli import plan_tune
from paragan.core.devices import BACKENDS
from processes import run_cli, train_args, train_tiny
from standin import memory

SETTINGS = [
    *("--nets.width=16", "--batch=64", "--lanes=4", "--kimg=0.064"),
    *("--device.kind=cuda", "--evaluation.metrics=[]"),
]


@pytest.fixture
def limit_memory(monkeypatch):
    """Let `cuda` be a stand-in with so many bytes."""
    standin.install()
    monkeypatch.setitem(BACKENDS, "cuda", BACKENDS[standin.NAME])
    memory.forget_all()
    return lambda size: monkeypatch.setattr(memory, "limit_bytes", size)


# Python that gives a rank a stand-in, which on rank 1 is too small
TWO_CARDS = f"""
import os, sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
import standin
from paragan.core.devices import BACKENDS
from standin import memory
device = standin.install()
BACKENDS["cuda"] = BACKENDS[standin.NAME]
BACKENDS["cuda"].device_for_rank = lambda local_rank: device
memory.limit_bytes = 1_000_000 if os.environ["RANK"] == "1" else 1 << 30
"""


def advised_options(line: str) -> list[list[str]]:
    """Return the options of each alternative that a line of error names."""
    advice = line.rpartition(". Use ")[2].strip()
    return [alternative.split() for alternative in advice.removesuffix(", with another --run-dir").split(", or ")]


@pytest.mark.slow
def test_a_run_that_is_too_large_for_its_device_ends_with_settings_that_fit(limit_memory, tmp_path):
    limit_memory(1_700_000)
    result = run_cli(*train_args(tmp_path / "run", *SETTINGS))
    assert result.status == 2
    assert result.err.count("\n") == 1
    needs = r"--batch=64: needs about ([\d.]+) MB, and the device has 1.7 MB\. "
    advice = r"Use --batch=\d+, or --device.lanes_per_pass=1, with another --run-dir\n"
    match = re.search(needs + advice, result.err)
    assert match, result.err
    assert float(match[1]) == pytest.approx(2.5, abs=0.3)
    for number, options in enumerate(advised_options(result.err)):
        train_tiny(tmp_path / f"{number}", *SETTINGS, *options)


@pytest.mark.slow
def test_a_run_whose_settings_cannot_be_measured_ends_with_settings_that_fit(limit_memory, tmp_path):
    limit_memory(1_700_000)
    result = run_cli(*train_args(tmp_path / "run", *SETTINGS, "--device.tune=measured"))
    assert result.status == 2
    assert re.search(r"paragan: --batch=64: needs about .* Use --batch=\d+, .*\n", result.err), result.err
    train_tiny(tmp_path / "smaller", *SETTINGS, *advised_options(result.err)[0])


def test_other_commands_fit_as_advised(monkeypatch):
    def tune(run, *_):
        if run.batch > 4:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total of 1.00 MiB"
            )
        return ["tuned"]

    monkeypatch.setattr(plan_tune, "format_tuning", tune)
    case = Case("", "Use a smaller --batch, or a device with more memory", ("--batch=4",))
    plan = ("plan", "digits", "--tune", "--lanes=2")
    result = run_cli(*plan, "--batch=64")
    assert result.status == 2
    assert result.err == f"paragan: CUDA out of memory. Tried to allocate 2.00 MiB. {case.advice}\n"
    assert run_cli(*plan, *case.follow).out == "tuned\n"


@pytest.mark.slow
def test_a_label_that_is_too_large_for_its_device_ends_with_settings_that_fit(limit_memory, advice_inputs, tmp_path):
    limit_memory(1_700_000)
    settings = [*SETTINGS, f"--data={advice_inputs}/two.npz", "--kimg=0.128", "--strategy=per-label"]
    result = run_cli(*train_args(tmp_path / "run", *settings))
    assert result.status == 2
    assert re.fullmatch(
        r"paragan: --batch=64: needs about .* Use --batch=\d+, or --device.lanes_per_pass=1, .*\n", result.err
    )
    train_tiny(tmp_path / "smaller", *settings, *advised_options(result.err)[0])


@pytest.mark.slow
def test_other_ranks_end_with_the_reason(processes, tmp_path):
    def start(*arguments, **env):
        return processes.start_forked(*arguments, patch=TWO_CARDS, **env)

    ranks = processes.start_ranks(2, *train_args(tmp_path / "run", *SETTINGS), start=start)
    assert [rank.wait() for rank in ranks] == [1, 2]
    for rank in ranks:
        assert re.fullmatch(r"paragan: rank 1: --batch=64: needs about .* Use --batch=\d+, .*\n", rank.err), rank.err


@pytest.mark.slow
def test_a_run_that_fits_nowhere_says_so(limit_memory, tmp_path):
    limit_memory(600_000)
    case = Case("", "Use a device with more memory, or smaller networks", ("--nets.width=2",))
    result = run_cli(*train_args(tmp_path / "run", *SETTINGS))
    assert result.status == 2
    assert result.err.endswith(f"{case.advice}\n"), result
    for follow in case.follow:
        train_tiny(tmp_path / "smaller", *SETTINGS, follow)


def test_scores_that_need_too_much_memory_are_computed_on_the_cpu_as_advised(limit_memory, tmp_path):
    run = train_tiny(tmp_path / "run", "--kimg=0.016")
    for source in ((run,), ("--reals=digits", "--fakes=digits")):
        limit_memory(20_000)
        case = Case("", "Use --device cpu", ("--device=cpu",))
        result = run_cli("eval", *source, "--metrics=fd", "--device=cuda")
        assert result.status == 2
        assert re.fullmatch(rf"paragan: .*out of memory\. Tried to .* {case.advice}", result.err.splitlines()[-1])
        assert run_cli("eval", *source, "--metrics=fd", *case.follow).status == 0
