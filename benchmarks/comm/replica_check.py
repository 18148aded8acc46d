"""Time `paragan.check_replicas` against a training step under DistributedDataParallel.

    torchrun --nproc-per-node 2 -m benchmarks.comm.replica_check [--json F]

A DCGAN at 16 px, batch 32 a rank, Adam. Steps and checks alternate; a check reads both networks and both optimizers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paragan
from benchmarks.lib.timing import describe_machine, format_machine, save_json

LATENT, BATCH = 64, 32


def build(width: int) -> tuple[nn.Module, nn.Module]:
    """Return G and D, for images of one channel and 16 px."""
    torch.manual_seed(0)
    g = nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4 * width, 4),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 1, 4, 2, 1),
        nn.Tanh(),
    )
    d = nn.Sequential(
        nn.Conv2d(1, 2 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
    )
    return g, d


def measure(width: int, steps: int) -> dict[str, Any]:
    """Return the median times of a step and of a check, in milliseconds."""
    g, d = map(DistributedDataParallel, build(width))
    opt_g, opt_d = (torch.optim.Adam(net.parameters(), 2e-4) for net in (g, d))
    real = torch.randn(BATCH, 1, 16, 16)
    step_ms, check_ms = [], []
    for _ in range(steps):
        start = time.perf_counter()
        fake = g(torch.randn(BATCH, LATENT, 1, 1))
        opt_d.zero_grad()
        (d(fake.detach()) - d(real)).mean().backward()
        opt_d.step()
        opt_g.zero_grad()
        d.requires_grad_(False)
        (-d(fake)).mean().backward()
        d.requires_grad_(True)
        opt_g.step()
        middle = time.perf_counter()
        paragan.check_replicas(g, d, opt_g, opt_d)
        step_ms.append(1000 * (middle - start))
        check_ms.append(1000 * (time.perf_counter() - middle))
    parameters = sum(p.numel() for net in (g, d) for p in net.parameters())
    medians = statistics.median(step_ms[2:]), statistics.median(check_ms[2:])
    return {"parameters": parameters, "step_ms": medians[0], "check_ms": medians[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rows = [measure(width, steps) for width, steps in ((16, 60), (128, 20))]
    if dist.get_rank() == 0:
        print(format_machine(machine))
        for row in rows:
            share = row["check_ms"] / (100 * row["step_ms"])
            print(f"{row['parameters']:>12,}  step {row['step_ms']:.1f} ms  check {row['check_ms']:.2f} ms")
            print(f"              with every=100: {share:.2%} of the time")
        save_json(options.json, {"ranks": dist.get_world_size(), "machine": machine, "rows": rows})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
