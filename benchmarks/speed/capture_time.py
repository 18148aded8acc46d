"""Measure how long a CPU takes to build captured passes (`device.capture_passes`).

    python -m benchmarks.speed.capture_time [--networks digits,sngan] [--json F]

Seconds of the first round in a process of its own, which builds, less those of the second: with an empty cache of
torch's inductor, and with the cache that this left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

from benchmarks.lib.session_fixture import make_endless_run, make_session
from benchmarks.lib.timing import describe_machine, format_machine, save_json
from benchmarks.speed.tune import NETWORKS, make_dataset
from paragan.train.loop import play_round

DEFAULT = "digits,fashion"


def measure_build_s(name: str) -> float:
    """Return the seconds that the first round of a network takes longer than the second."""
    warnings.simplefilter("ignore")
    recipe, *settings = NETWORKS[name]
    images = make_dataset(name)
    session = make_session(make_endless_run(recipe, images, *settings, "device.capture_passes=true"), images)
    seconds: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        play_round(session)
        seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def measure(name: str) -> dict[str, float]:
    """Return the seconds of two processes that build the same passes, one after the other."""
    command = [sys.executable, "-m", "benchmarks.speed.capture_time", "--play", name]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        outputs = [subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout for _ in range(2)]
    empty_s, cached_s = (float(output.split()[-1]) for output in outputs)
    return {"empty_s": empty_s, "cached_s": cached_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=DEFAULT, metavar="A,B", help=f"of {', '.join(NETWORKS)} ({DEFAULT})")
    parser.add_argument("--play", metavar="NETWORK", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    if options.play:
        print(measure_build_s(options.play))
        return 0
    result: dict[str, Any] = {"machine": describe_machine(), "networks": {}}
    print(format_machine(result["machine"]))
    for name in options.networks.split(","):
        result["networks"][name] = measure(name)
        print(name, *(f"{key} {seconds:.1f}" for key, seconds in result["networks"][name].items()), flush=True)
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
