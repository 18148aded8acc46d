"""DistributedDataParallel and torch's own compression hook, on the links there are: the other side of
`paragan bench strategies`, and under the same launchers (`benchmarks/lab.py`, torchrun).

    python benchmarks/lab.py --hosts 4 --rate 200mbit -- python benchmarks/hooks.py --params 8M

Two players of square matrices, D's step and then G's, nothing but communication. Rank 0 prints, and writes --json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

LAYERS = 24
WARM_UP = 2


class Matrices(nn.Module):
    """So many parameters in square matrices, each multiplied into the input: as little arithmetic as there can be."""

    def __init__(self, params: int):
        super().__init__()
        side = math.isqrt(params // LAYERS)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(side, side) / side) for _ in range(LAYERS)])
        self.x = torch.randn(side)

    def forward(self) -> Tensor:
        return torch.stack([(layer @ self.x).sum() for layer in self.layers]).sum()


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "ddp": lambda ddp: None,
    "ddp+fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
}


def step_ms(register: Callable[[DistributedDataParallel], None], params: int, rounds: int) -> float:
    """Median over rounds of the slowest rank's."""
    players = [DistributedDataParallel(Matrices(params // 2), gradient_as_bucket_view=True) for _ in "DG"]
    for player in players:
        register(player)
    times = []
    for round in range(WARM_UP + rounds):
        dist.barrier()
        start = time.perf_counter()
        for player in players:
            player.zero_grad()
            player().backward()
        if round >= WARM_UP:
            times.append(1000 * (time.perf_counter() - start))
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="8M", metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    params = int(float(options.params.removesuffix("M")) * 1e6)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows = []
    for name, register in HOOKS.items():
        ms = step_ms(register, params, options.rounds)
        rows.append({"strategy": name, "ranks": dist.get_world_size(), "params": params, "step_ms": ms})
        if dist.get_rank() == 0:
            print(f"{name:<16}{ms:>10.1f} ms", flush=True)
    if dist.get_rank() == 0 and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo, met by the end of the interpreter, abort now and then


if __name__ == "__main__":
    main()
