"""How fast torch's convolutions of small networks are.

`python -m benchmarks.speed.convolutions [--json F]`, half a minute.

TFLOP/s of the forward pass and of both gradients, channels last and in bf16, and of the weights' gradient as one
product of the unfolded images, for the convolutions of `digits`, and of the DCGANs of Fashion-MNIST and CIFAR-10;
beside them what a product of large matrices reaches. They bound what any layout of these networks can be worth:
docs/tuning.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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

# name: (images, channels, channels out, size, kernel, stride)
SHAPES = {
    "digits, 4x4 down": (128, 32, 64, 8, 4, 2),
    "digits, at the image": (128, 1, 32, 8, 3, 1),
    "Fashion-MNIST, 4x4 down": (32, 32, 64, 16, 4, 2),
    "CIFAR-10, 4x4 down": (64, 64, 128, 16, 4, 2),
    "CIFAR-10, the next": (64, 128, 256, 8, 4, 2),
}
BLOCK_S, PEAK_SIDE = 0.05, 2048
aten = torch.ops.aten


def random_bf16(*shape: int) -> Tensor:
    build = torch.randn(*shape).bfloat16()
    return build.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else build


def im2col(x: Tensor, kernel: int, stride: int) -> Tensor:
    """[N, C, H, W] -> [N * pixels, kernel * kernel * C], padded by one."""
    padded = pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).contiguous()
    n, height, width, channels = padded.shape
    a, b, c, _ = padded.stride()
    shape = n, (height - kernel) // stride + 1, (width - kernel) // stride + 1, kernel, kernel * channels
    return padded.as_strided(shape, (a, stride * b, stride * c, b, 1)).reshape(-1, kernel * kernel * channels)


def conv_tflops(
    images: int, channels: int, out: int, size: int, kernel: int, stride: int, rounds: int
) -> dict[str, Any]:
    """TFLOP/s of each form, the median over rounds in turns."""
    x, weight = random_bf16(images, channels, size, size), random_bf16(out, channels, kernel, kernel)
    kind = [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1
    slope = torch.randn_like(aten.convolution(x, weight, None, *kind))
    rows = slope.permute(0, 2, 3, 1).reshape(-1, out)

    def gradient(*target: bool) -> object:
        return aten.convolution_backward(slope, x, weight, [0], *kind, list(target))

    forms = {
        "forward": repeat_fn(lambda: aten.convolution(x, weight, None, *kind)),
        "of the images": repeat_fn(lambda: gradient(True, False, False)),
        "of the weights": repeat_fn(lambda: gradient(False, True, False)),
        "as a product": repeat_fn(lambda: rows.T @ im2col(x, kernel, stride)),
    }
    times: Times = interleave(forms, rounds=rounds, steps=count_steps(BLOCK_S, forms["forward"]))
    operations = 2 * weight.numel() * rows.shape[0]
    return {name: operations / times.spread(name).median / 1e9 for name in forms}


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="that are timed of every form (9)")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    where = describe_machine() | {"threads": torch.get_num_threads()}
    print(format_machine(where))
    a, b = random_bf16(PEAK_SIDE, PEAK_SIDE), random_bf16(PEAK_SIDE, PEAK_SIDE)
    product = interleave({"product": repeat_fn(lambda: a @ b)}, rounds=options.rounds, steps=3).spread("product")
    peak = 2 * PEAK_SIDE**3 / product.median / 1e9
    result = {name: conv_tflops(*shape, options.rounds) for name, shape in SHAPES.items()}
    rows = [[name, *(f"{rate:.2f}" for rate in private.values())] for name, private in result.items()]
    header = ["", *next(iter(result.values()))]
    print(f"TFLOP/s; a product of {PEAK_SIDE} x {PEAK_SIDE} reaches {peak:.2f}\n{format_table(header, rows)}")
    about = {"machine": where, "command": " ".join(sys.argv[1:]), "product": peak, "tflops": result}
    save_json(options.json, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
