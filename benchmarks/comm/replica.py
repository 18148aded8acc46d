"""Compare `paragan.Replica` with DistributedDataParallel: `python -m benchmarks.comm.replica [--json F] [--rounds N]`.

Two ranks (gloo over loopback), one thread each. Both train the same convolutional networks (GroupNorm, hinge loss,
fused Adam) from the same seed in the same plain loop, D's step and then G's:

    replica  `with disc.turn(): ...`
    ddp      the network whose turn it is through its wrapper, the other one frozen and called directly; buckets are the
             gradients, no buffers are broadcast, `no_sync` in all passes of a step but the last

In the first steps of each case their losses must agree. Then they are timed, interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel

import paragan
from benchmarks.lib.ddp_comparison import collect_results, format_conclusion, format_times
from benchmarks.lib.subprocess_timing import SendFn, barrier
from benchmarks.lib.timing import (
    count_steps,
    describe_machine,
    format_machine,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.comm.world import World

RANKS = 2
LATENT, BATCH = 64, 8  # images of a rank in a pass
NUM_CHECKED_STEPS = 5
TOLERANCE = 1e-4
BLOCK_S = 2.0


@dataclass(frozen=True)
class Case:
    """Networks of this width, trained with so many backward passes a step."""

    width: int
    passes: int


CASES = {
    f"{size}, {passes} {'passes' if passes > 1 else 'pass'}": Case(width, passes)
    for size, width in {"0.2M": 21, "10M": 189}.items()
    for passes in (1, 4)
}


def build(width: int) -> tuple[nn.Module, nn.Module]:
    """Return G and D, for images of one channel and 16 px."""
    torch.manual_seed(0)
    g = nn.Sequential(
        *(nn.ConvTranspose2d(LATENT, 4 * width, 4), nn.GroupNorm(2, 4 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.GroupNorm(2, 2 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, 1, 4, 2, 1), nn.Tanh()),
    )
    d = nn.Sequential(
        *(nn.Conv2d(1, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.GroupNorm(2, 4 * width), nn.LeakyReLU(0.2)),
        nn.Conv2d(4 * width, 1, 4),
    )
    return g, d


class Trainer(Protocol):
    """Takes steps of both networks."""

    def step(self) -> tuple[Tensor, Tensor]:
        """Return the losses of D and G."""
        ...


class Loop:
    """Hold the networks, optimizers, data and losses of a loop."""

    def __init__(self, case: Case, world: World):
        self.passes = case.passes
        self.g, self.d = build(case.width)
        self.opt_g, self.opt_d = (
            torch.optim.Adam(net.parameters(), 2e-4, (0.5, 0.99), fused=True) for net in (self.g, self.d)
        )
        self.rng = torch.Generator().manual_seed(world.rank)
        self.reals = torch.randn(256, 1, 16, 16, generator=self.rng).tanh()

    def draw(self) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.reals), (BATCH,), generator=self.rng)
        return torch.randn(BATCH, LATENT, 1, 1, generator=self.rng), self.reals[rows]

    def d_loss(self, d: nn.Module) -> Tensor:
        z, real = self.draw()
        with torch.no_grad():
            fake = self.g(z)
        on_real, on_fake = d(torch.cat([real, fake])).chunk(2)
        return (relu(1 - on_real).mean() + relu(1 + on_fake).mean()) / self.passes

    def g_loss(self, g: nn.Module) -> Tensor:
        z, _ = self.draw()
        return -self.d(g(z)).mean() / self.passes


class DDPLoop(Loop):
    """Plain PyTorch with two wrappers."""

    def __init__(self, case: Case, world: World):
        super().__init__(case, world)
        self.wrapped_g, self.wrapped_d = (
            DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
            for net in (self.g, self.d)
        )

    def step(self) -> tuple[Tensor, Tensor]:
        d_loss = self._turn(self.wrapped_d, self.opt_d, self.d_loss)
        self.d.requires_grad_(False)
        g_loss = self._turn(self.wrapped_g, self.opt_g, self.g_loss)
        self.d.requires_grad_(True)
        return d_loss, g_loss

    def _turn(
        self, net: DistributedDataParallel, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module], Tensor]
    ) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(self.passes):
            with net.no_sync() if i < self.passes - 1 else contextlib.nullcontext():
                loss = loss_of(net)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total


class ReplicaLoop(Loop):
    """The same with two replicas."""

    def __init__(self, case: Case, world: World):
        super().__init__(case, world)
        self.gen, self.disc = (
            paragan.Replica(self.g, self.opt_g, world=world),
            paragan.Replica(self.d, self.opt_d, world=world),
        )

    def step(self) -> tuple[Tensor, Tensor]:
        d_loss, g_loss = torch.zeros(2)
        with self.disc.turn(backwards=self.passes):
            for _ in range(self.passes):
                loss = self.d_loss(self.d)
                loss.backward()
                d_loss += loss.detach()
        with self.gen.turn(backwards=self.passes):
            for _ in range(self.passes):
                loss = self.g_loss(self.g)
                loss.backward()
                g_loss += loss.detach()
        return d_loss, g_loss


# The comparison -------------------------------------------------------------------------------------------


def compare(case: Case, world: World, rounds: int) -> dict[str, Any]:
    """Check that the losses are the same, then time both."""
    loops: dict[str, Trainer] = {"replica": ReplicaLoop(case, world), "ddp": DDPLoop(case, world)}
    difference = compare_losses(loops)
    if difference > TOLERANCE:
        raise SystemExit(f"replica and ddp are not the same computation: losses differ by {difference:.2g}")
    steps = torch.tensor([float(count_steps(BLOCK_S, repeat_fn(loops["ddp"].step)))])
    world.all_ranks.all_reduce_sum(steps).wait()
    times = interleave(
        {name: repeat_fn(loop.step) for name, loop in loops.items()},
        rounds=rounds,
        steps=round(steps.item() / world.size),
        barrier=lambda: barrier(world),
    )
    return {
        "parameters": sum(p.numel() for net in build(case.width) for p in net.parameters()),
        "passes": case.passes,
        "worst_difference": difference,
        "times": times.to_json("ddp"),
        "replica": times.ratio("replica", "ddp").to_json(),
    }


def compare_losses(loops: dict[str, Trainer]) -> float:
    """Return the largest difference of the losses of this rank in the first steps."""
    steps = [[torch.stack(loop.step()) for _ in range(NUM_CHECKED_STEPS)] for loop in loops.values()]
    return max((a - b).abs().max().item() for a, b in zip(*steps))


def rank_main(world: World, send: SendFn, options: argparse.Namespace) -> None:
    """Run the comparisons on one rank."""
    for name, case in CASES.items():
        if options.only in name:
            send((name, compare(case, world, options.rounds)))


def format_report(name: str, result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"\n{name}: {result['parameters']:,} parameters; losses of the first {NUM_CHECKED_STEPS} steps agree to "
            f"{result['worst_difference']:.1e}",
            format_times(result["times"]),
            format_conclusion("replica", result["replica"]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    results = collect_results(RANKS, rank_main, options, format_report)
    save_json(options.json, {"machine": machine, "ranks": RANKS, "threads_a_rank": 1, "cases": results})
    return 0 if all(result["replica"]["ci95"][0] <= 1.0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
