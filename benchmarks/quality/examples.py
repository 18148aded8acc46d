"""Measure the scores of the examples: `python -m benchmarks.quality.examples [--only mixture] [--json F]`.

Runs every example as a user does, in a folder of its own, and records what it prints, the scores at its end among it,
and the seconds of processor time that it took.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.lib.document import ROOT
from benchmarks.lib.timing import describe_machine, format_machine, save_json

EXAMPLES = ("mixture ring", "mixture square", "showers", "tokenizer")


def run_example(name: str) -> dict[str, Any]:
    """Run an example; return the lines that it printed, and its seconds of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        module, *arguments = name.split()
        command = [sys.executable, "-m", f"examples.{module}", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{name}\n{done.stdout}", flush=True)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"printed": done.stdout.splitlines(), "cpu_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="only examples whose name contains this")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine()}
    print(format_machine(result["machine"]))
    result["examples"] = {name: run_example(name) for name in EXAMPLES if options.only in name}
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
