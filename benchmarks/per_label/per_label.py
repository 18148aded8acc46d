"""Measure runs per label: the queue, the pace of workers, and recovery from killed workers.

    python -m benchmarks.per_label.per_label queue [--workers 64 --labels 1000 --seconds 3] [--json F]
    python -m benchmarks.per_label.per_label scaling [--repetitions 5] [--json F]
    python -m benchmarks.per_label.per_label kills [--kills 20] [--json F]

queue   : the real queue with emulated compute (see lease_queue.py): its share of the workers' time, and the idle time
          at the end
scaling : images per second of one and of two workers on the digits, one thread each, in turn
kills   : two workers on the digits, one of which is killed (SIGKILL) repeatedly, compared with a run without kills
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.per_label import label_runs, lease_queue


def queue(options: argparse.Namespace) -> dict[str, Any]:
    results = lease_queue.measure(options.workers, options.labels, options.seconds, options.model_kb, options.folder)
    print(format_table(lease_queue.COLUMNS, lease_queue.format_rows(results)))
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in results["queue_s"].items())
    cpu = f"{results['queue_cpu_share']:.2%} of it in processor time, {results['queue_cpu_ms_a_label']:.1f} ms a label"
    print(f"queue: {results['queue_share']:.2%} of all workers' time; {cpu}")
    print(f"       seconds over all workers: {parts}; records and model files {results['put_s']:.2f}")
    print(
        f"idle after the first worker without a job (polls every {results['poll_s']:g} s): {results['idle_share']:.1%}"
    )
    return results


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rows in label_runs.measure_scaling(options.kimg, options.repetitions):
        results = {
            "settings": label_runs.PACE_SETTINGS,
            "kimg": options.kimg,
            "rows": rows,
            **label_runs.compare_pace(rows),
        }
        print(rows[-1], flush=True)
        save_json(options.json, {"machine": options.machine, **results})
    print(format_table(("images per second", "1 worker", "2 workers", "ratio"), label_runs.format_rows(results)))
    print(f"bytes exchanged: {results['sent_bytes']:g}")
    return results


def kills(options: argparse.Namespace) -> dict[str, Any]:
    results = label_runs.measure_kills(options.kills, options.kimg, options.every, options.seed)
    print(format_table(("kill", "second", "victim was at"), [tuple(row.values()) for row in results["kills"]]))
    takeovers = [at for starts in results["leases_from"].values() for at in starts[1:]]
    print(f"labels taken over: {len(takeovers)} times, {sum(at > 0 for at in takeovers)} of them from a checkpoint")
    print(format_table(("check", "holds"), list(results["checks"].items())))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (queue, scaling, kills):
        sub = commands.add_parser(command.__name__)
        sub.set_defaults(command=command)
        sub.add_argument("--json", metavar="F")
        if command is queue:
            sub.add_argument("--workers", type=int, default=64)
            sub.add_argument("--labels", type=int, default=1000)
            sub.add_argument("--seconds", type=float, default=3.0, help="a label's emulated compute, in the mean")
            sub.add_argument("--model-kb", type=int, default=64, help="size of a label's part of the model")
            sub.add_argument("--folder", metavar="DIR", help="parent of the run folder (default: that of tempfile)")
        if command is scaling:
            sub.add_argument("--kimg", type=float, default=80.0, help="of all labels together")
            sub.add_argument("--repetitions", type=int, default=5)
        if command is kills:
            sub.add_argument("--kills", type=int, default=20)
            sub.add_argument("--kimg", type=float, default=220.0, help="of all labels together")
            sub.add_argument("--every", type=float, default=1.5, help="mean seconds of work before a kill")
            sub.add_argument("--seed", type=int, default=0, help="of the choice of victims and times")
    options = parser.parse_args()
    options.machine = describe_machine()
    print(format_machine(options.machine))
    results = options.command(options)
    save_json(options.json, {"machine": options.machine, **results})
    if not all(results.get("checks", {}).values()):
        raise SystemExit("a check does not hold")


if __name__ == "__main__":
    main()
