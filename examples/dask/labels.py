"""A generator for each label, each trained by a task of Dask, and one model of them all.

    python -m examples.dask.labels --labels 10 --dir labels digits --kimg 10
    python -m examples.dask.labels --labels 10 --dir /shared/labels --scheduler tcp://HOST0:8786 digits --kimg 10

What is not listed by `--help` is passed to `paragan train`. A task that fails or whose worker dies is run again, and
resumes its run. The folders must be on storage that all hosts share. Workers need one thread each: `--nthreads 1`.
"""

import argparse
import os
import sys
from pathlib import Path

from paragan.cli.main import main as paragan

try:
    import dask
    from dask.distributed import Client, LocalCluster
except ImportError:
    sys.exit("This example needs Dask. Use: pip install -c constraints.txt -e '.[dask]'")


def train_label(label: int, options: argparse.Namespace) -> None:
    os.chdir(options.folder)
    fields = [f"--data.only={label}", f"--seed={label}", f"--run-dir={options.dir}/{label}"]
    status = paragan(["train", *options.arguments, *fields])
    if status:
        raise RuntimeError(f"label {label}: paragan train ended with status {status}")


def main(options: argparse.Namespace) -> int:
    dask.config.set({"distributed.scheduler.allowed-failures": options.retries})  # workers that may die in a task
    cluster = options.scheduler or LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=":0")
    with Client(cluster) as client:
        tasks = client.map(train_label, range(options.labels), options=options, retries=options.retries, pure=False)
        client.gather(tasks)
    return paragan(["pool", options.dir, "--allow-missing"])  # of data with more than N classes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--labels", type=int, required=True, metavar="N", help="train classes 0 to N-1")
    parser.add_argument("--dir", required=True, help="gets a run folder for each label, and the model")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="of a task (3)")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="of a cluster (default: workers on this machine)")
    parser.add_argument("--workers", type=int, metavar="N", help="on this machine (one for each core)")
    options, options.arguments = parser.parse_known_args()
    options.folder = Path.cwd()
    sys.exit(main(options))
