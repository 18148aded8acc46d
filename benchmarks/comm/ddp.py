"""Compare a step with PyTorch's DistributedDataParallel: `python -m benchmarks.comm.ddp [--json F] [--rounds N]`.

Two ranks (gloo), one thread each, the same networks from the same seed and precision, one lane a rank:

    ours  paragan's session as `paragan train` builds it: lanes, gradients summed from the backward hooks, batch moments
          summed over ranks, statistics of the losses, EMA
    ddp   two networks in DistributedDataParallel, carefully written (`DDPTrainer`)
    one   the same loop without DDP in one process: the total batch, two threads, the other rank idle

First ours and ddp get the same images, latents and labels, and must have the same losses (to 1e-3 in float32): they are
the same computation. Then all three are timed, interleaved. ddp and one have two advantages: their data is an index
into a float tensor in memory and torch.randn, where ours decodes, shuffles and draws lane by lane; and their batch
statistics stay local (rank 0's would be saved), where ours are summed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib import session_fixture as ours
from benchmarks.lib.ddp_comparison import collect_results, format_conclusion, format_times
from benchmarks.lib.session_fixture import CPU
from benchmarks.lib.subprocess_timing import SendFn, barrier
from benchmarks.lib.timing import (
    Times,
    count_steps,
    describe_machine,
    format_machine,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import Run
from paragan.config.sections import DeviceOptions
from paragan.core.devices import autocast_factory
from paragan.data.dataset import Dataset, load_data
from paragan.nets import DCGAN
from paragan.nets.spectral_norm import power_iteration, train_mode
from paragan.recipes import get_recipe
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session

RANKS = 2
NUM_CHECKED_STEPS = 5  # steps in which the losses must agree
TOLERANCE = {"float32": 1e-3, "bf16": 2e-2}
BLOCK_S = 2.0


# What is trained ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run and its images, which both implementations train."""

    name: str
    run: Run
    images: Dataset


def small_case(precision: str) -> Case:
    """Return the digits recipe, with its penalty: a few milliseconds a step, so that overheads show."""
    return _make_case("small", get_recipe("digits"), load_data("digits", resolution=8), precision)


def large_case(precision: str) -> Case:
    """Return DCGAN at 32 px with 9.5 million parameters on random pixels: 38 MB of gradients a step."""
    run = dataclasses.replace(get_recipe("folder"), nets=DCGAN(width=160), batch=16)
    return _make_case("large", run, ours.random_dataset(32, 3), precision)


def _make_case(name: str, run: Run, images: Dataset, precision: str) -> Case:
    device = DeviceOptions(kind="cpu", precision=precision)
    data = dataclasses.replace(run.data, path=name)
    run = dataclasses.replace(run, lanes=RANKS, kimg=1e6, data=data, device=device)
    return Case(name, resolve(run, images), images)


# The other side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step: reals and their labels, latents and labels of the fakes of both turns."""

    real: Tensor
    y: Tensor
    z_d: Tensor
    y_d: Tensor
    z_g: Tensor
    y_g: Tensor


InputFn = Callable[[], StepInputs]
Wrap = Callable[[nn.Module], nn.Module]


class DDPTrainer:
    """A careful loop over two networks in plain PyTorch; `wrap` is DistributedDataParallel, or the identity.

    Correct: in a turn only the network that is trained goes through its wrapper, and only its parameters require
    gradients; the fakes of D's turn carry no graph of G. Fast: the buckets are the gradients (gradient_as_bucket_view),
    buffers are not broadcast (spectral-norm vectors follow from the weights and are equal anyway), fused Adam, one
    foreach call for the EMA, R1 on the logits that the loss needs anyway. A static graph and other bucket sizes were
    not faster.
    """

    def __init__(self, case: Case, inputs: InputFn, wrap: Wrap = lambda net: net):
        run = case.run
        pair = build_networks(run, make_spec(run.data, case.images), CPU)
        self.run, self.inputs = run, inputs
        self.autocast = autocast_factory(CPU, run.device.precision)
        self.g, self.d = (train_mode(plain.to_plain_layers(net)) for net in (pair.g, pair.d))
        self.wrapped_g, self.wrapped_d = wrap(self.g), wrap(self.d)
        self.g_optimizer, self.d_optimizer = (
            torch.optim.Adam(net.parameters(), side.optimizer.lr, side.optimizer.betas, fused=True)
            for net, side in ((self.g, run.g), (self.d, run.d))
        )
        self.ema = [p.detach().clone() for p in self.g.parameters()]
        self.ema_decay = 0.5 ** (run.batch / (1000 * run.ema.half_life_kimg))
        self.d_loss, self.g_loss = plain.LOSSES[run.objective.loss]
        self.sums = torch.zeros(2)  # of D's and G's loss

    def step(self) -> tuple[Tensor, Tensor]:
        """Play one round; return the losses of D and G."""
        inputs = self.inputs()
        d_loss = self.step_d(inputs)
        g_loss = self.step_g(inputs)
        self.sums += torch.stack([d_loss, g_loss])
        return d_loss, g_loss

    def step_d(self, inputs: StepInputs) -> Tensor:
        power_iteration(self.d)
        real = inputs.real.detach().requires_grad_(self.run.objective.r1 > 0)
        with self.autocast():
            with torch.no_grad():
                fake = self.g(inputs.z_d, inputs.y_d)
            on_real, on_fake = self.wrapped_d(real, inputs.y), self.wrapped_d(fake, inputs.y_d)
            loss = self.d_loss(on_real, on_fake).mean()
            if self.run.objective.r1:
                loss = loss + self.run.objective.r1 / 2 * plain.grad_norm_squared(on_real, real)
        self.d_optimizer.zero_grad()
        loss.backward()
        self.d_optimizer.step()
        return loss.detach()

    def step_g(self, inputs: StepInputs) -> Tensor:
        self.d.requires_grad_(False)
        with self.autocast():
            on_fake = self.d(self.wrapped_g(inputs.z_g, inputs.y_g), inputs.y_g)
            loss = self.g_loss(on_fake, on_fake).mean()
        self.g_optimizer.zero_grad()
        loss.backward()
        self.d.requires_grad_(True)
        self.g_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, list(self.g.parameters()), 1 - self.ema_decay)
        return loss.detach()


def wrap_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)


def make_memory_inputs(case: Case, batch: int) -> InputFn:
    """Return inputs at the least possible cost: rows of a float tensor in memory."""
    images = torch.from_numpy(case.images.images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.from_numpy(case.images.labels)
    latent = case.run.nets.latent

    def sample_labels() -> Tensor:
        return labels[torch.randint(len(labels), (batch,))]

    def next_inputs() -> StepInputs:
        rows = torch.randint(len(images), (batch,))
        z_d, z_g = torch.randn(2, batch, latent)
        return StepInputs(images[rows], labels[rows], z_d, sample_labels(), z_g, sample_labels())

    return next_inputs


def session_inputs(session: Session) -> InputFn:
    """Return the inputs that a session's rank gets, from its first step on."""
    lanes, game = session.lanes, session.game
    positions = itertools.count(0, session.run.batch)

    def next_inputs() -> StepInputs:
        batch = lanes.make_micro_batch(next(positions), lanes.lane_groups[0])
        z_d, z_g = (batch.rng.normal(f"latent/{turn}", game.latent) for turn in "DG")
        y_d, y_g = (game.draw_labels(batch, turn) for turn in "DG")
        return StepInputs(batch.images, batch.labels, z_d, y_d, z_g, y_g)

    return next_inputs


# The comparison -------------------------------------------------------------------------------------------


def compare_losses(case: Case, world: World) -> list[dict[str, list[float]]]:
    """Return the losses of the first steps of both, means over ranks: [{"D": [ours, ddp], "G": ...}, ...]."""
    session = ours.make_session(case.run, case.images, world)
    ddp = DDPTrainer(case, session_inputs(session), wrap_ddp)
    steps = []
    for _ in range(NUM_CHECKED_STEPS):
        play_round(session)
        line = session.stats.tick(session.clock.images, session.clock.step)
        losses = torch.stack(ddp.step()) / world.size
        world.all_ranks.all_reduce_sum(losses).wait()
        steps.append({name: [line[f"Loss/{name}/loss"], float(loss)] for name, loss in zip("DG", losses)})
    if max_difference(steps) > TOLERANCE[case.run.device.precision]:
        raise SystemExit(f"ours and ddp are not the same computation: {steps}")
    return steps


def max_difference(losses: list[dict[str, list[float]]]) -> float:
    return max(abs(a - b) for step in losses for a, b in step.values())


def compare(case: Case, world: World, rounds: int) -> dict[str, Any]:
    """Check that the losses are the same, then time all three."""
    losses = compare_losses(case, world)
    session = ours.make_session(case.run, case.images, world)
    ddp = DDPTrainer(case, make_memory_inputs(case, case.run.batch // world.size), wrap_ddp)
    one = DDPTrainer(case, make_memory_inputs(case, case.run.batch)) if world.is_main else None

    def play_one(n: int) -> None:
        if one:
            torch.set_num_threads(world.size)
            repeat_fn(one.step)(n)
            torch.set_num_threads(1)

    steps = torch.tensor([float(count_steps(BLOCK_S, repeat_fn(ddp.step)))])
    world.all_ranks.all_reduce_sum(steps).wait()
    contestants = {"ours": ours.make_play_fn(session), "ddp": repeat_fn(ddp.step), "one": play_one}
    times = interleave(
        contestants, rounds=rounds, steps=round(steps.item() / world.size), barrier=lambda: barrier(world)
    )
    return {
        **describe_case(case, session),
        **summarize(times),
        "losses": losses,
        "worst_difference": max_difference(losses),
    }


def describe_case(case: Case, session: Session) -> dict[str, Any]:
    parameters = sum(p.numel() for player in session.game.players for p in player.flat.parameters)
    return {"parameters": parameters, "batch": case.run.batch, "nets": repr(case.run.nets)}


def summarize(times: Times) -> dict[str, Any]:
    return {"times": times.to_json("ddp"), "ours": times.ratio("ours", "ddp").to_json()}


# Ranks ----------------------------------------------------------------------------------------------------


def rank_main(world: World, send: SendFn, options: argparse.Namespace) -> None:
    """Run the comparisons on one rank."""
    makers = [small_case] if options.small_only else [small_case, large_case]
    for make_case in makers:
        case = make_case(options.precision)
        send((case.name, compare(case, world, options.rounds)))


def format_report(name: str, result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"\n{name}: {result['parameters']:,} parameters, total batch {result['batch']}, {RANKS} ranks; losses of "
            f"the first {NUM_CHECKED_STEPS} steps agree to {result['worst_difference']:.1e}",
            format_times(result["times"]),
            format_conclusion("ours", result["ours"]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small-only", action="store_true")
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    results = collect_results(RANKS, rank_main, options, format_report)
    save_json(
        options.json,
        {"machine": machine, "ranks": RANKS, "threads_a_rank": 1, "precision": options.precision, "sizes": results},
    )
    return 0 if all(result["ours"]["ci95"][0] <= 1.0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
