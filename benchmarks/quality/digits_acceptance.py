"""Accept or reject a digits run: `python -m benchmarks.quality.digits_acceptance RUN_DIR [--json F]`.

1,000 digits are generated, 100 of each label. The run is accepted (exit status 0) if

* an SVM fitted on the real digits recognises at least 97 % of them as the requested label, and
* their standard deviation within a label, averaged over pixels, is at least 75 % of that of the real digits.
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

from benchmarks.lib.timing import describe_machine

MIN_RECOGNISED = 0.97
MIN_DIVERSITY = 0.75


def sample(run_dir: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate images [1000, 8, 8] in 0..16, as scikit-learn's digits, and return them with the requested labels."""
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
    """Return the standard deviation of every pixel within a label, averaged over pixels and labels."""
    return float(np.mean([images[labels == label].std(0).mean() for label in range(10)]))


def evaluate_run(run_dir: str, seed: int = 0) -> dict[str, float]:
    """Return the share of recognised digits, and their diversity relative to the real ones."""
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
    scores = evaluate_run(options.run_dir, options.seed)
    accepted = scores["recognised"] >= MIN_RECOGNISED and scores["diversity"] >= MIN_DIVERSITY
    print(f"recognised {scores['recognised']:.1%} (at least {MIN_RECOGNISED:.0%})")
    print(f"diversity  {scores['diversity']:.1%} of the real digits' (at least {MIN_DIVERSITY:.0%})")
    print("accepted" if accepted else "NOT accepted")
    if options.json:
        results = {"machine": describe_machine(), **scores, "accepted": accepted}
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
