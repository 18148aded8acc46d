"""Time encoding and decoding by every wire, compared with copying the same vector.

`python -m benchmarks.comm.compressors [--json F]`.

One thread, float32 vectors larger than the caches, interleaved in one process. The ratio says how far the codec is from
the speed of memory.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.lib.timing import (
    StepsFn,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.comm.compression import block_quantizer
from paragan.comm.compression.compressors import BF16, FP16, QSGD, Compressor, Exact, Int2, Int4, Int8, Sign

COMPRESSORS: dict[str, Compressor] = {
    "exact": Exact(),
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "int8 stochastic": Int8(rounding="stochastic"),
    "int4": Int4(),
    "int4 stochastic": Int4(rounding="stochastic"),
    "int2": Int2(),
    "qsgd": QSGD(),
    "sign": Sign(),
}
MAX_COPY_RATIOS = {"int8": 3.0, "int4": 5.0, "sign": 4.0}  # times the time of a copy


def encode_decode_fn(wire: Compressor, x: torch.Tensor) -> StepsFn:
    data = torch.empty(wire.nbytes(len(x)), dtype=torch.uint8)
    out = torch.empty_like(x)

    def step() -> None:
        wire.encode(x, data, 1)
        wire.decode(data, out)

    return repeat_fn(step)


def copy_fn(x: torch.Tensor) -> StepsFn:
    out = torch.empty_like(x)
    return repeat_fn(lambda: out.copy_(x))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    print(format_machine(machine))
    if block_quantizer.load_kernels() is None:
        sys.exit("there is no C compiler: nothing to compare")
    x = torch.randn(options.numbers)
    contestants = {"copy": copy_fn(x)} | {name: encode_decode_fn(wire, x) for name, wire in COMPRESSORS.items()}
    times = interleave(contestants, rounds=options.rounds, steps=5)
    results = times.to_json("copy")
    rows = []
    for name, entry in results.items():
        ms, ratio = entry["ms"], entry["ratio to copy"]
        bits = "" if name == "copy" else f"{8 * COMPRESSORS[name].nbytes(len(x)) / len(x):.2f}"
        rows.append([name, bits, *(f"{v:.2f}" for v in (ms["median"], ratio["median"], *ratio["ci95"]))])
    print(format_table(["", "bits", "ms", "to copy", "low", "high"], rows))
    save_json(options.json, {"machine": machine, "numbers": options.numbers, "threads": 1, "times": results})
    slow = [name for name, limit in MAX_COPY_RATIOS.items() if results[name]["ratio to copy"]["median"] > limit]
    print(f"too slow: {', '.join(slow)}" if slow else "int8 within 3, int4 within 5, sign within 4 copies")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
