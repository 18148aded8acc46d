"""Our step against PyTorch's DistributedDataParallel: `python -m benchmarks.comm.ddp [--json F] [--rounds N]`.

Two ranks (gloo), one thread each, the same networks from the same seed and precision, one lane a rank:

    ours  paragan's session as `paragan train` assembles it: lanes, gradients summed from the backward hooks,
          batch moments agreed over ranks, statistics of the losses, average
    ddp   two networks in DistributedDataParallel, written with care (`Careful`)
    one   the same loop without DDP in one process: the total batch, two threads, the other rank asleep

First ours and ddp are fed the same images, latents and labels, and must lose the same (to 1e-3 in float32): they
are the same computation. Then all three are timed in turns. What ddp and one are given for free: their data is an
index into a float tensor in memory and torch.randn, where ours decodes, shuffles and draws lane by lane; their
batch statistics stay local (rank 0's would be saved), where ours are agreed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib import session_fixture as ours
from benchmarks.lib.session_fixture import CPU
from benchmarks.lib.subprocess_timing import SendFn, barrier, run_ranks
from benchmarks.lib.timing import (
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
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
    """One comparison: a run, and its images."""

    name: str
    run: Run
    images: Dataset


def small_case(precision: str) -> Case:
    """The digits recipe, penalty and all: some milliseconds a step, so that overheads show."""
    return _make_case("small", get_recipe("digits"), load_data("digits", resolution=8), precision)


def large_case(precision: str) -> Case:
    """DCGAN at 32 px with 9.5 million parameters on random pixels: 38 MB of gradients a step."""
    run = dataclasses.replace(get_recipe("folder"), nets=DCGAN(width=160), batch=16)
    return _make_case("large", run, ours.random_dataset(32, 3), precision)


def _make_case(name: str, run: Run, images: Dataset, precision: str) -> Case:
    device, data = DeviceOptions(kind="cpu", precision=precision), dataclasses.replace(run.data, path=name)
    run = dataclasses.replace(run, lanes=RANKS, kimg=1e6, data=data, device=device)
    return Case(name, resolve(run, images), images)


# The other side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepInputs:
    """What one step is computed from: reals and labels, and latents and labels of both turns' fakes."""

    real: Tensor
    y: Tensor
    z_d: Tensor
    y_d: Tensor
    z_g: Tensor
    y_g: Tensor


InputFn = Callable[[], StepInputs]
Wrap = Callable[[nn.Module], nn.Module]


class DDPTrainer:
    """A loop over two networks as a good engineer writes it; `wrap` is DistributedDataParallel, or nothing.

    Right: in a turn only the network that moves goes through its wrapper, and only its parameters want
    gradients; no fake of D's turn carries G's graph. Fast: buckets are the gradients (gradient_as_bucket_view),
    buffers are not broadcast (spectral-norm vectors follow from the weights, and are equal without), fused
    Adam, one foreach call for the average, R1 on the logits that the loss needs anyway. A static graph and other
    bucket sizes were no faster.
    """

    def __init__(self, size: Case, inputs: InputFn, wrap: Wrap = lambda net: net):
        run, pair = size.run, build_networks(size.run, make_spec(size.run, size.images), CPU)
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
        """One round; the losses of D and G."""
        dealt = self.inputs()
        d, g = self.step_d(dealt), self.step_g(dealt)
        self.sums += torch.stack([d, g])
        return d, g

    def step_d(self, dealt: StepInputs) -> Tensor:
        power_iteration(self.d)
        real = dealt.real.detach().requires_grad_(self.run.objective.r1 > 0)
        with self.autocast():
            with torch.no_grad():
                fake = self.g(dealt.z_d, dealt.y_d)
            on_real, on_fake = self.wrapped_d(real, dealt.y), self.wrapped_d(fake, dealt.y_d)
            loss = self.d_loss(on_real, on_fake).mean()
            if self.run.objective.r1:
                loss = loss + self.run.objective.r1 / 2 * plain.grad_norm_squared(on_real, real)
        self.d_optimizer.zero_grad()
        loss.backward()
        self.d_optimizer.step()
        return loss.detach()

    def step_g(self, dealt: StepInputs) -> Tensor:
        self.d.requires_grad_(False)
        with self.autocast():
            on_fake = self.d(self.wrapped_g(dealt.z_g, dealt.y_g), dealt.y_g)
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


def make_memory_inputs(size: Case, batch: int) -> InputFn:
    """Data at the least cost there is: rows of a float tensor in memory."""
    images = torch.from_numpy(size.images.images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    images = images.contiguous(memory_format=torch.channels_last)
    labels, latent = torch.from_numpy(size.images.labels), size.run.nets.latent

    def drawn() -> Tensor:
        return labels[torch.randint(len(labels), (batch,))]

    def feed() -> StepInputs:
        rows = torch.randint(len(images), (batch,))
        z_d, z_g = torch.randn(2, batch, latent)
        return StepInputs(images[rows], labels[rows], z_d, drawn(), z_g, drawn())

    return feed


def session_inputs(session: Session) -> InputFn:
    """Exactly what a session's rank sees, from its first step on."""
    lanes, game, positions = session.lanes, session.game, iter(range(0, sys.maxsize, session.run.batch))

    def feed() -> StepInputs:
        hand = lanes.make_micro_batch(next(positions), lanes.lane_groups[0])
        z_d, z_g = (hand.rng.normal(f"latent/{turn}", game.latent) for turn in "DG")
        y_d, y_g = (game.draw_labels(hand, turn) for turn in "DG")
        return StepInputs(hand.images, hand.labels, z_d, y_d, z_g, y_g)

    return feed


# The comparison -------------------------------------------------------------------------------------------


def check(size: Case, world: World) -> list[dict[str, list[float]]]:
    """The losses of the first steps of both, means over ranks: [{"D": [ours, ddp], "G": ...}, ...]."""
    session = ours.make_session(size.run, size.images, world)
    theirs = DDPTrainer(size, session_inputs(session), wrap_ddp)
    found = []
    for _ in range(NUM_CHECKED_STEPS):
        play_round(session)
        line = session.stats.tick(session.clock.images, session.clock.step)
        losses = torch.stack(theirs.step()) / world.size
        world.all_ranks.all_reduce_sum(losses).wait()
        found.append({name: [line[f"Loss/{name}/loss"], float(b)] for name, b in zip("DG", losses)})
    if max_difference(found) > TOLERANCE[size.run.device.precision]:
        raise SystemExit(f"ours and ddp are not the same computation: {found}")
    return found


def max_difference(losses: list[dict[str, list[float]]]) -> float:
    return max(abs(a - b) for step in losses for a, b in step.values())


def compare(size: Case, world: World, rounds: int) -> dict[str, Any]:
    """Check, then time all three in turns."""
    agreed = check(size, world)
    session = ours.make_session(size.run, size.images, world)
    ddp = DDPTrainer(size, make_memory_inputs(size, size.run.batch // world.size), wrap_ddp)
    one = DDPTrainer(size, make_memory_inputs(size, size.run.batch)) if world.is_main else None

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
        **describe_case(size, session),
        **summarize(times),
        "losses": agreed,
        "worst_difference": max_difference(agreed),
    }


def describe_case(size: Case, session: Session) -> dict[str, Any]:
    parameters = sum(p.numel() for player in session.game.players for p in player.flat.parameters)
    return {"parameters": parameters, "batch": size.run.batch, "nets": repr(size.run.nets)}


def summarize(times: Times) -> dict[str, Any]:
    return {"times": times.to_json("ddp"), "ours": times.ratio("ours", "ddp").to_json()}


# Ranks ----------------------------------------------------------------------------------------------------


def rank_main(world: World, send: SendFn, options: argparse.Namespace) -> None:
    """One rank."""
    for make in (small_case,) if options.small_only else (small_case, large_case):
        size = make(options.precision)
        send((size.name, compare(size, world, options.rounds)))


def collect_results(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found."""
    found: dict[str, Any] = {}
    for name, about in run_ranks(RANKS, rank_main, options):
        found[name] = about
        print(format_report(name, about), flush=True)
    return found


def format_report(name: str, found: dict[str, Any]) -> str:
    rows = []
    for contestant, entry in found["times"].items():
        ms, ratio = entry["ms"], entry["ratio to ddp"]
        rows.append([contestant, *(f"{x:.2f}" for x in (ms["median"], *ms["ci95"], ratio["median"], *ratio["ci95"]))])
    verdict = "at most 1.0 within noise" if found["ours"]["ci95"][0] <= 1.0 else "SLOWER than ddp"
    return "\n".join(
        [
            f"\n{name}: {found['parameters']:,} parameters, total batch {found['batch']}, {RANKS} ranks; losses of the "
            f"first {NUM_CHECKED_STEPS} steps agree to {found['worst_difference']:.1e}",
            format_table(["", "ms/step", "low", "high", "to ddp", "low", "high"], rows),
            f"ours / ddp = {found['ours']['median']:.3f}: {verdict}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small-only", action="store_true")
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    where = describe_machine()
    print(format_machine(where))
    found = collect_results(options)
    save_json(
        options.json,
        {"machine": where, "ranks": RANKS, "threads_a_rank": 1, "precision": options.precision, "sizes": found},
    )
    return 0 if all(size["ours"]["ci95"][0] <= 1.0 for size in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
