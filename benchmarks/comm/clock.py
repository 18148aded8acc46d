"""Score against seconds and against bytes: real training to its end, over emulated links between paced hosts.

    python -m benchmarks.comm.clock --dry-run                                  what each run takes, and all together
    sudo python -m benchmarks.comm.clock --games digits --hosts 4 --json F [--figure G]
    sudo python -m benchmarks.comm.clock --games fashion --data fashion_mnist.npz --hosts 4,8 --seeds 0,1,2 --json F
    python -m benchmarks.comm.clock --report --json F [--figure G]             the table and the plot of what F has
    python -m benchmarks.comm.clock --choose --hosts 4,8 --json F              what `paragan plan` chooses for each link
    sudo python -m benchmarks.comm.clock --ways dqgan --hosts 1,2,4,8 --images-per-host 16 --json F       speed-up

Run it on an idle machine. A host is a network namespace with a link of its own (benchmarks/lib/netns_lab.py) and an
emulated device that takes `--pace-ms` for a round of `sync` (benchmarks/lib/paced_host.py); other ways compute as much
longer or shorter as they do here. Seconds are those of training: start, scores and model files are left out on all
hosts. Bytes are those that exchanges count, of the host that sends most. A run in which this machine was too slow for
the pace is marked as invalid; so hosts of several runs (`--jobs`) may share it where it is fast enough for all.

Every finished run is a row of F; the same command goes on with the others. Ways, and groups of them: WAYS and GROUPS in
benchmarks/comm/clock_grid.py. `--dry-run` measures what a host computes, unless F has it, and predicts the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.comm.clock_grid import GROUPS, KIMG, LINKS, PACES_MS, WAYS, Cost, Grid, Job, make_jobs, parse_ways
from benchmarks.comm.clock_summary import BASELINE, format_summary, summarize_rows
from benchmarks.lib.paced_host import CLOCK_FILE
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import SampleEvaluator
from paragan.core.errors import UsageError
from paragan.core.jsonl import read_jsonl
from paragan.plan.profile.profile import profile_to_yaml

MAX_LATE_ROUNDS = 0.03  # of all; a run with more is invalid
TIMEOUT_FACTOR, TIMEOUT_S = 3.0, 600.0  # on the expected time of a run, and in addition


def train_in_lab(job: Job, grid: Grid, settings: Sequence[str], folder: Path, timeout_s: float) -> bool:
    """Train a run in a laboratory, unless it is finished. Returns whether it succeeded."""
    if (folder / "report.html").exists():
        return True
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off: it begins again, and so do its seconds
    with tempfile.TemporaryDirectory() as temporary:
        profile = Path(temporary) / "profile.yaml"
        profile.write_text(profile_to_yaml(grid.profile(job)))
        command = [
            *(sys.executable, "-m", "benchmarks.lib.netns_lab", *job.lab_options, f"--timeout={timeout_s:.0f}"),
            *(f"--logs={folder}-logs", "--", sys.executable, "-m", "benchmarks.lib.paced_host", f"--profile={profile}"),
            *("--", *settings, f"--seed={job.seed}", f"--run-dir={folder}"),
        ]
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def read_row(job: Job, folder: Path, evaluator: SampleEvaluator) -> dict[str, Any]:
    """Return the scores of a finished run, and its curve: kimg, fd, seconds, bytes of the busiest host, of all."""
    scores = evaluator.score_run(folder)
    times = {line["kimg"]: line for line in read_jsonl(folder / CLOCK_FILE)}
    last = max(times.values(), key=lambda line: line["kimg"])
    fd = scores.pop("curve", [(last["kimg"], scores["fd"])])
    curve = [
        (kimg, value, *(times[kimg][name] for name in ("seconds", "sent_bytes", "sent_bytes_all")))
        for kimg, value in fd
    ]
    late = last["late_rounds"] / last["rounds"]
    measured = {name: last[name] for name in ("seconds", "sent_bytes", "sent_bytes_all", "kernel_bytes", "rounds")}
    checks = {"late_rounds": late, "late_s": last["late_s"], "valid": late <= MAX_LATE_ROUNDS}
    return {**job.key, **scores, **measured, **checks, "curve": curve}


def describe_costs(jobs: Sequence[Job], grid: Grid) -> dict[Job, Cost]:
    """Print what every run is expected to take. Returns the costs of those that a strategy can run."""
    seeds = len({job.seed for job in jobs})
    first = {dataclasses.replace(job, seed=jobs[0].seed): None for job in jobs}
    costs: dict[Job, Cost] = {}
    refused: dict[str, str] = {}
    for job in first:
        try:
            costs[job] = grid.cost(job)
        except UsageError as error:
            refused[job.way] = str(error)
    lines = [
        (
            *(job.way, job.game, str(job.hosts), job.link, f"{cost.round_s:.3f}", f"{cost.sent_bytes / 1e6:.3g}"),
            *(str(cost.rounds), f"{cost.wall_s / 3600:.2f}"),
        )
        for job, cost in costs.items()
    ]
    print(format_table(("way", "game", "hosts", "link", "s a round", "MB a round", "rounds", "hours a seed"), lines))
    for way, reason in refused.items():
        print(f"{way}: left out: {reason}")
    hours = seeds * sum(cost.wall_s for cost in costs.values()) / 3600
    print(f"{len(costs) * seeds} runs, {hours:.1f} hours", flush=True)
    by_seed = ((job, costs.get(dataclasses.replace(job, seed=jobs[0].seed))) for job in jobs)
    return {job: cost for job, cost in by_seed if cost}


def plan_links(options: argparse.Namespace, grid: Grid) -> list[dict[str, Any]]:
    """Return what `paragan plan` ranks first and second on every link, and `sync`, for the games at their paces."""
    plans: list[dict[str, Any]] = []
    for job in make_selected_jobs(options, [BASELINE]):
        rows = grid.plan(job).rows
        sync = next(row for row in rows if row.name == BASELINE)
        chosen = {"first": rows[0], "second": rows[1], BASELINE: sync}
        plans.append(
            {"game": job.game, "hosts": job.hosts, "link": job.link, "kimg": job.kimg, "pace_ms": job.pace_ms}
            | {
                place: {"strategy": row.name, "seconds": 3600 * row.hours, "images_factor": row.images_factor}
                for place, row in chosen.items()
            }
        )
    return plans


def format_plans(plans: Sequence[Mapping[str, Any]]) -> str:
    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['strategy']}: {row['seconds']:,.0f} s, {row['images_factor']:.2f} times the images"

    rows = [
        (plan["game"], str(plan["hosts"]), plan["link"], *map(cell, (plan["first"], plan["second"], plan[BASELINE])))
        for plan in plans
    ]
    return format_table(("game", "hosts", "link", "first", "second", "sync"), rows)


def run_jobs(costs: Mapping[Job, Cost], grid: Grid, results: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Train and score what the results lack, and save them after every run. Returns the folders of failed runs."""
    rows: list[dict[str, Any]] = results["rows"]
    evaluators: dict[str, SampleEvaluator] = {}
    failed: list[str] = []
    scoring = threading.Lock()

    def run(job: Job, cost: Cost) -> None:
        folder = Path(options.runs).absolute() / job.folder
        name = f"{job.way}, {job.game}, {job.hosts} hosts, {job.link}, seed {job.seed}"
        print(name, flush=True)
        if not train_in_lab(job, grid, grid.settings(job), folder, TIMEOUT_S + TIMEOUT_FACTOR * cost.wall_s):
            failed.append(f"{folder}-logs")
            print(f"{name}: failed; see {failed[-1]}", flush=True)
            return
        with scoring:
            if job.game not in evaluators:
                evaluators[job.game] = SampleEvaluator(folder)
            row = read_row(job, folder, evaluators[job.game])
            rows.append(row | {"expected_s": cost.round_s * cost.rounds, "runs_at_once": options.jobs})
            save_results(options.json, results)
        print(name, {name: value for name, value in row.items() if name != "curve" and name not in job.key}, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        missing = [job for job in costs if not any(row.items() >= job.key.items() for row in rows)]
        for done in [pool.submit(run, job, costs[job]) for job in missing]:
            done.result()
    return failed


def save_results(file: str | None, results: dict[str, Any]) -> None:
    save_json(file, results | {"summary": summarize_rows(results["rows"])})


def read_results(file: str | None) -> dict[str, Any]:
    if file and Path(file).exists():
        return json.loads(Path(file).read_text())
    return {"machine": describe_machine(), "max_late_rounds": MAX_LATE_ROUNDS, "profiles": {}, "rows": []}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default="digits", help="digits,fashion (digits)")
    parser.add_argument("--data", metavar="PATH", help="of fashion")
    parser.add_argument("--hosts", default="4", metavar="N,N", help="numbers of hosts (4)")
    parser.add_argument("--links", default="; ".join(LINKS), metavar="'L; L'", help=f"({'; '.join(LINKS)})")
    parser.add_argument(
        "--ways", default="grid", metavar="'W;W'", help=f"{'; '.join(GROUPS)}; {'; '.join(WAYS)} (grid)"
    )
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--kimg", type=float, help="length of the runs (160 of digits, 120 of fashion)")
    parser.add_argument("--pace-ms", type=float, help="of a round of sync on a host (100 of digits, 250 of fashion)")
    parser.add_argument("--images-per-host", type=int, default=0, help="of a step; 0: the batch of the recipe")
    parser.add_argument("--every-kimg", type=float, default=10.0, help="score so often (10)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at once: on slow links, where processors mostly wait (1)"
    )
    parser.add_argument("--runs", default="runs/clock", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F", help="results: finished runs are not repeated")
    parser.add_argument("--figure", metavar="G", help="draw the results of --json")
    parser.add_argument("--dry-run", action="store_true", help="print what the runs take; train nothing")
    parser.add_argument(
        "--choose",
        action="store_true",
        help="save and print which strategies `paragan plan` ranks first; train nothing",
    )
    parser.add_argument("--report", action="store_true", help="only print and draw what --json has")
    options = parser.parse_args()
    if unknown := set(options.games.split(",")) - KIMG.keys():
        parser.error(f"--games: there is no {unknown.pop()}. Use {','.join(KIMG)}")
    if options.jobs < 1:
        parser.error(f"--jobs: {options.jobs} is too few; use 1")
    if options.report and not options.json:
        parser.error("--report needs --json F")
    if not (options.dry_run or options.report or options.choose) and os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo, or with --dry-run")
    return options


def make_selected_jobs(options: argparse.Namespace, ways: Sequence[str]) -> list[Job]:
    """Return the jobs of these ways that the options select."""
    games = options.games.split(",")
    return make_jobs(
        games,
        [int(text) for text in options.hosts.split(",")],
        [link.strip() for link in options.links.split(";")],
        ways,
        [int(text) for text in options.seeds.split(",")],
        {game: options.kimg or KIMG[game] for game in games},
        {game: options.pace_ms or PACES_MS[game] for game in games},
        options.images_per_host,
    )


def main() -> int:
    options = parse_options()
    results = read_results(options.json)
    print(format_machine(results["machine"]))
    failed: list[str] = []
    if not options.report:
        grid = Grid(options.data, options.every_kimg, results["profiles"])
        if options.choose:
            results["plans"] = plan_links(options, grid)
            save_results(options.json, results)
            print(format_plans(results["plans"]))
            return 0
        costs = describe_costs(make_selected_jobs(options, parse_ways(options.ways)), grid)
        save_results(options.json, results)  # with the profiles
        if not options.dry_run:
            failed = run_jobs(costs, grid, results, options)
    if results["rows"]:
        print(format_summary(summarize_rows(results["rows"])))
        if options.figure:
            from benchmarks.plots import plot_clock, save_plot

            save_plot(lambda: plot_clock(results["rows"]), Path(options.figure))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"clock: {error}")
