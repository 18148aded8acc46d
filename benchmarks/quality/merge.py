"""Compare generators that `paragan merge` distils from a per-label run, by the weight of the distillation loss.

    python -m benchmarks.quality.merge [--seeds 0] [--cases "0:160;3:160"] [--json F]

A per-label run of the digits with `--kimg` images is the teacher of all cases. A case, WEIGHT:KIMG, is a conditional
GAN trained with so many images and that weight; a weight of 0 makes it an ordinary one. Measured for each:

* Fréchet distance, precision, recall and coverage in pixel space, of 5,000 images
* recognised, diversity: as in digits_acceptance.py
* the bytes of its weights
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.digits_acceptance import evaluate_run
from benchmarks.quality.quality import run_paragan

CASES = "0:160;1:160;3:160;10:160;30:160;300:160;0:40;3:40"
METRICS = {"fd_pixels": "fd", "precision_pixels": "precision", "recall_pixels": "recall", "coverage_pixels": "coverage"}
SCORED = ("--evaluation.count=5000", "--evaluation.metrics=[fd,prdc]", "--output.fakes_kimg=1e9", "--device.threads=1")


def describe(model: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a model as merge.json records them, and those of digits_acceptance.py."""
    scores = {METRICS[score["name"]]: score["value"] for score in model["scores"] if score["name"] in METRICS}
    return {**scores, **evaluate_run(model["folder"]), "bytes": model["bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="WEIGHT:KIMG, separated by ;")
    parser.add_argument("--kimg", type=float, default=160, help="of the per-label run, all labels together")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--runs", default="runs/merge", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    rows: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        teacher = Path(options.runs) / f"per-label-{options.kimg:g}-{seed}"
        if not (teacher / "report.html").exists():
            settings = (f"--kimg={options.kimg}", f"--seed={seed}", f"--run-dir={teacher}")
            run_paragan("train", "digits", "--strategy=per-label", *SCORED, *settings)
        for i, case in enumerate(options.cases.split(";")):
            weight, kimg = case.split(":")
            folder = Path(options.runs) / f"merged-{weight}-{kimg}-{seed}"
            if not (folder / "merge.json").exists():
                settings = (f"--weight={weight}", f"--kimg={kimg}", f"--out={folder}")
                run_paragan("merge", str(teacher), *SCORED, *settings)
            compared = json.loads((folder / "merge.json").read_text())
            if not i:
                rows.append({"seed": int(seed), "case": "per label", **describe(compared["per_label"])})
            rows.append({"seed": int(seed), "case": case, **describe(compared["merged"])})
            print(rows[-1], flush=True)
            save_json(options.json, {"machine": machine, "kimg": options.kimg, "rows": rows})
    print(format_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
