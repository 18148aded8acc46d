"""Whether a step takes the memory that `paragan train -n` foresees.

`python -m benchmarks.speed.memory [--json F] CASE ...`

A case is a recipe, a resolution, a batch, and settings: `fashion:256:8:nets.width=32`. Each is played for one round in
a process of its own, which says how far its resident memory rose above what it was after a tiny round (the interpreter
and the libraries, which `-n` does not count); glibc is told to give back what is freed, for it may keep a fifth of it
otherwise. On CUDA it is the allocator's peak.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks.lib.session_fixture import endless, noise
from benchmarks.lib.timing import describe, machine, peak_resident, save, table
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.devices import pick_device
from paragan.plan.memory import foresee
from paragan.plan.round_cost import few, one_round

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CASES = ("fashion:256:4", "fashion:256:16")


def case(text: str, tiny: bool = False) -> tuple[Run, Any]:
    """The run of a case and images of its size; tiny: of the smallest there are."""
    recipe, resolution, batch, *settings = text.split(":")
    images = noise(32 if tiny else int(resolution), 3, 16)
    changed = [s for s in settings if not s.startswith("classes=")]
    fixed = (
        "data.resolution=0",
        "data.channels=3",
        f"batch={2 if tiny else batch}",
        "lanes=1",
        "g_batch=0",
        "d_steps=1",
    )
    return endless(recipe, images, *fixed, *changed), few(images)


def played(text: str) -> int:
    """What a round of a case took beyond a tiny one."""
    device = pick_device("auto")
    one_round(*case(text, tiny=True), World.solo(device))
    before = peak_resident()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    one_round(*case(text), World.solo(device))
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident() - before


def measured(text: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.speed.memory", "--play", text]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | GIVES_BACK)
    if done.returncode:
        return {"error": done.returncode}
    run, images = case(text)
    foreseen = foresee(lambda: one_round(run, images)).peak_bytes
    took = int(done.stdout.split()[-1])
    return {"foreseen_gb": foreseen / 1e9, "took_gb": took / 1e9, "ratio": foreseen / took}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--play", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    if options.play:
        print(played(options.play))
        return 0
    found: dict[str, Any] = {"machine": machine(), "command": "benchmarks/speed/memory.py " + " ".join(options.cases)}
    print(describe(found["machine"]))
    found["cases"] = {text: measured(text) for text in options.cases}
    rows = [[text, *(f"{value:.3g}" for value in row.values())] for text, row in found["cases"].items()]
    print(table(["", "foreseen, GB", "took, GB", "ratio"], rows))
    save(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
