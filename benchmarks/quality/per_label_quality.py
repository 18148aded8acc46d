"""Compare one GAN per label with one conditional GAN, at the same budget of training time.

    python -m benchmarks.quality.per_label_quality digits --minutes 4 [--cases "per-label;conditional"] [--json F]
    python -m benchmarks.quality.per_label_quality fashion --data fashion_mnist.npz --minutes 16 [--json F]

`--minutes` is the sum over all workers; there are two, with one thread each. Runs per label divide it between their
labels (`--strategy.minutes`). A conditional GAN is trained on two ranks for half as many minutes: a short run just
before measures how many images that is. Image grids, checkpoints and scores are not counted.

Measured for each case:

* Fréchet distance in pixel space, precision and recall: of 5,000 images with the labels' shares of the data (all), and
  of 500 images of every label against the real ones of that label (label: the mean; worst label);
* of 1,000 images, how many an SVM fitted on real images recognises as the requested label, and their diversity
  (quality.py).
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
from benchmarks.quality.quality import RECIPES, SampleEvaluator, run_paragan
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
    "per label, DC-CGAN": ("--strategy=DC-CGAN", "--policy=dcgan"),  # the same, with D and G on separate ranks
    "conditional": (),
    "conditional, W-CGAN (clipping)": ("--policy=wcgan", *PLAIN_NETS),
    "conditional, W-CGAN (penalty)": ("--policy=wcgan-gp", *PLAIN_NETS),
    "conditional, DCGAN": ("--policy=dcgan",),
}
QUIET_OUTPUT = ("--output.fakes_kimg=1e9", "--output.checkpoint_kimg=1e9", "--evaluation.metrics=[]", "--ranks=2")
PILOT_KIMG = 12
LABEL_IMAGES = 500  # fakes of one label
ALL_IMAGES = 5000  # fakes of all labels
MAX_REALS = 10_000  # the cost of precision and recall grows with the square


def kimg_within(seconds: float, settings: Sequence[str], folder: Path) -> float:
    """Return how many thousand images two ranks process in `seconds`, by the median pace of a pilot run."""
    if not (folder / "stats.jsonl").exists():
        run_paragan("train", *settings, *QUIET_OUTPUT, f"--kimg={PILOT_KIMG}", f"--run-dir={folder}")
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return seconds / statistics.median(line["Timing/sec_per_kimg"] for line in lines[1:])


def train_for(folder: Path, settings: Sequence[str], minutes: float) -> Path:
    """Train a run for its budget, unless it is finished; return its folder."""
    if (folder / "model").exists() and (folder / "report.html").exists():
        return folder
    if any(s.startswith("--strategy=") for s in settings):
        ranks = (
            2 if "--strategy=DC-CGAN" in settings else 1
        )  # ranks that train a label together; otherwise each is a worker
        budget = ("--kimg=1e6", f"--strategy.minutes={minutes / ranks}")
    else:
        budget = (f"--kimg={kimg_within(30 * minutes, settings, folder.with_name(folder.name + '-pilot')):.0f}",)
    run_paragan("train", *settings, *QUIET_OUTPUT, *budget, f"--run-dir={folder}")
    return folder


def scores(model: Model, reals: Dataset) -> dict[str, float]:
    """Return the scores of all labels together, the mean over labels, and the worst label."""
    assert reals.labels is not None
    some = np.random.default_rng(0).permutation(len(reals.images))[:MAX_REALS]
    sampled_labels = model.sampler.labels(range(ALL_IMAGES), 0)
    result = {
        f"all {name}": value
        for name, value in _score_against(model, reals.images[some], sampled_labels, ALL_IMAGES).items()
    }
    each: dict[str, list[float]] = {}
    for label in range(len(reals.classes)):
        label_reals = reals.images[reals.labels == label][: MAX_REALS // 5]
        for name, value in _score_against(model, label_reals, np.full(LABEL_IMAGES, label), LABEL_IMAGES).items():
            each.setdefault(name, []).append(value)
    worst = {"fd": max, "precision": min, "recall": min}
    result |= {f"label {name}": statistics.mean(values) for name, values in each.items()}
    return result | {f"worst label {name}": worst[name](values) for name, values in each.items()}


def _score_against(model: Model, reals: np.ndarray, labels: np.ndarray | None, count: int) -> dict[str, float]:
    images = model.sampler.images(range(count), labels, 0)
    space = pixels(images.shape[-1], images.shape[1])

    results = evaluate(
        lambda rows: images[rows.start : rows.stop], reals, space=space, metrics=["fd", "prdc"], count=count
    )
    values = {one.name.split("_")[0]: one.value for one in results}
    return {name: values[name] for name in ("fd", "precision", "recall")}


def training_progress(folder: Path) -> dict[str, float]:
    """Return the thousands of images and the steps of a run."""
    lines = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return {"kimg": lines[-1]["Progress/kimg"], "steps": lines[-1]["Progress/step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", metavar="PATH")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cases", help="names, separated by ; (default: all)")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--runs", default="runs/labels_quality", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    evaluator = None
    rows: list[dict[str, Any]] = []
    print(format_machine(machine))
    fixed = (*RECIPES[options.recipe], *((f"--data={options.data}",) if options.data else ()))
    for seed in options.seeds.split(","):
        for case in options.cases.split(";") if options.cases else CASES:
            words = (options.recipe, f"{options.minutes:g}", *case.replace(",", "").split(), seed)
            has_policy = "DC" in case or "W-" in case
            settings = (*(_without_rates(fixed) if has_policy else fixed), *CASES[case], f"--seed={seed}")
            folder = train_for(Path(options.runs) / "-".join(words), settings, options.minutes)
            reals = load_dataset(from_dict(Run, read_yaml(folder / "run.yaml")).data)
            evaluator = evaluator or SampleEvaluator(folder)
            rows.append(
                {"case": case, "seed": int(seed), **training_progress(folder), **scores(load_model(folder), reals)}
            )
            rows[-1] |= evaluator.score_run(folder)
            print(rows[-1], flush=True)
            header = {"recipe": options.recipe, "minutes": options.minutes, "settings": fixed, "machine": machine}
            save_json(options.json, {**header, "rows": rows})
    columns = [name for name in rows[0] if name not in ("seed", "steps")]
    print(format_table(tuple(columns), [tuple(_round_digits(row[name]) for name in columns) for row in rows]))


def _without_rates(settings: Sequence[str]) -> list[str]:
    """Drop the settings of the players, which a policy replaces."""
    return [s for s in settings if not s.startswith(("--g.", "--d."))]


def _round_digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
