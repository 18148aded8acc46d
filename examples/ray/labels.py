"""A generator for each label, each trained by a task of Ray, and one model of them all.

    python -m examples.ray.labels --labels 10 --dir /shared/labels digits --kimg 10

What is not listed by `--help` is passed to `paragan train`. A task whose worker dies is run again, and resumes its run.
The folders must be on storage that all hosts share. RAY_ADDRESS chooses the cluster (none: this machine).
"""

import argparse
import os
import sys
from pathlib import Path

from paragan.cli.main import main as paragan

try:
    import ray
except ImportError:
    sys.exit("This example needs Ray. Use: pip install -c constraints.txt -e '.[ray]'")


@ray.remote
def train_label(label: int, options: argparse.Namespace) -> None:
    os.chdir(options.folder)
    fields = [f"--data.only={label}", f"--seed={label}", f"--run-dir={options.dir}/{label}"]
    status = paragan(["train", *options.arguments, *fields])
    if status:
        raise RuntimeError(f"label {label}: paragan train ended with status {status}")


def main(options: argparse.Namespace) -> int:
    task = train_label.options(num_cpus=options.cpus, num_gpus=int(options.gpu), max_retries=options.retries)
    ray.get([task.remote(label, options) for label in range(options.labels)])
    return paragan(["pool", options.dir, "--allow-missing"])  # of data with more than N classes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--labels", type=int, required=True, metavar="N", help="train classes 0 to N-1")
    parser.add_argument("--dir", required=True, help="gets a run folder for each label, and the model")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="of a task whose worker died (3)")
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="of each task (1)")
    parser.add_argument("--gpu", action="store_true", help="one for each task")
    options, options.arguments = parser.parse_known_args()
    options.folder = Path.cwd()
    sys.exit(main(options))
