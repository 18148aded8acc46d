"""Train a small diffusion model, distil it into one step in several ways, and score all of them.

    python -m benchmarks.quality.distillation digits [--seeds 0,1,2] [--json F]
    python -m benchmarks.quality.distillation fashion|cifar --data NPZ ... [--cases 'DMD2;DMD2 without GAN'] [--json F]

The teacher samples with 18 steps of Heun (35 evaluations), a student with one evaluation. Cases: DMD2 with its GAN loss
and without, the GAN loss alone, and DMD2 on two ranks, exact, in int8 and by gossip. Students of all seeds start from
the one teacher. Scores of the digits: Fréchet distance in pixels, and the acceptance test (benchmarks/quality/
digits_acceptance.py); of the others: Fréchet distance in the features of a ResNet-20 trained on the data, and how many
of the images it recognises as the requested class. Samplers are timed in turns, in batches of 100.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paragan as pg
from benchmarks.lib.timing import describe_machine, format_machine, format_table, interleave, repeat_fn, save_json
from benchmarks.quality.digits_acceptance import evaluate_run
from benchmarks.quality.equal_time import join_parts
from benchmarks.quality.quality import round_seconds, run_paragan
from paragan.core.jsonl import read_jsonl


@dataclass(frozen=True)
class Setting:
    """The settings and lengths of training on a data set.

    shared       : settings of the teacher and of the students
    teacher_kimg : length of the teacher's training
    student_kimg : and of a student's
    """

    shared: tuple[str, ...]
    teacher_kimg: float
    student_kimg: float


SMALL_UNET = ("--nets.widths=[32,64]", "--nets.blocks=1")
RESOLUTION = ("--data.resolution=32", "--nets.widths=[32,64,64]", "--nets.blocks=1", "--batch=64")
SETTINGS = {
    "digits": Setting((*SMALL_UNET, "--batch=128"), 100.0, 240.0),
    "fashion": Setting((*RESOLUTION, "--data.channels=1"), 200.0, 60.0),
    "cifar": Setting((*RESOLUTION, "--data.channels=3", "--data.mirror=true"), 200.0, 60.0),
}
WITHOUT_GAN = ("--objective.adversarial=0", "--objective.d_adversarial=0")
TWO_RANKS = ("--ranks=2",)
CASES: dict[str, tuple[str, ...]] = {
    "DMD2": (),
    "DMD2 without GAN": WITHOUT_GAN,
    "GAN alone": ("--objective.matching=0",),
    "DMD2, 2 ranks": TWO_RANKS,
    "DMD2, 2 ranks, int8": (*TWO_RANKS, "--strategy.wire=int8"),
    "DMD2, 2 ranks, gossip": (*TWO_RANKS, "--strategy=gossip"),
}
QUIET_OUTPUT = ("--evaluation.metrics=[]", "--output.checkpoint_kimg=1e9", "--output.fakes_kimg=1e9")
COUNT = 5000  # scored images
TIMED_IMAGES, TIMED_ROUNDS = 100, 7


def train(folder: Path, settings: Sequence[str], kimg: float) -> Path:
    """Train a run, unless it is finished; return its folder."""
    if not (folder / "report.html").exists():
        run_paragan("train", *settings, *QUIET_OUTPUT, f"--kimg={kimg:g}", f"--run-dir={folder}")
    return folder


def score(folder: Path, data_set: str) -> dict[str, float]:
    """Return the scores of a run, and its seconds of training."""
    space, metrics = ("pixels", "fd") if data_set == "digits" else ("resnet20", "fd,accuracy")
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of an earlier attempt to score it
    run_paragan("eval", str(folder), f"--features={space}", f"--metrics={metrics}", f"--count={COUNT}")
    scores = {row["name"]: row["value"] for row in read_jsonl(folder / "metrics.jsonl")}
    accepted = evaluate_run(str(folder)) if data_set == "digits" else {}
    return {**scores, **accepted, "train_s": round_seconds(folder)}


def time_samplers(teacher: Path, student: Path) -> dict[str, Any]:
    """Time both samplers, in milliseconds for TIMED_IMAGES images."""
    models = {name: pg.load(folder) for name, folder in (("teacher", teacher), ("student", student))}
    samplers = {name: repeat_fn(lambda model=model: model.sample(TIMED_IMAGES)) for name, model in models.items()}
    return interleave(samplers, rounds=TIMED_ROUNDS, steps=1).to_json("student")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=SETTINGS)
    parser.add_argument("--data", nargs="+", metavar="NPZ", help="of fashion and cifar")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--teacher-kimg", type=float)
    parser.add_argument("--student-kimg", type=float)
    parser.add_argument("--more", default="", help="more settings of the students: '--g.optimizer.lr=2e-4 ...'")
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), metavar="DIR")
    parser.add_argument("--json", metavar="F", help="results: finished cases are not repeated")
    options = parser.parse_args()
    if (options.data_set == "digits") == bool(options.data):
        parser.error("--data is for fashion and cifar, which need it")
    setting = SETTINGS[options.data_set]
    teacher_kimg = options.teacher_kimg or setting.teacher_kimg
    student_kimg = options.student_kimg or setting.student_kimg
    data = "digits"
    if options.data:
        data = str(join_parts(options.data, options.runs / f"{options.data_set}.npz"))
    shared = (f"--data={data}", *setting.shared, "--device.precision=float32")
    results: dict[str, Any] = {"data_set": options.data_set, "settings": setting.shared, "more": options.more}
    results |= {"teacher_kimg": teacher_kimg, "student_kimg": student_kimg, "machine": describe_machine(), "rows": []}
    if options.json and Path(options.json).exists():
        results = json.loads(Path(options.json).read_text())
    print(format_machine(results["machine"]))
    teacher_settings = ("diffusion", *shared, "--ema.half_life_kimg=10")
    teacher = train(options.runs / f"{options.data_set}-teacher", teacher_settings, teacher_kimg)
    if "teacher" not in results:
        results["teacher"] = score(teacher, options.data_set)
        save_json(options.json, results)
    print("teacher", results["teacher"], flush=True)
    rows: list[dict[str, Any]] = results["rows"]
    for seed in map(int, options.seeds.split(",")):
        for case in options.cases.split(";"):
            if any((row["case"], row["seed"]) == (case, seed) for row in rows):
                continue
            folder = options.runs / "-".join((options.data_set, *case.replace(",", "").split(), str(seed)))
            settings = ("distill", f"--teacher={teacher}", *shared, "--ema.half_life_kimg=5", *CASES[case])
            train(folder, (*settings, *options.more.split(), f"--seed={seed}"), student_kimg)
            rows.append({"case": case, "seed": seed, **score(folder, options.data_set)})
            if "sampling" not in results:
                results["sampling"] = time_samplers(teacher, folder)
            print(rows[-1], flush=True)
            save_json(options.json, results)
    columns = list(rows[0])
    print(format_table(columns, [[_format(row.get(name, "")) for name in columns] for row in rows]))


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
