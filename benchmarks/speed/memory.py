"""Whether a step takes the memory that `paragan train -n` foresees.

`python -m benchmarks.speed.memory [--json F] [--predict] CASE ...`

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

from benchmarks.lib.session_fixture import make_endless_run, random_dataset
from benchmarks.lib.timing import describe_machine, format_machine, format_table, peak_rss_bytes, save_json
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.devices import pick_device
from paragan.plan.memory import estimate
from paragan.plan.round_cost import blank_dataset, play_one_round

MALLOC_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CASES = ("fashion:256:4", "fashion:256:16")


def make_case(text: str, tiny: bool = False) -> tuple[Run, Any]:
    """The run of a case and images of its size; tiny: of the smallest there are."""
    recipe, resolution, batch, *settings = text.split(":")
    images = random_dataset(32 if tiny else int(resolution), 3, 16)
    changed = [s for s in settings if not s.startswith("classes=")]
    fixed = (
        "data.resolution=0",
        "data.channels=3",
        f"batch={2 if tiny else batch}",
        "lanes=1",
        "g_batch=0",
        "d_steps=1",
    )
    return make_endless_run(recipe, images, *fixed, *changed), blank_dataset(images)


def measure_case(text: str) -> tuple[int, int]:
    """Return the bytes of the process after a tiny round, and what a round of a case took beyond them."""
    device = pick_device("auto")
    play_one_round(*make_case(text, tiny=True), World.solo(device))
    before = peak_rss_bytes()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    play_one_round(*make_case(text), World.solo(device))
    return before, torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_rss_bytes() - before


def predict(text: str) -> float:
    """Return the gigabytes that `paragan train -n` foresees for a case."""
    run, images = make_case(text)
    return estimate(lambda: play_one_round(run, images)).peak_bytes / 1e9


def measure(text: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.speed.memory", "--play", text]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | MALLOC_RETURNS_MEMORY)
    if done.returncode:
        return {"error": done.returncode}
    foreseen_gb = predict(text)
    process_gb, took_gb = (int(nbytes) / 1e9 for nbytes in done.stdout.split()[-2:])
    ratio = foreseen_gb / took_gb
    return {"foreseen_gb": foreseen_gb, "took_gb": took_gb, "ratio": ratio, "process_gb": process_gb}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--play", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--predict", action="store_true", help="only predict: for what does not fit on this machine")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    if options.play:
        print(*measure_case(options.play))
        return 0
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "command": "benchmarks/speed/memory.py " + " ".join(options.cases),
    }
    print(format_machine(result["machine"]))
    if options.predict:
        result["cases"] = {text: {"foreseen_gb": predict(text)} for text in options.cases}
    else:
        result["cases"] = {text: measure(text) for text in options.cases}
    rows = [[text, *(f"{value:.3g}" for value in row.values())] for text, row in result["cases"].items()]
    print(format_table(["", "foreseen, GB", "took, GB", "ratio", "process, GB"][: len(rows[0])], rows))
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
