"""Train one run on workers of a Ray cluster. After a worker is lost, Ray starts all again, and the run resumes.

    python -m examples.ray.train --ranks 2 digits --run-dir /shared/run --kimg 100
    python -m examples.ray.train --ranks 2 --actors digits --run-dir /shared/run --strategy gossip

What is not listed by `--help` is passed to `paragan train`. The same command again resumes the run. The run folder and
the present folder must be on storage that all hosts share. RAY_ADDRESS chooses the cluster (none: this machine).

TorchTrainer forms the process group of its workers, and the run uses it. With `--actors` each rank is an actor, and
ranks find each other by the variables that torchrun would set; only so does gossip continue without a lost rank.
"""

import argparse
import os
import random
import socket
import sys
from pathlib import Path

from paragan.cli.main import main as paragan

try:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ImportError:
    sys.exit("This example needs Ray Train. Use: pip install -c constraints.txt -e '.[ray]'")

RETRIED = (1, 3)  # exit statuses of `paragan train`: a rank was lost, or asked by a signal to stop


def train(options: argparse.Namespace) -> int:
    """Train as one of the ranks. Returns the exit status."""
    os.chdir(options.folder)
    return paragan(["train", *options.arguments])


# TorchTrainer -----------------------------------------------------------------------------------------------


def train_as_worker(options: argparse.Namespace) -> int:
    status = train(options)
    if status in RETRIED:
        raise RuntimeError(f"paragan train ended with status {status}")
    return status


def train_in_torch_trainer(options: argparse.Namespace) -> int:
    resources = {"CPU": options.cpus, "GPU": int(options.gpu)}
    trainer = TorchTrainer(
        train_as_worker,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=options.gpu, resources_per_worker=resources),
        run_config=RunConfig(
            storage_path=options.storage, failure_config=FailureConfig(max_failures=options.max_failures)
        ),
    )
    return trainer.fit().return_value


# an actor for each rank -------------------------------------------------------------------------------------


@ray.remote
class Rank:
    def find_address(self) -> tuple[str, int]:
        """Return the host of this actor and a port that is free on it."""
        for port in random.sample(range(10000, 20000), 100):  # below those of outgoing connections
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)):
                    return ray.util.get_node_ip_address(), port
        raise RuntimeError("no port from 10000 to 19999 is free")

    def train(self, options: argparse.Namespace, rank: int, host: str, port: int) -> int:
        variables = {"RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_ADDR": host, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        return train(options)


def train_in_actors(options: argparse.Namespace) -> int:
    statuses = []
    for _ in range(options.max_failures + 1):
        actors = [Rank.options(num_cpus=options.cpus, num_gpus=int(options.gpu)).remote() for _ in range(options.ranks)]
        host, port = ray.get(actors[0].find_address.remote())
        tasks = [actor.train.remote(options, rank, host, port) for rank, actor in enumerate(actors)]
        statuses = [exit_status(task) for task in tasks]
        for actor in actors:
            ray.kill(actor)
        if not any(status in RETRIED for status in statuses):
            break
    return max(statuses)


def exit_status(task: ray.ObjectRef) -> int:
    try:
        return ray.get(task)
    except ray.exceptions.RayActorError as error:
        print(error)
        return 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--actors", action="store_true", help="an actor for each rank instead of TorchTrainer")
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="of each rank (1)")
    parser.add_argument("--gpu", action="store_true", help="one for each rank")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="how often to start again (3)")
    parser.add_argument("--storage", metavar="DIR", help="where TorchTrainer keeps its own files (~/ray_results)")
    options, options.arguments = parser.parse_known_args()
    options.folder = Path.cwd()
    return options


if __name__ == "__main__":
    options = parse_options()
    sys.exit(train_in_actors(options) if options.actors else train_in_torch_trainer(options))
