"""Examples run, as a user would start them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(folder: Path, *arguments: str) -> str:
    """Run an example in a folder. Returns its output."""
    done = start_example(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_example(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder until it ends."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=folder, env=env)


def test_interface_of_the_paper(tmp_path):
    out = run_example(tmp_path, str(ROOT / "examples" / "estimator.py"), "--steps", "20")
    assert "learning rate" in out
    assert "fd_pixels" in out or "fid" in out


EXAMPLES = {  # name -> (arguments that make it short, a part of its output)
    "mixture": (("square", "--nets.width=16", "--kimg=2"), "of 25 modes covered"),
    "showers": (("--nets.width=2", "--kimg=0.256", "--evaluation.metrics=kid"), "longitudinal profile"),
    "tokenizer": (("--nets.width=8", "--kimg=1", "--ranks=2"), "dB, on 1,797 digits"),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_user_defined_networks_and_losses(name, tmp_path):
    arguments, text = EXAMPLES[name]
    assert text in run_example(tmp_path, "-m", f"examples.{name}", *arguments, "--evaluation.count=100")
    (page,) = tmp_path.rglob("report.html")
    assert page.stat().st_size > 10_000


# CycleGAN, in its own loop and in those of others -----------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "examples.cyclegan")
CYCLEGAN_ON_TWO_RANKS = {  # library -> how its launcher starts two ranks
    "lightning": ("-m", "examples.cyclegan_lightning", "--ranks=2"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"),
        *("-m", "examples.cyclegan_accelerate"),
    ),
    "ray": ("-m", "examples.cyclegan_ray", "--ranks=2"),
}


def cycle_error(output: str) -> float:
    """Return the last error that is printed, which is once: by the main rank."""
    steps = re.findall(r"step (\d+): ", output)
    assert len(steps) == len(set(steps)), output
    return float(re.findall(r"cycle error ([\d.]+) of 255", output)[-1])


@pytest.fixture(scope="session")
def error_of_one_rank(tmp_path_factory) -> float:
    return cycle_error(run_example(tmp_path_factory.mktemp("cyclegan"), "-m", "examples.cyclegan", "--steps=6"))


@pytest.mark.slow
def test_half_batches_of_two_ranks_equal_whole_batches_of_one(error_of_one_rank, tmp_path):
    arguments = (*TORCHRUN, f"--folder={tmp_path}/saved")
    before = cycle_error(run_example(tmp_path, *arguments, "--steps=3"))
    resumed = cycle_error(run_example(tmp_path, *arguments, "--steps=6"))
    assert resumed == pytest.approx(error_of_one_rank, abs=1e-3)
    assert resumed < before - 1


def test_the_script_is_short():
    assert len((ROOT / "examples" / "cyclegan.py").read_text("utf-8").splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("library", CYCLEGAN_ON_TWO_RANKS)
def test_two_ranks_of_another_library_equal_one(library, error_of_one_rank, tmp_path):
    pytest.importorskip(library)
    expected = error_of_one_rank
    if library == "accelerate":  # whose loader shuffles in another order
        expected = cycle_error(run_example(tmp_path, "-m", "examples.cyclegan_accelerate", "--steps=6"))
    error = cycle_error(run_example(tmp_path, *CYCLEGAN_ON_TWO_RANKS[library], "--steps=6"))
    assert error == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("library", CYCLEGAN_ON_TWO_RANKS)
def test_a_missing_library_is_named_in_one_line(library, tmp_path):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is installed")
    done = start_example(tmp_path, "-m", f"examples.cyclegan_{library}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"This example needs {library}.*: pip install .*{library}.*", line, re.IGNORECASE)
