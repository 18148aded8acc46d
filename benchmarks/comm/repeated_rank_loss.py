"""Measure training in which random ranks are killed or frozen again and again.

    python -m benchmarks.comm.repeated_rank_loss [--strategies 'sync,gossip'] [--ranks 8] [--minutes 30] [--period 30]
                                                 [--kinds killed,frozen] [--undisturbed-minutes 3] [--float64]
                                                 [--settings '--batch=32'] [--json F]

The ranks of a run of `digits`, each a process of its own on this machine, train for so many minutes. Once a period, in
seconds, a random one is killed (SIGKILL) and started again, or frozen (SIGSTOP) and woken when the others have gone on
without it. Measured are the longest time without a step after a kill, a freeze and a return, and images per second,
without the start, beside those of undisturbed times: the seconds of the same run from when all ranks were back to the
next loss, and runs before and after. Only the former are of the same minutes, where a machine has other guests.

With --undisturbed-minutes 0 there is one undisturbed run, which trains on as many images, and the relative distance
between the averaged generators of both runs is measured. With --float64 networks are computed in float64, so that
under sync rounding alone makes a distance. Otherwise the digits acceptance scores are measured too.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.comm.rank_loss import STRATEGY_ARGS, RankProcesses, format_cell
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.digits_acceptance import evaluate_run
from paragan.core.jsonl import read_jsonl
from paragan.train.run_dir import RunDir

FLOAT64_ARGS = ("--nets=benchmarks.lib.float64_nets:Float64DCGAN", "--device.precision=float32")
MAX_ABSENCE_S = 60.0  # of a rank that was started again


@dataclass(frozen=True)
class RepeatedLosses:
    """When ranks are lost.

    minutes   : how long the disturbed run trains
    period_s  : seconds from one loss to the next
    timeout_s : after which a rank that does not answer is dropped
    kinds     : killed, frozen
    seed      : of the ranks and the kinds of loss
    """

    minutes: float
    period_s: float
    timeout_s: float
    kinds: Sequence[str]
    seed: int = 0

    def disturb(self, ranks: RankProcesses) -> dict[str, float]:
        """Lose ranks and get them back until the time is over; return the longest pauses and the number of losses."""
        rng = random.Random(self.seed)
        calm = CalmTimes()
        pauses = {"killed": 0.0, "frozen": 0.0, "returned": 0.0}
        losses = 0
        end = time.monotonic() + 60 * self.minutes
        while time.monotonic() + self.period_s < end:
            next_loss = time.monotonic() + self.period_s
            victim = rng.randrange(ranks.size)
            kind = rng.choice(self.kinds)
            process = ranks.processes[victim]
            process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            losses += 1
            pauses[kind] = max(pauses[kind], ranks.longest_pause(max(3 * self.timeout_s, 2)))
            if kind == "killed":
                process.wait()
                ranks.processes[victim] = ranks.start(victim)
            else:
                process.send_signal(signal.SIGCONT)
            pauses["returned"] = max(pauses["returned"], await_return(ranks, victim))
            calm.begin(ranks)
            pauses["returned"] = max(pauses["returned"], ranks.longest_pause(next_loss - time.monotonic()))
            calm.end(ranks)
        times = {f"pause_{kind}_s": pause_s for kind, pause_s in pauses.items()}
        return times | {"losses": losses, "calm_s": calm.seconds, "calm_img_per_s": calm.img_per_s}


class CalmTimes:
    """Times in which all ranks train: from when a rank is back to the next loss."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._kimg = 0.0
        self._start = (0.0, 0.0)  # time, kimg

    def begin(self, ranks: RankProcesses) -> None:
        """Begin with the next step."""
        self._start = await_step(ranks)

    def end(self, ranks: RankProcesses) -> None:
        """End with the next step."""
        now, kimg = await_step(ranks)
        self.seconds += now - self._start[0]
        self._kimg += kimg - self._start[1]

    @property
    def img_per_s(self) -> float:
        """Images per second in these times."""
        return 1000 * self._kimg / self.seconds if self.seconds else 0.0


def await_step(ranks: RankProcesses) -> tuple[float, float]:
    """Wait for the next step; return when it was, and the kimg since the start of the run."""
    kimg = ranks.kimg
    deadline = time.monotonic() + MAX_ABSENCE_S
    while (current := ranks.kimg) == kimg:
        if time.monotonic() > deadline:
            raise SystemExit(f"no step within {MAX_ABSENCE_S:g} s")
        time.sleep(0.005)
    return time.monotonic(), current


def await_return(ranks: RankProcesses, rank: int) -> float:
    """Wait until a rank is a member again; return the longest time without a step."""
    deadline = time.monotonic() + MAX_ABSENCE_S
    longest = 0.0
    while rank not in ranks.members():
        longest = max(longest, ranks.longest_pause(0.5))
        if time.monotonic() > deadline:
            raise SystemExit(f"rank {rank} did not come back within {MAX_ABSENCE_S:g} s")
    return longest


def train_disturbed(run: Path, arguments: list[str], ranks: int, losses: RepeatedLosses) -> dict[str, float]:
    """Train while ranks are lost, and stop with a checkpoint."""
    with closing(RankProcesses(run, [*arguments, "--kimg=1000000"], ranks)) as processes:
        await_progress(processes, 0)
        start, kimg = time.monotonic(), processes.kimg
        measured = losses.disturb(processes)
        seconds, trained = time.monotonic() - start, 1000 * (processes.kimg - kimg)
        processes.processes[0].send_signal(signal.SIGTERM)
        require_statuses(processes, 3)
    steps = [row["Progress/step"] for row in read_jsonl(run / "stats.jsonl")]
    if steps != sorted(set(steps)):
        raise SystemExit("a step has two lines in stats.jsonl")
    return {"img_per_s": trained / seconds, **measured}


def train_undisturbed(run: Path, arguments: list[str], ranks: int, kimg: float) -> float:
    """Train without losses; return images per second."""
    with closing(RankProcesses(run, [*arguments, f"--kimg={kimg}"], ranks)) as processes:
        await_progress(processes, 0)
        start, first = time.monotonic(), processes.kimg
        await_progress(processes, kimg)
        seconds = time.monotonic() - start
        require_statuses(processes, 0)
    return 1000 * (kimg - first) / seconds


def measure_undisturbed(arguments: list[str], ranks: int, minutes: float) -> float:
    """Train without losses for so many minutes, and keep nothing; return images per second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RankProcesses(Path(folder) / "run", [*arguments, "--kimg=1000000"], ranks)) as processes,
    ):
        await_progress(processes, 0)
        start, first = time.monotonic(), processes.kimg
        time.sleep(60 * minutes)
        rate = 1000 * (processes.kimg - first) / (time.monotonic() - start)
        processes.processes[0].send_signal(signal.SIGTERM)
        require_statuses(processes, 3)
    return rate


def await_progress(ranks: RankProcesses, kimg: float) -> None:
    """Wait until a run has trained on so many images, or on its first ones."""
    while not ranks.kimg or ranks.kimg < kimg:
        if any(status := [process.poll() for process in ranks.processes]):
            raise SystemExit(f"the ranks ended with {status}")
        time.sleep(0.05)


def require_statuses(ranks: RankProcesses, status: int) -> None:
    """Wait for all ranks, and end the program if one has ended with another status."""
    statuses = [process.wait() for process in ranks.processes]
    if statuses != [status] * ranks.size:
        raise SystemExit(f"the ranks ended with {statuses}, not all with {status}")


def generator_distance(a: Path, b: Path) -> float:
    """Return the L2 distance of the averaged generators of two runs, relative to the norm of the second."""
    vectors: list[torch.Tensor] = []
    for run in (a, b):
        tensors = safetensors.torch.load_file(run / "model" / "model.safetensors")
        vectors.append(torch.cat([tensors[name].double().flatten() for name in sorted(tensors)]))
    return float((vectors[0] - vectors[1]).norm() / vectors[1].norm())


def measure_strategy(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train the disturbed run of a strategy and the undisturbed ones."""
    timeout = f"--strategy.peer_timeout_s={options.timeout}"
    arguments = [*STRATEGY_ARGS[name], timeout, *options.settings.split(), *(FLOAT64_ARGS if options.float64 else ())]
    kinds = options.kinds.split(",")
    losses = RepeatedLosses(options.minutes, options.period, options.timeout, kinds, options.seed)
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        disturbed, undisturbed = Path(folder) / "disturbed", Path(folder) / "undisturbed"
        if options.undisturbed_minutes:
            rates.append(measure_undisturbed(arguments, options.ranks, options.undisturbed_minutes))
        measured = train_disturbed(disturbed, arguments, options.ranks, losses)
        row = {"strategy": name, "kimg": RunDir(disturbed).trained_images / 1000, **measured}
        if options.undisturbed_minutes:
            rates.append(measure_undisturbed(arguments, options.ranks, options.undisturbed_minutes))
        else:
            rates.append(train_undisturbed(undisturbed, arguments, options.ranks, row["kimg"]))
            row["distance"] = generator_distance(disturbed, undisturbed)
        mean = statistics.mean(rates)
        row |= {"undisturbed_img_per_s": rates, "relative_img_per_s": row["img_per_s"] / mean}
        row["relative_to_calm"] = row["img_per_s"] / row["calm_img_per_s"]
        if not options.float64:  # `paragan sample` does not run networks of a user
            for prefix, run in (("", disturbed), ("undisturbed_", undisturbed)):
                if run.exists():
                    row |= {prefix + key: value for key, value in evaluate_run(str(run)).items()}
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(STRATEGY_ARGS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--period", type=float, default=30, help="seconds from one loss to the next")
    parser.add_argument(
        "--undisturbed-minutes", type=float, default=3, help="of each undisturbed run (3); 0: one of as many images"
    )
    parser.add_argument("--timeout", type=float, default=1, help="strategy.peer_timeout_s, in seconds (1)")
    parser.add_argument("--kinds", default="killed,frozen", help="of losses (killed,frozen)")
    parser.add_argument("--settings", default="", help="more settings of all runs: '--batch=32 --nets.width=256'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    rows: list[dict[str, Any]] = []
    for name in options.strategies.split(","):
        rows.append(measure_strategy(name, options))
        print(rows[-1], flush=True)
        save_json(options.json, {"machine": machine, **settings, "rows": rows})
    print(format_table(list(rows[0]), [[format_cell(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
