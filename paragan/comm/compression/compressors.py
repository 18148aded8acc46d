"""Wires: compressors, which encode a float vector as the bytes of a message.

A lossy one is a delta-approximate compressor Q: E|Q(v) - v|^2 <= (1 - delta) |v|^2 for every v, which is what error
feedback needs (Karimireddy et al. 2019; Chen et al. 2020). Each states its size and its delta, so planning needs no
measurement. A compressor of your own is a config class with these methods, given as `module:Class`; it is tried on a
few vectors when the run's configuration is read (`check_compressor`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from paragan.comm.compression import block_quantizer
from paragan.comm.compression.elias_fano import decode_positions, encode_positions, position_bytes
from paragan.core.errors import RunError, UsageError
from paragan.core.host_copies import copy_to_device
from paragan.core.schema import config_class, from_dict, name_shorthand, or_user_class

Block = Annotated[int, Field(ge=64, le=4096, multiple_of=64)]
Rounding = Literal["nearest", "stochastic"]
SCALE_ROUNDING = 2.0**-6  # the relative error of a scale in 16 bits, which is rounded up
Fraction = Annotated[float, Field(gt=0, le=1)]


class Compressor(Protocol):
    """Encodes a float vector of one number or more. Pure: the same vector and seed give the same bytes.

    lossy    : whether decoding may return other numbers than were encoded
    feedback : the default share of the loss that is sent with the next step (error feedback). It is 1, unless so much
               is lost that residuals would be sent long after the opponent they concern has moved on.
    """

    lossy: ClassVar[bool]
    feedback: ClassVar[float]

    @property
    def name(self) -> str:
        """What `strategy.wire` calls it."""
        ...

    def nbytes(self, n: int) -> int:
        """Return the bytes of n encoded numbers: a multiple of 4, or of 2."""
        ...

    def delta(self, n: int) -> float:
        """Return the part of |v|^2 that is kept at least, in expectation, for n numbers; 0: nothing is guaranteed."""
        ...

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        """Encode a vector. If x has a number that is not finite, so has the decoded vector.

        Args:
            x: [n] float32.
            out: [nbytes(n)] uint8, aligned to 4 bytes.
            seed: of random numbers, from 0 to 2^31 - 1.
        """
        ...

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode data [nbytes(n)] uint8 into out [n] float32."""
        ...


@config_class
class Exact:
    """float32, without loss."""

    name: Literal["exact"] = "exact"
    lossy: ClassVar[bool] = False
    feedback: ClassVar[float] = 0.0

    def nbytes(self, n: int) -> int:
        return 4 * n

    def delta(self, n: int) -> float:
        return 1.0

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        out.view(torch.float32).copy_(x)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.float32))


class _Float16Wire:
    """16 bits a number. delta holds for numbers that are normal in this format; smaller ones stay in the residual."""

    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0
    dtype: ClassVar[torch.dtype]
    significant_bits: ClassVar[int]

    def nbytes(self, n: int) -> int:
        return 2 * n

    def delta(self, n: int) -> float:
        return 1 - 4.0**-self.significant_bits

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        out.view(self.dtype).copy_(x)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(self.dtype))


@config_class
class BF16(_Float16Wire):
    """bfloat16: float32's range, 8 significant bits."""

    name: Literal["bf16"] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    significant_bits: ClassVar[int] = 8


@config_class
class FP16(_Float16Wire):
    """float16: 11 significant bits, from 6e-5 to 65504 (larger numbers are refused, not clipped)."""

    name: Literal["fp16"] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    significant_bits: ClassVar[int] = 11


class _UniformQuantizer:
    """Equally spaced levels, scaled by the largest number of each block.

    Rounded to nearest, all levels are used, -2^(bits - 1) to 2^(bits - 1) - 1: the scale is signed, so that the largest
    number becomes -2^(bits - 1). Rounded stochastically, there are as many levels on either side, so that the result is
    unbiased.
    """

    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0
    bits: ClassVar[int]
    block: int
    rounding: Rounding

    @property
    def max_level(self) -> int:
        """The level that the scale stands for."""
        half = 1 << (self.bits - 1)
        return half if self.rounding == "nearest" else half - 1

    def nbytes(self, n: int) -> int:
        return block_quantizer.num_blocks(n, self.block) * block_quantizer.encoded_block_bytes(self.block, self.bits)

    def delta(self, n: int) -> float:
        """Return the bound for the worst block: one large number, and all others in the middle between two levels.

        The scale is up to SCALE_ROUNDING greater than the large number.
        """
        step = (1 + SCALE_ROUNDING) / self.max_level
        others = (min(self.block, n) - 1) * (1 + SCALE_ROUNDING) ** 2 / self.max_level**2
        if self.rounding == "nearest":
            opposite = 1 / self.max_level**2  # the loss of a number as large as the largest, with the other sign
            return min((1 - SCALE_ROUNDING**2) / (1 + others / 4), 1 - opposite)
        return max(0.0, 1 - (math.sqrt(1 + others) - 1) / 2 - min(SCALE_ROUNDING * step, step**2 / 4))

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        stochastic = self.rounding == "stochastic"
        block_quantizer.encode_levels(
            x,
            out,
            block=self.block,
            bits=self.bits,
            max_level=self.max_level,
            rule="absmax" if stochastic else "signed_absmax",
            stochastic=stochastic,
            seed=seed,
        )

    def decode(self, data: Tensor, out: Tensor) -> None:
        block_quantizer.decode_levels(data, out, block=self.block, bits=self.bits, max_level=self.max_level)


@config_class
class Int8(_UniformQuantizer):
    """8 bits a number: 256 levels, scaled by a block's largest number.

    block    : numbers that share a scale
    rounding : nearest, or stochastic: at random, so that the mean is exact
    """

    name: Literal["int8"] = "int8"
    block: Block = 256
    rounding: Rounding = "nearest"
    bits: ClassVar[int] = 8


@config_class
class Int4(_UniformQuantizer):
    """4 bits a number: 16 levels, scaled by a block's largest number.

    A GAN became worse with blocks of 256 and feedback of 1 (docs/measurements/quantized.md).

    block    : numbers that share a scale
    rounding : nearest, or stochastic: at random, so that the mean is exact
    """

    name: Literal["int4"] = "int4"
    block: Block = 64
    rounding: Rounding = "nearest"
    bits: ClassVar[int] = 4
    feedback: ClassVar[float] = 0.5


@config_class
class Int2(_UniformQuantizer):
    """2 bits a number: a block's largest number, half of it, zero, or minus half of it.

    block    : numbers that share a scale
    rounding : nearest, or stochastic: at random, so that the mean is exact
    """

    name: Literal["int2"] = "int2"
    block: Block = 64
    rounding: Rounding = "nearest"
    bits: ClassVar[int] = 2


@config_class
class QSGD:
    """Levels scaled by a block's norm, rounded stochastically without bias (Alistarh et al. 2017).

    levels : quantization levels of a magnitude
    block  : numbers that share a norm
    """

    name: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, le=127)] = 127
    block: Block = 256
    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 0.0  # it is unbiased; with few levels delta is 0, and residuals would grow for ever

    @property
    def bits(self) -> int:
        """Bits a number: the least power of two that holds -levels .. levels."""
        if self.levels == 1:
            return 2
        return 4 if self.levels <= 7 else 8

    def nbytes(self, n: int) -> int:
        return block_quantizer.num_blocks(n, self.block) * block_quantizer.encoded_block_bytes(self.block, self.bits)

    def delta(self, n: int) -> float:
        """Return the bound of the paper's lemma 3.1, with a step that is up to SCALE_ROUNDING greater."""
        size = min(self.block, n)
        return max(0.0, 1 - min(size / self.levels**2, math.sqrt(size) / self.levels) * (1 + SCALE_ROUNDING) ** 2)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        block_quantizer.encode_levels(
            x, out, block=self.block, bits=self.bits, max_level=self.levels, rule="norm", stochastic=True, seed=seed
        )

    def decode(self, data: Tensor, out: Tensor) -> None:
        block_quantizer.decode_levels(data, out, block=self.block, bits=self.bits, max_level=self.levels)


@config_class
class Sign:
    """1 bit a number, times the mean magnitude of its block (Karimireddy et al. 2019).

    block : numbers that share a magnitude
    """

    name: Literal["sign"] = "sign"
    block: Block = 256
    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 0.5

    def nbytes(self, n: int) -> int:
        return block_quantizer.num_blocks(n, self.block) * block_quantizer.encoded_block_bytes(self.block, 1)

    def delta(self, n: int) -> float:
        return (1 - SCALE_ROUNDING**2) / min(self.block, n)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        block_quantizer.encode_signs(x, out, block=self.block)

    def decode(self, data: Tensor, out: Tensor) -> None:
        block_quantizer.decode_signs(data, out, block=self.block)


class _Sparsifier:
    """Sends a fraction of the numbers, with their positions; the others become zero."""

    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0
    fraction: float

    def num_sent(self, n: int) -> int:
        """Return how many of n numbers are sent: the fraction, rounded up."""
        return min(n, math.ceil(self.fraction * n))

    def delta(self, n: int) -> float:
        return self.num_sent(n) / n


@config_class
class TopK(_Sparsifier):
    """The `fraction` of the numbers with the largest magnitude (Stich et al. 2018), without loss or in few bits each.

    fraction : of the numbers that are sent
    bits     : of each of them: 32, or fewer, as int8, int4 and int2 encode them (SparseLoCo sends 2)
    """

    name: Literal["topk"] = "topk"
    fraction: Fraction = 0.01
    bits: Literal[32, 8, 4, 2] = 32

    @property
    def value_wire(self) -> Compressor:
        """The wire of the numbers that are sent, in the order of their positions."""
        return VALUE_WIRES[self.bits]

    def nbytes(self, n: int) -> int:
        k = self.num_sent(n)
        return -(-(self.value_wire.nbytes(k) + position_bytes(n, k)) // 4) * 4

    def delta(self, n: int) -> float:
        """Return the part of |v|^2 that is in the largest numbers at least, times the part that their wire keeps."""
        return super().delta(n) * self.value_wire.delta(self.num_sent(n))

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        k = self.num_sent(len(x))
        start = self.value_wire.nbytes(k)
        positions = x.abs().topk(k, sorted=False).indices.sort().values
        self.value_wire.encode(_select_values(x, positions), out[:start], seed)
        encode_positions(positions, len(x), out[start:][: position_bytes(len(x), k)])

    def decode(self, data: Tensor, out: Tensor) -> None:
        k = self.num_sent(len(out))
        start = self.value_wire.nbytes(k)
        positions = decode_positions(data[start:][: position_bytes(len(out), k)], len(out), k)
        values = out.new_empty(k)
        self.value_wire.decode(data[:start], values)
        out.zero_()[positions] = values


VALUE_WIRES: dict[int, Compressor] = {32: Exact(), 8: Int8(), 4: Int4(), 2: Int2()}  # by `TopK.bits`


@config_class
class RandomK(_Sparsifier):
    """A random `fraction` of the numbers, without loss; their positions follow from a seed in the message.

    The host draws the positions, so on an accelerator it waits for every message that it decodes.

    fraction : of the numbers that are sent
    """

    name: Literal["randomk"] = "randomk"
    fraction: Fraction = 0.01

    def nbytes(self, n: int) -> int:
        return 4 + 4 * self.num_sent(n)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        out[:4].view(torch.int32).fill_(seed)
        positions = self._positions(seed, len(x), x.device)
        out[4:].view(torch.float32).copy_(_select_values(x, positions))

    def decode(self, data: Tensor, out: Tensor) -> None:
        seed = int(data[:4].view(torch.int32))
        out.zero_()[self._positions(seed, len(out), out.device)] = data[4:].view(torch.float32)

    def _positions(self, seed: int, n: int, device: torch.device) -> Tensor:
        """Return [k] distinct positions, all equally likely."""
        generator = torch.Generator().manual_seed(seed)
        return copy_to_device(torch.randperm(n, generator=generator)[: self.num_sent(n)], device)


@contextlib.contextmanager
def wire_errors(wire: Compressor) -> Generator[None]:
    """Turn any exception in this context into a RunError of the wire: a user's own wire may raise anything."""
    try:
        yield
    except Exception as error:
        raise RunError(f"the {wire.name} wire failed: {type(error).__name__}: {error}") from error


def check_compressor(wire: Compressor) -> None:
    """Raise UsageError if a user's own compressor breaks the contract on a few vectors."""
    if not 0 <= wire.feedback <= 1:
        raise UsageError(f"feedback={wire.feedback!r}: out of range. Use a number from 0 to 1")
    for x in (torch.linspace(-1, 1, 1000), torch.ones(1), torch.zeros(64)):
        nbytes = wire.nbytes(len(x))
        if type(nbytes) is not int or nbytes < 1 or nbytes % 2:
            raise UsageError(f"nbytes({len(x)}): returned {nbytes!r}. Return a positive int, a multiple of 2")
        data = torch.zeros(nbytes, dtype=torch.uint8)
        out = torch.full_like(x, torch.nan)
        wire.encode(x.clone(), data, 0)
        wire.decode(data, out)
        if not out.isfinite().all():
            raise UsageError(f"decode(encode(x)): of {len(x)} finite numbers is not finite")


def _select_values(x: Tensor, positions: Tensor) -> Tensor:
    """Return x at these positions; NaN if any of x is not finite, since it might be one that is not sent."""
    return torch.where(x.isfinite().all(), x[positions], torch.nan)


Wire = Annotated[
    Exact | BF16 | FP16 | Int8 | Int4 | Int2 | QSGD | Sign | TopK | RandomK,
    Field(discriminator="name"),
    or_user_class(check_compressor, "lossy", "feedback", "nbytes", "delta", "encode", "decode"),
    name_shorthand,
]


@config_class
class _WireField:
    wire: Wire


def parse_wire(wire: str | Compressor) -> Compressor:
    """Return the wire of a name. A compressor is returned as it is.

    Raises:
        UsageError: there is no such wire; names the nearest.
    """
    return from_dict(_WireField, {"wire": wire}).wire


# wires that are accurate enough without error feedback
SnapshotWire = Annotated[Exact | BF16 | FP16 | Int8 | Int4, Field(discriminator="name"), name_shorthand]
