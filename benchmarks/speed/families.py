"""The newer families against loops as they are published: how fast a step is.

    python -m benchmarks.speed.families [--families stylegan2,gat] [--rounds N] [--seconds S] [--json F]

A round (`d_steps` steps of D, one of G) of a recipe with small networks, as `paragan train` plays it, and of a plain
PyTorch loop in the order of operations of the paper (lib/plain_families.py), both in float32 and from the same weights,
on random images of 32 x 32 pixels. All threads, in turns, each in a process of its own: that of paragan sets its memory
as `paragan train` does, that of the plain loop leaves it as it is. Blocks of StyleGAN2 last a multiple of 16 rounds, so
that every block has the same lazy penalties.

    stylegan2   configuration F: style mixing, path length every 4 rounds, R1 every 16; without augmentation
    gat         the recipe gat-tiny-cifar10
    diffusion   EDM
    distill     DMD2 from a teacher with random weights: five steps of the critic, one of G
    features    SNGAN whose D also sees the maps of an untrained, frozen ResNet-20; five steps of D, one of G
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.lib.plain_families import (
    PlainDiffusion,
    PlainDistillation,
    PlainFamily,
    PlainFeatureGAN,
    PlainGAT,
    PlainStyleGAN2,
    max_output_difference,
)
from benchmarks.lib.session_fixture import make_endless_run, make_play_fn, make_session, random_dataset
from benchmarks.lib.timing import (
    StepsFn,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.data.dataset import Dataset
from paragan.train.session import set_process_options

TIMEOUT_S = 600.0  # of a block


@dataclass(frozen=True)
class Family:
    """A recipe, what is changed of it, its plain loop, and the rounds after which penalties repeat."""

    recipe: str
    settings: tuple[str, ...]
    plain: type[PlainFamily]
    period: int = 1


SMALL_UNET = ("nets.widths=[32,64,64]", "batch=16")
FAMILIES = {
    "stylegan2": Family(
        "stylegan2-cifar10",
        (
            *("nets.channel_base=1024", "nets.channel_max=64", "nets.latent=128", "nets.style=128", "batch=32"),
            *("nets.stddev_group=4", "nets.style_mixing=0.9", "objective.path_length=2", "objective.augment=none"),
        ),
        PlainStyleGAN2,
        period=16,
    ),
    "gat": Family("gat-tiny-cifar10", (), PlainGAT),
    "diffusion": Family("diffusion", SMALL_UNET, PlainDiffusion),
    "distill": Family("distill", SMALL_UNET, PlainDistillation),
    "features": Family(
        "sngan-cifar10",
        (
            *("nets.width=64", "nets.d_width=64"),
            "d_features.network=benchmarks.lib.cifar_resnet20:untrained_features",
        ),
        PlainFeatureGAN,
    ),
}


def make_run(family: Family, data: Dataset, *settings: str) -> Run:
    """Return the run of a family; settings as on the command line, without dashes."""
    fixed = ("device.precision=float32", "data.mirror=false")
    return make_endless_run(family.recipe, data, *family.settings, *fixed, *settings)


def make_data() -> Dataset:
    """Return random images."""
    return random_dataset(32, 3)


class ContestantProcess:
    """A loop in a process of its own: "plain" or "paragan".

    parameters : of G and of D
    """

    def __init__(self, who: str, family: Family):
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        self.process = spawn.Process(target=serve_steps, args=(other, who, family), daemon=True)
        self.process.start()
        other.close()
        self.parameters = self._receive()

    def __call__(self, steps: int) -> None:
        """Play so many rounds."""
        self.connection.send(steps)
        self._receive()

    def close(self) -> None:
        self.connection.close()
        self.process.join(TIMEOUT_S)

    def _receive(self) -> Any:
        if not self.connection.poll(TIMEOUT_S):
            raise TimeoutError(f"a block took more than {TIMEOUT_S:g} s")
        return self.connection.recv()


def serve_steps(connection: Connection, who: str, family: Family) -> None:
    """Play as many rounds as are asked for, until the connection is closed."""
    warnings.simplefilter("ignore")
    play, parameters = make_contestant(who, family)
    connection.send(parameters)
    with contextlib.suppress(EOFError):
        while True:
            play(connection.recv())
            connection.send("done")


def make_contestant(who: str, family: Family) -> tuple[StepsFn, list[int]]:
    """Return a function that plays rounds, and the parameters of G and D."""
    data = make_data()
    run = make_run(family, data)
    if who == "plain":
        plain = family.plain(run, data)
        return repeat_fn(plain.step), [sum(p.numel() for p in net.parameters()) for net in (plain.g, plain.d)]
    set_process_options(run.device, World.solo())
    session = make_session(run, data)
    parameters = [sum(p.numel() for p in player.flat.parameters) for player in session.game.players]
    return make_play_fn(session), parameters


def benchmark_family(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Time both loops in turns, print the result and return it."""
    family = FAMILIES[name]
    data = make_data()
    run = make_run(family, data)
    difference = max_output_difference(run, data)
    with contextlib.ExitStack() as stack:
        contestants = {
            who: stack.enter_context(contextlib.closing(ContestantProcess(who, family))) for who in ("plain", "paragan")
        }
        parameters = contestants["plain"].parameters
        assert parameters == contestants["paragan"].parameters, f"{name}: networks of different sizes"
        steps = family.period * math.ceil(count_steps(seconds, contestants["paragan"]) / family.period)
        times = interleave(contestants, rounds=rounds, steps=steps)
    ratio = times.ratio("plain", "paragan")
    rows = [[who, f"{times.spread(who).median:.1f}"] for who in times.ms]
    print(f"\n{name}: {parameters[0]:,} and {parameters[1]:,} parameters, batch {run.batch}, {run.d_steps} steps of D")
    print(f"outputs differ by {difference:.1e} of the largest\n{format_table(['', 'ms a round'], rows)}")
    print(f"plain / paragan = {ratio}", flush=True)
    return {
        "batch": run.batch,
        "d_steps": run.d_steps,
        "parameters": parameters,
        "outputs_differ": difference,
        "plain/paragan": ratio.to_json(),
        "times": times.to_json("paragan"),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help=f"to time ({','.join(FAMILIES)})")
    parser.add_argument("--rounds", type=int, default=7, help="that are timed of either loop (7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a block of either loop lasts (2)")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.families.split(",") if name not in FAMILIES]:
        parser.error(f"--families {unknown[0]}: there is no such family. Use {', '.join(FAMILIES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore")
    where = describe_machine() | {"threads": torch.get_num_threads()}
    print(format_machine(where))
    families = {name: benchmark_family(name, options.rounds, options.seconds) for name in options.families.split(",")}
    save_json(options.json, {"machine": where, "families": families})
    return 0


if __name__ == "__main__":
    sys.exit(main())
