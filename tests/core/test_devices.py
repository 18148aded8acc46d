"""Kinds of devices: which there are, and that each is asked in one place."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import tiny_run
from advice import advises
from paragan.cli import report
from paragan.cli.common import select_device
from paragan.config.validate import validate
from paragan.core.devices import BACKENDS, backend_of, device_of_group, has_huge_pages, pick_device
from paragan.core.errors import UsageError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2] / "paragan"


def test_the_cpu_backend_has_no_streams():
    kind = backend_of(CPU)
    assert (kind.dist_backend, kind.has_streams, kind.is_available()) == ("gloo", False, True)
    assert kind.device_name(CPU)
    assert 0 < kind.peak_bytes(CPU) < kind.memory_bytes(CPU)
    kind.synchronize(CPU)
    kind.record_event(CPU).wait()
    kind.record_event(CPU).synchronize()
    with kind.side_streams(CPU, 3) as places, kind.full_precision_convs():
        assert len(places) == 3
    before = torch.get_rng_state()
    with kind.fork_rng(CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_instead_of_a_missing_device_the_cpu_is_used_as_advised(monkeypatch):
    for kind in ("cuda", "mps"):
        monkeypatch.setattr(BACKENDS[kind].__class__, "is_available", lambda self: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with advises(f"--device.kind=cuda: this build of torch ({torch.__version__}) has no CUDA. Use --device.kind=cpu"):
        pick_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with advises("--device.kind=cuda: torch finds no CUDA device on this host. Use --device.kind=cpu"):
        pick_device("cuda")
    with advises("--device.kind=mps: torch finds no Apple GPU on this host. Use --device.kind=cpu"):
        pick_device("mps")
    assert pick_device("cpu") == CPU


def test_a_host_takes_as_many_ranks_as_advised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with advises("--device.kind=cuda: of CUDA devices this process sees 2. Start at most 2 of the ranks on this host"):
        pick_device("cuda", 2)
    assert [pick_device("cuda", rank).index for rank in range(2)] == [0, 1]


@pytest.fixture
def one_card(monkeypatch):
    """Pretend that there is one CUDA device, of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90a"])


def test_a_card_that_torch_was_not_built_for_is_refused(one_card, monkeypatch):
    assert pick_device("cuda").index == 0
    for built_for in (["sm_90"], ["sm_70", "compute_80"], []):
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda built_for=built_for: built_for)
        assert pick_device("cuda").index == 0
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100", "sm_120", "compute_120"])
    with advises("which is sm_90. Use --device.kind=cpu, or install another build of torch"):
        pick_device("cuda")
    assert pick_device("cpu") == CPU


def test_an_amd_card_is_known_by_its_architecture(one_card, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    assert pick_device("cuda").index == 0
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1100"])
    with pytest.raises(UsageError, match="which is gfx942"):
        pick_device("cuda")


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_rank_that_was_given_one_device_takes_it(one_card, monkeypatch, name):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1,2,3")  # Slurm sets those of all vendors
    monkeypatch.setenv(name, "3")
    assert pick_device("cuda", local_rank=3).index == 0
    for several in ("0,1", ""):
        monkeypatch.setenv(name, several)
        with pytest.raises(UsageError, match="this process sees 1"):
            pick_device("cuda", local_rank=3)


def test_a_device_is_named_by_its_number(one_card, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with advises("--device cuda:1: torch finds 1. Use --device cuda:0"):
        select_device("cuda:1", "cpu")
    assert select_device("cuda:0", "cpu").index == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with advises(f"--device cuda:0: this build of torch ({torch.__version__}) has no CUDA. Use --device cpu"):
        BACKENDS["cuda"].device_at(0)
    assert select_device("cpu", "cuda") == CPU


def test_commands_name_the_option_that_they_have(one_card, monkeypatch):
    """`paragan eval` of a run that was trained on another machine."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100"])
    with advises("which is sm_90. Use --device cpu, or install another build of torch"):
        select_device("cuda", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda:0", "cuda", None):
        with pytest.raises(UsageError, match=r"^--device cuda(:0)?: .*\. Use --device cpu$"):
            select_device(name, "cuda")
    assert select_device("cpu", "cuda") == CPU


def test_a_report_is_drawn_on_the_cpu_if_torch_has_no_code_for_the_card(one_card, monkeypatch):
    assert report._pick_device().type == "cuda"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100"])
    assert report._pick_device() == CPU


def test_auto_never_picks_mps(monkeypatch):
    monkeypatch.setattr(BACKENDS["cuda"].__class__, "is_available", lambda self: False)
    monkeypatch.setattr(BACKENDS["mps"].__class__, "is_available", lambda self: True)
    assert pick_device("auto") == CPU
    with advises("there is one device, for one rank. Start one rank."):
        pick_device("mps", 1)
    assert pick_device("mps") == torch.device("mps")
    with pytest.raises(UsageError, match="Start one, or use cpu"):
        validate(tiny_run.make_run("device.kind=mps"), 2)


def test_only_one_module_branches_on_the_device_kind():
    """But for CUDA graphs."""
    about_cuda = {
        "core/backends.py",
        "game/graph_capture.py",
    }
    pattern = re.compile(r"\.is_cuda\b|torch\.cuda\.|torch\.mps\.|\.type (==|!=) \"cuda\"")
    files = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if pattern.search(p.read_text())}
    assert files - about_cuda <= {
        "plan/tune/layout_tuner.py",
        "plan/tune/op_profile.py",
    }  # which switches and tiles a kind has


def test_the_device_of_a_group_follows_its_backend():
    assert device_of_group("gloo") == torch.device("cpu")
    with mock.patch("torch.cuda.current_device", return_value=3):
        for backend in ("nccl", "cpu:gloo,cuda:nccl"):
            assert device_of_group(backend) == torch.device("cuda", 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_reused():
    """In processes of their own, since it is for good, whose blocks come from the system and go back to it by what the
    environment says: page faults of ten passes over tensors of 1 MB, after three."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    passes = """
import resource, sys, torch
from paragan.core.devices import tune_malloc
if sys.argv[1] == "kept":
    tune_malloc()
def faults(passes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(passes):
        held = [torch.ones(1 << 18) for _ in range(16)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(10))
"""
    left, retained = (
        int(
            subprocess.run(
                [sys.executable, "-c", passes, word], env=environment, capture_output=True, check=True
            ).stdout
        )
        for word in ("left", "kept")
    )
    assert left > 10_000
    assert retained < left / 100


@pytest.mark.skipif(not has_huge_pages(), reason="this system has none")
def test_huge_pages_are_fewer():
    """In a new process: `tune_malloc`, which other tests run, may have left this one memory without page faults."""
    count_faults = """
import resource, torch
from paragan.core.devices import set_huge_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)  # 64 MB, which malloc maps anew
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
set_huge_pages(False)
small = faults()
set_huge_pages(True)
print(small, faults())
"""
    run = subprocess.run([sys.executable, "-c", count_faults], capture_output=True, check=True)
    small, huge = map(int, run.stdout.split())
    assert small > 1000
    assert huge < 0.3 * small
