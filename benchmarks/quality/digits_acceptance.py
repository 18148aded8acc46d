"""Whether a digits run is good: `python -m benchmarks.quality.digits_acceptance RUN_DIR [--json F]`. Status 0 if it is.

Two questions about 1,000 generated digits (100 of each label), asked by things that were not trained on fakes:
does an SVM fitted on the real digits recognise them as the label that was asked for (at least 97 %), and do
they vary within a label as real digits do (mean pixel standard deviation at least 75 % of the real one)?
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import SVC

MIN_RECOGNISED, MIN_DIVERSITY = 0.97, 0.75


def sample(run_dir: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[1000, 8, 8] in 0..16 as scikit-learn's digits, and the labels asked for."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.npz"
        labels = ",".join(map(str, range(10)))
        command = [
            "sample",
            run_dir,
            "--labels",
            labels,
            "--count",
            "1000",
            "--seed",
            str(seed),
            "--out",
            str(out),
        ]
        subprocess.run([sys.executable, "-m", "paragan", *command], check=True, stdout=subprocess.DEVNULL)
        data = np.load(out)
        return data["images"][..., 0] * (16 / 255), data["labels"]


def class_diversity(images: np.ndarray, labels: np.ndarray) -> float:
    """Standard deviation of every pixel within a label, averaged over pixels and labels."""
    return float(np.mean([images[labels == label].std(0).mean() for label in range(10)]))


def evaluate_run(run_dir: str, seed: int = 0) -> dict[str, float]:
    digits = load_digits()
    images, labels = sample(run_dir, seed)
    svm = SVC(gamma=0.001).fit(digits.data, digits.target)
    recognised = float((svm.predict(images.reshape(len(images), -1)) == labels).mean())
    diversity = class_diversity(images, labels) / class_diversity(digits.images, digits.target)
    return {"recognised": recognised, "diversity": diversity}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    found = evaluate_run(options.run_dir, options.seed)
    passed = found["recognised"] >= MIN_RECOGNISED and found["diversity"] >= MIN_DIVERSITY
    print(f"recognised {found['recognised']:.1%} (at least {MIN_RECOGNISED:.0%})")
    print(f"diversity  {found['diversity']:.1%} of the real digits' (at least {MIN_DIVERSITY:.0%})")
    print("accepted" if passed else "NOT accepted")
    if options.json:
        Path(options.json).write_text(json.dumps({**found, "accepted": passed}, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
