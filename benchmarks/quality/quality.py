"""Measure what a wire, a topology, a lag or a policy costs in quality, with equal images and seeds for every case.

    python -m benchmarks.quality.quality digits --seeds 0,1,2 [--suite gossip --ranks 4] [--json F]
    python -m benchmarks.quality.quality digits --suite lags --ranks 1 [--json F]
    python -m benchmarks.quality.quality digits --suite periods|outer --ranks 4 [--json F]
    python -m benchmarks.quality.quality digits --suite batches --ranks 1 --every-kimg 10 [--json F]
    python -m benchmarks.quality.quality fashion --data fashion_mnist.npz --seeds 0,1,2 [--json F]
    python -m benchmarks.quality.quality fashion --data fashion_mnist.npz --suite policies --ranks 1 [--json F]
    python -m benchmarks.quality.quality digits --suite paper --ranks 4 [--json F]
    python -m benchmarks.quality.quality sngan|biggan --data fashion_mnist.npz --suite networks [--json F]

Every run is `paragan train` on `--ranks` ranks; a run that exists already is not repeated. Measured for each:

* fd         : Fréchet distance in pixel space
* recognised : share of 1,000 images that an SVM fitted on real images recognises as the requested label
* diversity  : standard deviation of their pixels within a label, relative to that of real images
* seconds    : time of the training rounds
* curve      : kimg and Fréchet distance every `--every-kimg`

The first case of a suite is the baseline of the others: a case is within the spread of the seeds if its median is no
worse than the baseline's worst seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.svm import SVC

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.digits_acceptance import class_diversity
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.core.schema import from_dict, read_yaml
from paragan.optim.policies import POLICIES

ADAM = ("--g.optimizer.betas=[0.5, 0.99]", "--d.optimizer.betas=[0.5, 0.99]")
RECIPES: dict[str, tuple[str, ...]] = {  # what is trained
    "digits": ("digits",),
    "fashion": (  # small enough for many runs
        *("fashion", "--data.resolution=16", "--nets=dcgan", "--nets.width=32", "--kimg=120"),
        *("--g.optimizer.lr=5e-4", "--d.optimizer.lr=1e-3", *ADAM, "--ema.half_life_kimg=5"),
        *("--device.precision=float32", "--device.threads=1"),
    ),
}
SMALL = (  # residual networks, of 32 channels
    *("fashion", "--batch=64", "--lanes=2", "--g.optimizer.lr=5e-4", "--d.optimizer.lr=1e-3", *ADAM),
    *("--ema.half_life_kimg=5", "--device.threads=1"),
)
RECIPES["sngan"] = (*SMALL, "--data.resolution=16", "--kimg=120", "--nets.width=32", "--nets.d_width=32")
RECIPES["biggan"] = (*SMALL, "--kimg=60", "--nets=biggan", "--nets.latent=80", "--nets.width=8", "--nets.d_width=16")
SIGN, INT2, INT4, INT8 = (("--strategy.wire=" + wire,) for wire in ("sign", "int2", "int4", "int8"))
GOSSIP = "--strategy=gossip"
SUITES: dict[str, dict[str, tuple[str, ...]]] = {  # the first case of a suite is the baseline of the others
    "sync": {
        "exact": (),
        "int8": INT8,
        "int4": INT4,
        "int2": INT2,
        "sign": SIGN,
        "int4, feedback 0": (*INT4, "--strategy.feedback=0"),
        "sign, feedback 0": (*SIGN, "--strategy.feedback=0"),
        "sign, feedback 1": (*SIGN, "--strategy.feedback=1"),
    },
    "quantized": {
        "exact": ("--strategy=CPOAdam",),
        "int8": ("--strategy=quantized",),
        "int4": ("--strategy=quantized", *INT4),
        "sign": ("--strategy=quantized", *SIGN),
        "sign, feedback 0": ("--strategy=CPOAdam-GQ", *SIGN),
    },
    "gossip": {
        "CP-OAdam": (
            "--strategy=CP-OAdam",
        ),  # both players at once and optimistic, as gossip, with all gradients summed
        "sync": (),
        "one-peer": (GOSSIP,),
        "ring": (GOSSIP, "--strategy.topology=ring"),
        "random-ring": (GOSSIP, "--strategy.topology=random-ring"),
        "one-peer, int8": (GOSSIP, *INT8),
    },
}
ASYNC = "--strategy=async"


def lag_settings(fakes: int, critic: int, *more: str) -> tuple[str, ...]:
    return (ASYNC, f"--strategy.fake_lags=[{fakes}]", f"--strategy.critic_lags=[{critic}]", *more)


OPTIMISTIC = ("--g.optimizer_wrapper=optimistic", "--d.optimizer_wrapper=optimistic")
PLAIN = ("--g.optimizer_wrapper=none", "--d.optimizer_wrapper=none")
LAGS = ((0, 0), *((lag, 0) for lag in (1, 2, 4, 8, 16)), *((0, lag) for lag in (1, 2, 4, 8, 16)), (1, 1), (2, 2))
SUITES["lags"] = {  # lags in rounds of the fakes and of the critic, on ranks that train both players
    "alternating": (),
    "alternating, optimistic": OPTIMISTIC,
    "simultaneous": ("--strategy.order=simultaneous",),
    **{f"{fakes}, {critic}": lag_settings(fakes, critic) for fakes, critic in LAGS},
    **{f"{fakes}, {critic}, plain": lag_settings(fakes, critic, *PLAIN) for fakes, critic in LAGS},
    "0, 0, uniform": lag_settings(0, 0, "--strategy.replay_policy=uniform"),
    "0, 0, uniform of 16": lag_settings(0, 0, "--strategy.replay_policy=uniform", "--strategy.replay_policy.window=16"),
    "0, 0, replay": lag_settings(0, 0, "--strategy.replay_policy=replay"),
    "0, 0, replay a half": lag_settings(
        0, 0, "--strategy.replay_policy=replay", "--strategy.replay_policy.fraction=0.5"
    ),
}
PERIOD_2 = "--strategy.sync_period=2"
SUITES["async"] = {  # teams, with --ranks 2 or more (4 for those with a split or a period)
    "sync, optimistic": OPTIMISTIC,
    "sync": (),
    "sync, optimistic, period 2": (*OPTIMISTIC, PERIOD_2),  # as many bytes as two teams
    "batches 1:1, period 2": (ASYNC, PERIOD_2),
    "batches 1:1": (ASYNC,),
    "batches 2:1": (ASYNC, "--g_batch=256"),
    **{f"lead {lead}": (ASYNC, f"--strategy.max_lead_rounds={lead}") for lead in (2, 4, 8)},
    **{
        f"{split}, lead 2": (ASYNC, f"--strategy.split={split}", "--strategy.max_lead_rounds=2")
        for split in ("1:3", "2:2", "3:1")
    },
    "snapshots of every fourth D": (ASYNC, "--strategy.snapshot_every=4"),
}
SUITES["periods"] = {  # with --ranks 4
    "sync": (),
    **{
        f"{mode}, period {period}": (f"--strategy.sync_mode={mode}", f"--strategy.sync_period={period}")
        for mode in ("parameters", "gradients", "accumulate")
        for period in (2, 4, 8)
    },
}
LOCAL = ("--strategy.sync_period=32",)
STREAMING = (*LOCAL, "--strategy.fragments=4", "--strategy.delay=8")
NESTEROV, FEW_BITS = "--strategy.outer=nesterov", ("--strategy.wire=topk", "--strategy.wire.bits=2")
SUITES["outer"] = {  # with --ranks 4: long periods, and what is done with their change
    "sync": (),
    **{f"period {period}": (f"--strategy.sync_period={period}",) for period in (8, 32, 128)},
    "period 32, int4": (*LOCAL, "--strategy.wire=int4"),
    "period 32, 4 fragments": (*LOCAL, "--strategy.fragments=4"),
    "period 32, 4 fragments, delay 8": STREAMING,
    "period 32, 4 fragments, delay 8, int4": (*STREAMING, "--strategy.wire=int4"),
    "period 32, Nesterov": (*LOCAL, NESTEROV, "--strategy.outer.momentum=0.5"),
    "period 32, DiLoCo": (*LOCAL, NESTEROV),  # lr 0.7, momentum 0.9
    "period 32, DiLoCo for G": (*LOCAL, NESTEROV, "--strategy.outer_d=mean"),
    "period 32, topk 2 bits": (*LOCAL, *FEW_BITS),
    "period 32, SparseLoCo": (*LOCAL, *FEW_BITS, "--strategy.wire.fraction=0.02", "--strategy.feedback=0.95"),
}
SUITES["batches"] = {  # images of G's batch for each of D's
    "sync, 1:1": (),
    "sync, 2:1": ("--batch=64", "--g_batch=128"),
    "async, 1:1": (ASYNC,),
    "async, 2:1": (ASYNC, "--batch=64", "--g_batch=128"),
}
ADABELIEF_G, ADABELIEF_D = (  # at the rates and betas of "fashion"; another optimizer begins with its defaults
    (
        *(f"--{player}.optimizer=adabelief", f"--{player}.optimizer.eps=1e-12"),
        *(f"--{player}.optimizer.lr={lr}", f"--{player}.optimizer.betas=[0.5, 0.99]"),
    )
    for player, lr in (("g", "5e-4"), ("d", "1e-3"))
)
SUITES["optimizers"] = {  # of G and D
    "Adam, Adam": (),
    "AdaBelief, Adam": ADABELIEF_G,  # ParaGAN's choice
    "Adam, AdaBelief": ADABELIEF_D,
    "AdaBelief, AdaBelief": (*ADABELIEF_G, *ADABELIEF_D),
}
SUITES["policies"] = {
    "recipe": (),
    **{name: (f"--policy={name}",) for name in POLICIES},
    **{f"{name}, rates of the recipe": (f"--policy={name}",) for name in POLICIES},
}
SUITES["paper"] = {  # the papers' own updates, plain optimistic gradient steps
    "sync": (),
    "DPOSG": ("--strategy=DPOSG", "--policy=dposg", "--batch=64"),
    "DQGAN": ("--strategy=quantized", "--strategy.paper_update=true", "--policy=dqgan", "--batch=64"),
}
SUITES["networks"] = {"float32": ("--device.precision=float32",), "bf16": ("--device.precision=bf16",)}


def drop_rates(settings: Sequence[str], case: str) -> list[str]:
    """Drop a recipe's settings of the players if the case is a policy, which replaces them."""
    is_policy = case.lower() in POLICIES
    return [s for s in settings if not is_policy or not s.startswith(("--g.", "--d."))]


BETTER_SIGN = {"fd": -1, "recognised": 1, "diversity": 1}
MAX_FIT_IMAGES = 10_000  # real images that the SVM is fitted on


def run_paragan(*arguments: str) -> None:
    """Run a command of paragan. If it fails, which it says itself, end with its exit status."""
    done = subprocess.run([sys.executable, "-m", "paragan", *arguments], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)


def train_run(folder: Path, settings: Sequence[str], ranks: int) -> Path:
    """Train a run, unless it is finished; return its folder."""
    if not (folder / "report.html").exists():
        fixed = (f"--ranks={ranks}", "--evaluation.metrics=fd", "--output.checkpoint_kimg=1e9", f"--run-dir={folder}")
        run_paragan("train", *settings, *fixed)
    return folder


class SampleEvaluator:
    """Scores generated images by the real images of a run."""

    def __init__(self, run_dir: Path):
        record = read_yaml(run_dir / "run.yaml")
        reals = load_dataset(from_dict(Run, record).data)
        assert reals.labels is not None
        self.images, self.labels = reals.images.squeeze(-1), reals.labels
        some = np.random.default_rng(0).permutation(len(self.images))
        fitted, self.held_out = some[:MAX_FIT_IMAGES], some[MAX_FIT_IMAGES:][:1000]
        self.svm = SVC(C=10).fit(_flatten(self.images[fitted]), self.labels[fitted])

    @property
    def real_accuracy(self) -> float | None:
        """Accuracy of the SVM on real images that it was not fitted on; None if there are none."""
        if not len(self.held_out):
            return None
        return float((self.svm.predict(_flatten(self.images[self.held_out])) == self.labels[self.held_out]).mean())

    def score_samples(self, run_dir: Path) -> dict[str, float]:
        """Return the share of recognised images among 1,000, and their diversity."""
        images, labels = sample_images(run_dir)
        return {
            "recognised": float((self.svm.predict(_flatten(images)) == labels).mean()),
            "diversity": class_diversity(images, labels) / class_diversity(self.images, self.labels),
        }

    def score_run(self, run_dir: Path) -> dict[str, Any]:
        """Return the scores of the finished run, and the curve of the Fréchet distance if there is one."""
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        curve = [(row["kimg"], row["value"]) for row in rows if row["name"].startswith("fd")]
        scores: dict[str, Any] = {
            "seconds": round_seconds(run_dir),
            "fd": curve[-1][1],
            **self.score_samples(run_dir),
        }
        if len(curve) > 1:
            scores["curve"] = curve
        return scores


def round_seconds(run_dir: Path) -> float:
    """Return the seconds of the training rounds, without start, image grids and scores."""
    lines = [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]
    kimg = [0.0, *(line["Progress/kimg"] for line in lines)]
    return sum((now - then) * line["Timing/sec_per_kimg"] for line, then, now in zip(lines, kimg, kimg[1:]))


def _flatten(images: NDArray[Any]) -> NDArray[np.float64]:
    return images.reshape(len(images), -1) / 255.0


def sample_images(run_dir: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Generate images [1000, R, R], 100 of each label, and return them with their labels."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/samples.npz"
        run_paragan("sample", str(run_dir), "--labels=0,1,2,3,4,5,6,7,8,9", "--count=1000", f"--out={out}")
        data = np.load(out)
        return data["images"][..., 0], data["labels"]


def is_within_spread(rows: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]) -> dict[str, bool]:
    """Return whether the median of each score is no worse than the worst seed of the reference."""
    within = {}
    for name, sign in BETTER_SIGN.items():
        worst = min(sign * row[name] for row in reference)
        within[name] = statistics.median(sign * row[name] for row in rows) >= worst
    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", metavar="PATH")
    parser.add_argument("--suite", choices=SUITES, default="sync", help="the cases that are compared (SUITES)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", help="names, separated by ; (default: all)")
    parser.add_argument("--more", default="", help="more settings for every case: '--g.optimizer.lr=1e-3 ...'")
    parser.add_argument("--called", default="", help="suffix of the case names for --more: 'twice the rates'")
    parser.add_argument("--every-kimg", type=float, default=0, help="score so often, for a curve (0: at the end)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="runs/quality", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    evaluator = None
    print(format_machine(machine))
    data = (f"--data={options.data}",) if options.data else ()
    fixed = (*RECIPES[options.recipe], *data)
    cases = SUITES[options.suite]
    chosen = options.cases.split(";") if options.cases else list(cases)
    if unknown := [case for case in chosen if case not in cases]:
        parser.error(f"--cases: suite {options.suite} has no {unknown[0]}. It has {'; '.join(cases)}")
    results: dict[str, Any] = {"recipe": options.recipe, "suite": options.suite, "ranks": options.ranks}
    named_data = (f"--data={Path(options.data).name}",) if options.data else ()  # without a path of this machine
    results |= {"settings": (*RECIPES[options.recipe], *named_data), "machine": machine}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        for case in chosen:
            name = f"{case}, {options.called}" if options.called else case
            words = (options.recipe, options.suite, str(options.ranks), *name.replace(",", "").split(), seed)
            settings = (*drop_rates(fixed, case), *cases[case], *options.more.split(), f"--seed={seed}")
            settings = (*settings, f"--evaluation.every_kimg={options.every_kimg}")
            run_dir = train_run(Path(options.runs) / "-".join(words), settings, options.ranks)
            evaluator = evaluator or SampleEvaluator(run_dir)
            rows.append({"case": name, "seed": int(seed), **evaluator.score_run(run_dir)})
            print(rows[-1], flush=True)
            results |= {"real images recognised": evaluator.real_accuracy, "rows": rows, "cases": summarize(rows)}
            save_json(options.json, results)
    print(
        format_table(
            ("case", *BETTER_SIGN, "within"), [summary_line(case, about) for case, about in summarize(rows).items()]
        )
    )


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return [lowest, median, highest] of each score by case, and whether it is within the first case's spread."""
    cases = {row["case"]: [r for r in rows if r["case"] == row["case"]] for row in rows}
    about: dict[str, Any] = {}
    for case, case_rows in cases.items():
        about[case] = {
            name: [f(row[name] for row in case_rows) for f in (min, statistics.median, max)] for name in BETTER_SIGN
        }
        about[case]["within"] = is_within_spread(case_rows, next(iter(cases.values())))
    return about


def summary_line(case: str, about: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [f"{about[n][1]:.3g} [{about[n][0]:.3g}, {about[n][2]:.3g}]" for n in BETTER_SIGN]
    within = about["within"]
    outside = [name for name, inside in within.items() if not inside]
    return (case, *cells, f"not {', '.join(outside)}" if outside else "yes")


if __name__ == "__main__":
    main()
