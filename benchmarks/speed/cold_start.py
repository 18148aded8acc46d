"""Time how long commands take to start, against another checkout in turns.

    python -m benchmarks.speed.cold_start --reference ../before [--rounds 9] [--json F]

Each command runs in a process of its own, with the bytecode of both checkouts written. `train` trains two steps, which
take milliseconds; the rest of its time is its start and the files at its end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib.timing import Times, describe_machine, format_machine, format_table, save_json

TRAIN = "train digits --kimg=0.256 --nets.width=4 --evaluation.metrics=[] --device.threads=1"
COMMANDS = {
    "--help": "--help",
    "status": "status RUN",
    "recipes": "recipes",
    "report": "report RUN --as-is",
    "sample": "sample RUN --count 4 --out samples.npz",
    "train, two steps": f"{TRAIN} --run-dir=NEW",
}
TIMEOUT_S = 120


def time_command(checkout: Path, command: str, run: Path) -> float:
    """Return the milliseconds that a command takes from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="cold_start-") as folder:
        words = [{"RUN": str(run), "NEW": f"{folder}/run"}.get(word, word) for word in shlex.split(command)]
        words = [word.replace("=NEW", f"={folder}/run") for word in words]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPATH"] = str(checkout)
        start = time.perf_counter()
        line = [sys.executable, "-m", "paragan", *words]
        subprocess.run(line, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT_S)
        return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--current", type=Path, default=Path(__file__).parents[2], metavar="DIR", help="this one")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command and checkout (9)")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    checkouts = {"before": options.reference.resolve(), "after": options.current.resolve()}
    cases, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in checkouts}
        for name, checkout in checkouts.items():
            time_command(checkout, f"{TRAIN} --run-dir={runs[name]}", runs[name])
        for case, command in COMMANDS.items():
            ms: dict[str, list[float]] = {name: [] for name in checkouts}
            for number in range(options.rounds + 1):
                for name in list(ms) if number % 2 else list(ms)[::-1]:
                    ms[name].append(time_command(checkouts[name], command, runs[name]))
            times = Times({name: values[1:] for name, values in ms.items()})  # the first round fills caches
            cases[case] = times.to_json("before")
            rows.append([case, times.spread("before"), times.spread("after"), times.ratio("after", "before")])
    print(format_table(["ms", "before", "after", "after / before"], rows))
    save_json(options.json, {"machine": machine, "rounds": options.rounds, "cases": cases})


if __name__ == "__main__":
    main()
