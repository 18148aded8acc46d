"""Time DistributedDataParallel with torch's compression hooks and ours (`paragan.ddp_hook`).

`paragan bench strategies` measures the same networks under our own strategies.

It runs under the same launchers: benchmarks/lib/netns_lab.py, torchrun.

    python -m benchmarks.lib.netns_lab --hosts 4 --rate 200mbit -- python -m benchmarks.comm.ddp_hooks --params 8M

Two networks of square matrices, D's step and then G's, with next to no computation. Rank 0 prints, and writes --json.
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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paragan.comm.ddp_hook import ddp_hook

LAYERS = 24
WARM_UP = 4
# More than a network: torch's PowerSGD waits inside callbacks, which block gloo's two threads. Two buckets in flight
# would wait for each other for ever.
SINGLE_BUCKET_MB = 1024


class MatrixNet(nn.Module):
    """A network of `params` parameters in square matrices, each multiplied by a vector: the least arithmetic."""

    def __init__(self, params: int):
        super().__init__()
        side = math.isqrt(params // LAYERS)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(side, side) / side) for _ in range(LAYERS)])
        self.x = torch.randn(side)

    def forward(self) -> Tensor:
        return torch.stack([(layer @ self.x).sum() for layer in self.layers]).sum()


def wrap_plain(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net, gradient_as_bucket_view=True)


def wrap_fp16(net: nn.Module) -> DistributedDataParallel:
    ddp = wrap_plain(net)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def wrap_power_sgd(net: nn.Module, rank: int) -> DistributedDataParallel:
    """Compress every matrix to factors of this rank, with a residual; the first two steps are not compressed."""
    ddp = DistributedDataParallel(net, bucket_cap_mb=SINGLE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def wrap_ours(net: nn.Module, wire: str) -> DistributedDataParallel:
    ddp = wrap_plain(net)
    ddp.register_comm_hook(*ddp_hook(wire))
    return ddp


HOOKS: dict[str, Callable[[nn.Module], DistributedDataParallel]] = {
    "ddp": wrap_plain,
    "ddp+fp16": wrap_fp16,
    **{f"ddp+{wire}": partial(wrap_ours, wire=wire) for wire in ("int8", "int4", "sign")},
    "ddp+powersgd1": lambda net: wrap_power_sgd(net, 1),
    "ddp+powersgd4": lambda net: wrap_power_sgd(net, 4),
}


def step_ms(distributed: Callable[[nn.Module], DistributedDataParallel], params: int, rounds: int) -> float:
    """Return the milliseconds of a step: the slowest rank's, the median over rounds."""
    nets = [distributed(MatrixNet(params // 2)) for _ in "DG"]
    times = []
    for round in range(WARM_UP + rounds):
        dist.barrier()
        start = time.perf_counter()
        for net in nets:
            net.zero_grad()
            net().backward()
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
    for name, distributed in HOOKS.items():
        ms = step_ms(distributed, params, options.rounds)
        rows.append({"strategy": name, "ranks": dist.get_world_size(), "params": params, "step_ms": ms})
        if dist.get_rank() == 0:
            print(f"{name:<16}{ms:>10.1f} ms", flush=True)
    if dist.get_rank() == 0 and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort when the interpreter ends


if __name__ == "__main__":
    main()
