"""A game for every label against one conditional GAN, at the same budget of training time.

    python -m benchmarks.quality.per_label_quality digits --minutes 4 [--cases "per-label;conditional"] [--json F]
    python -m benchmarks.quality.per_label_quality fashion --data fashion_mnist.npz --minutes 16 [--json F]

`--minutes` are of all workers together; there are two, each with one thread. Per label, the games share them out
(`--strategy.minutes`). A conditional GAN is trained on two ranks for as many images as they see in half of them, by the
pace of a short run just before. Grids, checkpoints and scores are not counted.

Asked about each, of 5,000 images as often of each label as in the data (all), and of 500 of every label against the
real ones of that label (label: the mean; worst label): Fréchet distance in pixel space, precision and recall; and how
many of 1,000 an SVM fitted on real images recognises as what was asked for, and their diversity (quality.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import RECIPES, SampleJudge, run_paragan
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.core.schema import from_dict, read_yaml
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import evaluate
from paragan.eval.features import pixels
from paragan.models.model import Model, load_model

PER_LABEL = "--strategy=per-label"
PLAIN_NETS = ("--nets.spectral=false",)
CASES: dict[str, tuple[str, ...]] = {
    "per label": (PER_LABEL,),
    "per label, W-CGAN (clipping)": (PER_LABEL, "--policy=wcgan", *PLAIN_NETS),
    "per label, W-CGAN (penalty)": (PER_LABEL, "--policy=wcgan-gp", *PLAIN_NETS),
    "per label, DCGAN": (PER_LABEL, "--policy=dcgan"),
    "per label, DC-CGAN": ("--strategy=DC-CGAN", "--policy=dcgan"),  # the same, D and G on a rank each
    "conditional": (),
    "conditional, W-CGAN (clipping)": ("--policy=wcgan", *PLAIN_NETS),
    "conditional, W-CGAN (penalty)": ("--policy=wcgan-gp", *PLAIN_NETS),
    "conditional, DCGAN": ("--policy=dcgan",),
}
QUIET_OUTPUT = ("--output.fakes_kimg=1e9", "--output.checkpoint_kimg=1e9", "--evaluation.metrics=[]", "--ranks=2")
PILOT_KIMG = 12
FEW_IMAGES, MANY_IMAGES = 500, 5000  # fakes of a label, and of all
MAX_REALS = 10_000  # reals that are looked at, at most: precision and recall cost their square


def kimg_within(seconds: float, settings: Sequence[str], folder: Path) -> float:
    """Thousands of images that two ranks see in so long."""
    if not (folder / "stats.jsonl").exists():
        run_paragan("train", *settings, *QUIET_OUTPUT, f"--kimg={PILOT_KIMG}", f"--run-dir={folder}")
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return seconds / statistics.median(line["Timing/sec_per_kimg"] for line in lines[1:])


def train_for(folder: Path, settings: Sequence[str], minutes: float) -> Path:
    """A run that had its budget."""
    if (folder / "model").exists() and (folder / "report.html").exists():
        return folder
    if any(s.startswith("--strategy=") for s in settings):
        ranks = 2 if "--strategy=DC-CGAN" in settings else 1  # of a label: each is a worker of its own
        budget = ("--kimg=1e6", f"--strategy.minutes={minutes / ranks}")
    else:
        budget = (f"--kimg={kimg_within(30 * minutes, settings, folder.with_name(folder.name + '-pilot')):.0f}",)
    run_paragan("train", *settings, *QUIET_OUTPUT, *budget, f"--run-dir={folder}")
    return folder


def scores(model: Model, reals: Dataset) -> dict[str, float]:
    """Of all labels together, and of each against its own."""
    assert reals.labels is not None
    some = np.random.default_rng(0).permutation(len(reals.images))[:MAX_REALS]
    drawn = model.sampler.labels(range(MANY_IMAGES), 0)
    found = {
        f"all {name}": value for name, value in _score_against(model, reals.images[some], drawn, MANY_IMAGES).items()
    }
    each: dict[str, list[float]] = {}
    for label in range(len(reals.classes)):
        mine = reals.images[reals.labels == label][: MAX_REALS // 5]
        for name, value in _score_against(model, mine, np.full(FEW_IMAGES, label), FEW_IMAGES).items():
            each.setdefault(name, []).append(value)
    worst = {"fd": max, "precision": min, "recall": min}
    found |= {f"label {name}": statistics.mean(values) for name, values in each.items()}
    return found | {f"worst label {name}": worst[name](values) for name, values in each.items()}


def _score_against(model: Model, reals: np.ndarray, labels: np.ndarray | None, count: int) -> dict[str, float]:
    images = model.sampler.images(range(count), labels, 0)
    space = pixels(images.shape[-1], images.shape[1])

    found = evaluate(
        lambda rows: images[rows.start : rows.stop], reals, space=space, metrics=["fd", "prdc"], count=count
    )
    values = {one.name.split("_")[0]: one.value for one in found}
    return {name: values[name] for name in ("fd", "precision", "recall")}


def training_progress(folder: Path) -> dict[str, float]:
    """How much was trained."""
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return {"kimg": lines[-1]["Progress/kimg"], "steps": lines[-1]["Progress/step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", metavar="PATH")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cases", help="names, separated by ; (default: all)")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--runs", default="runs/labels_quality", metavar="DIR", help="where the runs are")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about, judge, rows = describe_machine(), None, list[dict[str, Any]]()
    print(format_machine(about))
    fixed = (*RECIPES[options.recipe], *((f"--data={options.data}",) if options.data else ()))
    for seed in options.seeds.split(","):
        for case in options.cases.split(";") if options.cases else CASES:
            words = (options.recipe, f"{options.minutes:g}", *case.replace(",", "").split(), seed)
            own = () if "DC" not in case and "W-" not in case else _without_rates(fixed)
            settings = (*(own or fixed), *CASES[case], f"--seed={seed}")
            folder = train_for(Path(options.runs) / "-".join(words), settings, options.minutes)
            reals = load_dataset(from_dict(Run, read_yaml(folder / "run.yaml")).data)
            judge = judge or SampleJudge(folder)
            rows.append(
                {"case": case, "seed": int(seed), **training_progress(folder), **scores(load_model(folder), reals)}
            )
            rows[-1] |= judge.score_run(folder)
            print(rows[-1], flush=True)
            found = {"recipe": options.recipe, "minutes": options.minutes, "settings": fixed, "machine": about}
            save_json(options.json, {**found, "rows": rows})
    shown = [name for name in rows[0] if name not in ("seed", "steps")]
    print(format_table(tuple(shown), [tuple(_round_digits(row[name]) for name in shown) for row in rows]))


def _without_rates(settings: Sequence[str]) -> list[str]:
    """Where a policy says how the players learn."""
    return [s for s in settings if not s.startswith(("--g.", "--d."))]


def _round_digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
