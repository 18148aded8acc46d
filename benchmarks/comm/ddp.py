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
from benchmarks.lib.subprocess_timing import Tell, meet, told
from benchmarks.lib.timing import Times, describe, interleave, machine, repeated, save, steps_for, table
from paragan.comm.world import World
from paragan.config.resolve import resolve, spec_of
from paragan.config.run import Run
from paragan.config.sections import Device
from paragan.core.devices import autocast
from paragan.data.dataset import Images, load
from paragan.nets import DCGAN
from paragan.nets.spectral_norm import power_iteration, train_mode
from paragan.recipes import recipe
from paragan.train.build import build_nets
from paragan.train.loop import play_round
from paragan.train.session import Session

RANKS = 2
CHECKED = 5  # steps in which the losses must agree
TOLERANCE = {"float32": 1e-3, "bf16": 2e-2}
BLOCK_S = 2.0


# What is trained ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """One comparison: a run, and its images."""

    name: str
    run: Run
    images: Images


def small(precision: str) -> Size:
    """The digits recipe, penalty and all: some milliseconds a step, so that overheads show."""
    return _size("small", recipe("digits"), load("digits", resolution=8), precision)


def large(precision: str) -> Size:
    """DCGAN at 32 px with 9.5 million parameters on random pixels: 38 MB of gradients a step."""
    run = dataclasses.replace(recipe("folder"), nets=DCGAN(width=160), batch=16)
    return _size("large", run, ours.noise(32, 3), precision)


def _size(name: str, run: Run, images: Images, precision: str) -> Size:
    device, data = Device(kind="cpu", precision=precision), dataclasses.replace(run.data, path=name)
    run = dataclasses.replace(run, lanes=RANKS, kimg=1e6, data=data, device=device)
    return Size(name, resolve(run, images), images)


# The other side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dealt:
    """What one step is computed from: reals and labels, and latents and labels of both turns' fakes."""

    real: Tensor
    y: Tensor
    z_d: Tensor
    y_d: Tensor
    z_g: Tensor
    y_g: Tensor


Feed = Callable[[], Dealt]
Wrap = Callable[[nn.Module], nn.Module]


class Careful:
    """A loop over two networks as a good engineer writes it; `wrap` is DistributedDataParallel, or nothing.

    Right: in a turn only the network that moves goes through its wrapper, and only its parameters want
    gradients; no fake of D's turn carries G's graph. Fast: buckets are the gradients (gradient_as_bucket_view),
    buffers are not broadcast (spectral-norm vectors follow from the weights, and are equal without), fused
    Adam, one foreach call for the average, R1 on the logits that the loss needs anyway. A static graph and other
    bucket sizes were no faster.
    """

    def __init__(self, size: Size, feed: Feed, wrap: Wrap = lambda net: net):
        run, pair = size.run, build_nets(size.run, spec_of(size.run, size.images), CPU)
        self.run, self.feed = run, feed
        self.autocast = autocast(CPU, run.device.precision)
        self.g, self.d = (train_mode(plain.as_written(net)) for net in (pair.g, pair.d))
        self.wrapped_g, self.wrapped_d = wrap(self.g), wrap(self.d)
        self.g_optimizer, self.d_optimizer = (
            torch.optim.Adam(net.parameters(), side.optimizer.lr, side.optimizer.betas, fused=True)
            for net, side in ((self.g, run.g), (self.d, run.d))
        )
        self.average = [p.detach().clone() for p in self.g.parameters()]
        self.keep = 0.5 ** (run.batch / (1000 * run.average.half_life_kimg))
        self.d_loss, self.g_loss = plain.LOSSES[run.objective.loss]
        self.sums = torch.zeros(2)  # of D's and G's loss

    def step(self) -> tuple[Tensor, Tensor]:
        """One round; the losses of D and G."""
        dealt = self.feed()
        d, g = self.move_d(dealt), self.move_g(dealt)
        self.sums += torch.stack([d, g])
        return d, g

    def move_d(self, dealt: Dealt) -> Tensor:
        power_iteration(self.d)
        real = dealt.real.detach().requires_grad_(self.run.objective.r1 > 0)
        with self.autocast():
            with torch.no_grad():
                fake = self.g(dealt.z_d, dealt.y_d)
            on_real, on_fake = self.wrapped_d(real, dealt.y), self.wrapped_d(fake, dealt.y_d)
            loss = self.d_loss(on_real, on_fake).mean()
            if self.run.objective.r1:
                loss = loss + self.run.objective.r1 / 2 * plain.squared_slope(on_real, real)
        self.d_optimizer.zero_grad()
        loss.backward()
        self.d_optimizer.step()
        return loss.detach()

    def move_g(self, dealt: Dealt) -> Tensor:
        self.d.requires_grad_(False)
        with self.autocast():
            on_fake = self.d(self.wrapped_g(dealt.z_g, dealt.y_g), dealt.y_g)
            loss = self.g_loss(on_fake, on_fake).mean()
        self.g_optimizer.zero_grad()
        loss.backward()
        self.d.requires_grad_(True)
        self.g_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, list(self.g.parameters()), 1 - self.keep)
        return loss.detach()


def distributed(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)


def cheap_feed(size: Size, batch: int) -> Feed:
    """Data at the least cost there is: rows of a float tensor in memory."""
    images = torch.from_numpy(size.images.images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    images = images.contiguous(memory_format=torch.channels_last)
    labels, latent = torch.from_numpy(size.images.labels), size.run.nets.latent

    def drawn() -> Tensor:
        return labels[torch.randint(len(labels), (batch,))]

    def feed() -> Dealt:
        rows = torch.randint(len(images), (batch,))
        z_d, z_g = torch.randn(2, batch, latent)
        return Dealt(images[rows], labels[rows], z_d, drawn(), z_g, drawn())

    return feed


def feed_of(session: Session) -> Feed:
    """Exactly what a session's rank sees, from its first step on."""
    lanes, game, positions = session.lanes, session.game, iter(range(0, sys.maxsize, session.run.batch))

    def feed() -> Dealt:
        hand = lanes.hand(next(positions), lanes.passes[0])
        z_d, z_g = (hand.draw.normal(f"latent/{turn}", game.latent) for turn in "DG")
        y_d, y_g = (game.draw_labels(hand, turn) for turn in "DG")
        return Dealt(hand.images, hand.labels, z_d, y_d, z_g, y_g)

    return feed


# The comparison -------------------------------------------------------------------------------------------


def check(size: Size, world: World) -> list[dict[str, list[float]]]:
    """The losses of the first steps of both, means over ranks: [{"D": [ours, ddp], "G": ...}, ...]."""
    session = ours.session(size.run, size.images, world)
    theirs = Careful(size, feed_of(session), distributed)
    found = []
    for _ in range(CHECKED):
        play_round(session)
        line = session.stats.tick(session.clock.images, session.clock.step)
        losses = torch.stack(theirs.step()) / world.size
        world.everyone.sum(losses).wait()
        found.append({name: [line[f"Loss/{name}/loss"], float(b)] for name, b in zip("DG", losses)})
    if worst(found) > TOLERANCE[size.run.device.precision]:
        raise SystemExit(f"ours and ddp are not the same computation: {found}")
    return found


def worst(losses: list[dict[str, list[float]]]) -> float:
    return max(abs(a - b) for step in losses for a, b in step.values())


def compare(size: Size, world: World, rounds: int) -> dict[str, Any]:
    """Check, then time all three in turns."""
    agreed = check(size, world)
    session = ours.session(size.run, size.images, world)
    ddp = Careful(size, cheap_feed(size, size.run.batch // world.size), distributed)
    one = Careful(size, cheap_feed(size, size.run.batch)) if world.first else None

    def play_one(n: int) -> None:
        if one:
            torch.set_num_threads(world.size)
            repeated(one.step)(n)
            torch.set_num_threads(1)

    steps = torch.tensor([float(steps_for(BLOCK_S, repeated(ddp.step)))])
    world.everyone.sum(steps).wait()
    contestants = {"ours": ours.playing(session), "ddp": repeated(ddp.step), "one": play_one}
    times = interleave(contestants, rounds=rounds, steps=round(steps.item() / world.size), meet=lambda: meet(world))
    return {**about(size, session), **summary(times), "losses": agreed, "worst_difference": worst(agreed)}


def about(size: Size, session: Session) -> dict[str, Any]:
    parameters = sum(p.numel() for player in session.game.players for p in player.flat.parameters)
    return {"parameters": parameters, "batch": size.run.batch, "nets": repr(size.run.nets)}


def summary(times: Times) -> dict[str, Any]:
    return {"times": times.to_json("ddp"), "ours": times.ratio("ours", "ddp").to_json()}


# Ranks ----------------------------------------------------------------------------------------------------


def work(world: World, tell: Tell, options: argparse.Namespace) -> None:
    """One rank."""
    for make in (small,) if options.small_only else (small, large):
        size = make(options.precision)
        tell((size.name, compare(size, world, options.rounds)))


def start(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found."""
    found: dict[str, Any] = {}
    for name, about in told(RANKS, work, options):
        found[name] = about
        print(report(name, about), flush=True)
    return found


def report(name: str, found: dict[str, Any]) -> str:
    rows = []
    for contestant, entry in found["times"].items():
        ms, ratio = entry["ms"], entry["ratio to ddp"]
        rows.append([contestant, *(f"{x:.2f}" for x in (ms["median"], *ms["ci95"], ratio["median"], *ratio["ci95"]))])
    verdict = "at most 1.0 within noise" if found["ours"]["ci95"][0] <= 1.0 else "SLOWER than ddp"
    return "\n".join(
        [
            f"\n{name}: {found['parameters']:,} parameters, total batch {found['batch']}, {RANKS} ranks; losses of the "
            f"first {CHECKED} steps agree to {found['worst_difference']:.1e}",
            table(["", "ms/step", "low", "high", "to ddp", "low", "high"], rows),
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
    where = machine()
    print(describe(where))
    found = start(options)
    save(
        options.json,
        {"machine": where, "ranks": RANKS, "threads_a_rank": 1, "precision": options.precision, "sizes": found},
    )
    return 0 if all(size["ours"]["ci95"][0] <= 1.0 for size in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
