"""Map images with more than 8 bits to uint8 by a range of stored values (`data.range`).

Training sees 8 bits. Images with more (16-bit integers, floats) need a range: the values LOW:HIGH that become 0:255.

* `auto` finds it from the images: integers get the depth that holds the largest value found (8, 10, 12, 14 or 16 bits),
  floats 0:1 or -1:1. What could mean several things is refused. An image with values outside is refused as damaged
  images are, never clipped, so a range found from a sample of the images is safe.
* `full` takes all 16 bits of 16-bit integers.
* `MIN:MAX` clips values outside. It also stretches 8-bit images if MAX is at most 255.

Integers of a range 0:2^n-1 keep their highest 8 bits; other ranges are mapped linearly and rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.source import DecodeError

AUTO = "auto"
FULL = "full"

_DEPTHS = (8, 10, 12, 14, 16)  # bits that cameras and scanners have
_MAX_8_BIT = 255
MAX_VALUE = 1e30  # of stored values: differences of larger ones overflow
_MAX_EXACT = 2**53  # integers below it are exact as floats
_MIN_SPREAD = 16  # of 255 levels: of images with a smaller spread in every channel almost nothing can be seen


@dataclass(frozen=True)
class ValueRange:
    """The stored values that become 0 and 255.

    low, high : the values
    clips     : whether values outside are clipped; otherwise their image is refused
    """

    low: float
    high: float
    clips: bool

    def __str__(self) -> str:
        return f"{format_value(self.low)}:{format_value(self.high)}"

    @property
    def option(self) -> str:
        """The value of `data.range` that gives this range."""
        return str(self) if self.clips else f"{AUTO}:{self}"

    @property
    def changes_8_bit(self) -> bool:
        """Return whether the range changes 8-bit images too."""
        return self.clips and self.high <= _MAX_8_BIT and (self.low, self.high) != (0, _MAX_8_BIT)

    def to_uint8(self, values: np.ndarray) -> np.ndarray:
        """Map values of any shape and numeric type to uint8.

        Raises:
            DecodeError: a value is not finite, or lies outside of a range that does not clip.
        """
        low, high = find_extremes(values)
        if not self.clips and not self.low <= low <= high <= self.high:
            raise DecodeError(
                f"holds values from {format_value(low)} to {format_value(high)}, and --data.range=auto found {self}: "
                f"use --data.range={self} to clip them, or a larger MIN:MAX"
            )
        shift = self._shift()
        if values.dtype.kind != "f" and shift is not None:
            wide = values.astype(np.promote_types(values.dtype, np.min_scalar_type(int(self.high))), copy=False)
            return (wide.clip(0, int(self.high)) >> shift).astype(np.uint8)
        scaled = (values.astype(np.float64) - self.low) * _MAX_8_BIT / (self.high - self.low)
        return np.rint(scaled.clip(0, _MAX_8_BIT)).astype(np.uint8)

    def _shift(self) -> int | None:
        """Return how many low bits a range 0:2^n-1 of integers drops; None for other ranges."""
        count = int(self.high) + 1
        is_depth = self.low == 0 and self.high == count - 1 and _MAX_8_BIT < count <= 2**32 and count.bit_count() == 1
        return count.bit_length() - 9 if is_depth else None


RangeOption = ValueRange | str  # a range, AUTO or FULL


def parse_range(text: str) -> RangeOption:
    """Parse `data.range`: auto, full, MIN:MAX, or auto:MIN:MAX, which is what `auto` found in a run.

    Raises:
        UsageError: it is none of them.
    """
    if text in (AUTO, FULL):
        return text
    numbers = text.removeprefix(f"{AUTO}:")
    try:
        low, high = map(float, numbers.split(":"))
    except ValueError:
        raise UsageError(f"data.range={text}: not a range. Use auto, full, or MIN:MAX such as 0:4095") from None
    if max(abs(low), abs(high)) > MAX_VALUE:
        raise UsageError(f"data.range={text}: too large. Use MIN and MAX between -{MAX_VALUE:g} and {MAX_VALUE:g}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"data.range={text}: MIN must be below MAX. Use auto, full, or MIN:MAX such as 0:4095")
    return ValueRange(low, high, clips=numbers == text)


def to_8_bits(values: np.ndarray, value_range: ValueRange | None, has_alpha: bool = False) -> np.ndarray:
    """Map the values of an image with more than 8 bits to uint8.

    Args:
        values: [H, W] or [H, W, C], as stored.
        value_range: the range; None if all images that were looked at are 8-bit.
        has_alpha: whether the last channel is alpha, uint16.

    Raises:
        DecodeError: a value is not finite, or there is no range for it.
    """
    colors = values[..., :-1] if has_alpha else values
    low, high = find_extremes(colors)
    if value_range is None:
        raise DecodeError(
            f"holds {values.dtype} from {format_value(low)} to {format_value(high)}, and the images looked at are "
            f"8-bit: use --data.range={_format(low, high)}, or another MIN:MAX"
        )
    pixels = value_range.to_uint8(colors)
    if not has_alpha:
        return pixels
    return np.concatenate([pixels, (values[..., -1:] >> 8).astype(np.uint8)], axis=-1)


def find_extremes(values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value. Raises `DecodeError` if one is NaN or infinite."""
    low, high = values.min(), values.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        count = int(np.count_nonzero(~np.isfinite(values)))
        raise DecodeError(f"{count:,} of {values.size:,} values are NaN or infinite")
    if max(-float(low), float(high)) > MAX_VALUE:
        raise DecodeError(f"holds values from {float(low):g} to {float(high):g}, and {MAX_VALUE:g} is the largest")
    return low.item(), high.item()


def format_value(value: float) -> str:
    """Format a stored value so that `parse_range` reads it."""
    return str(int(value)) if abs(value) < _MAX_EXACT and value == int(value) else repr(float(value))


@dataclass(frozen=True)
class ImageValues:
    """The values of one image.

    dtype       : as stored; uint8 for plain images
    lows, highs : [3] extremes of each channel, as stored (of plain images: as training sees them)
    is_integral : whether all are whole numbers
    """

    dtype: np.dtype
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    is_integral: bool

    @property
    def is_plain(self) -> bool:
        """Return whether the image is 8-bit."""
        return self.dtype == np.uint8


def measure_values(values: np.ndarray) -> ImageValues:
    """Return the extremes of an image [H, W] or [H, W, C]. Raises `DecodeError` if a value is NaN or infinite."""
    find_extremes(values)
    channels = values.reshape(values.shape[0] * values.shape[1], -1)  # [H * W, C]
    is_integral = values.dtype.kind != "f" or bool((values == np.trunc(values)).all())
    count = 3 if channels.shape[1] == 1 else channels.shape[1]  # grey is compared with RGB
    lows, highs = (tuple(np.broadcast_to(x, count).tolist()) for x in (channels.min(axis=0), channels.max(axis=0)))
    return ImageValues(values.dtype, lows, highs, is_integral)


@dataclass(frozen=True)
class ValueScan:
    """The values of images that were decoded to see their range.

    deep  : images with more than 8 bits
    plain : 8-bit images, as training sees them without a range
    """

    deep: tuple[ImageValues, ...] = ()
    plain: tuple[ImageValues, ...] = ()

    def resolve(self, option: RangeOption) -> ValueRange | None:
        """Return the range that `data.range` means for these images; None if they need none.

        Raises:
            UsageError: `auto` could mean several, the images have no full range, or none of their values lies in it.
        """
        if option == AUTO:
            return _find_range(self.deep) if self.deep else None
        if isinstance(option, ValueRange):
            self._check_overlap(option)
            return option
        dtypes = {image.dtype for image in self.deep}
        if dtypes - {np.dtype(np.uint16)}:
            found = _format(*_extremes_of(self.deep))
            raise UsageError(
                f"data.range=full: not possible for {_type_names(dtypes)}. Use --data.range={found}, which was found"
            )
        return ValueRange(0, 2**16 - 1, clips=True)

    def describe(self, value_range: ValueRange | None) -> list[str]:
        """Return lines for people: what was found, what was done, and whether anything can be seen then."""
        lines: list[str] = []
        changed = self.deep
        if value_range is not None and value_range.changes_8_bit:
            changed = (*self.deep, *self.plain)
        if value_range is not None and changed:
            low, high = _extremes_of(changed)
            of_images = f"{_count_images(changed)} of {_type_names({image.dtype for image in changed})}"
            found = format_value(low) if low == high else _format(low, high)
            line = f"values {found} found in {of_images}; {value_range} becomes 0:255"
            line += f" ({_describe_mapping(value_range, changed)})"
            lines.append(line if changed != self.deep or not self.plain else f"{line}; 8-bit images are unchanged")
        elif value_range is not None and value_range.clips:
            lines.append(f"data.range={value_range} changes nothing: the images that were looked at are 8-bit")
        return [*lines, *self._describe_spread(value_range)]

    def _check_overlap(self, value_range: ValueRange) -> None:
        """Refuse a range which makes all images constant although they are not."""
        images = (*self.deep, *self.plain) if value_range.changes_8_bit else self.deep
        if not images or not value_range.clips:
            return
        low, high = _extremes_of(images)
        if low < high and (high <= value_range.low or low >= value_range.high):
            color = "black" if high <= value_range.low else "white"
            raise UsageError(
                f"data.range={value_range}: all images would be {color}, their values are {_format(low, high)}. "
                f"Use --data.range={_format(low, high)}"
            )

    def _describe_spread(self, value_range: ValueRange | None) -> list[str]:
        """Return a line if the images are constant or nearly so, as training sees them."""
        images = (*self.plain, *self.deep)
        if not images:
            return []
        pixels = np.array([_pixel_extremes(image, value_range) for image in images])  # [n, 2, 3]
        lows = pixels[:, 0].min(axis=0)
        highs = pixels[:, 1].max(axis=0)
        if (highs - lows).max() >= _MIN_SPREAD:
            return []
        of_images = f"of {_count_images(images)} that were looked at"
        if (highs == lows).all():
            line = f"constant: all pixels {of_images} have one colour ({', '.join(map(str, lows))})"
        else:
            line = f"almost constant: all pixels {of_images} lie between {lows.min()} and {highs.max()} of 255"
        low, high = _extremes_of(images)
        return [f"{line}; --data.range={_format(low, high)} stretches them" if low < high else line]


def outside_range_message(
    value_range: ValueRange | None, images: Sequence[ImageValues], count: int, example: str
) -> str:
    """Return the message for images outside of the range that `auto` found from others.

    Args:
        value_range: the range; None if all others are 8-bit.
        images: those outside.
        count: of all images.
        example: what messages call the first one.
    """
    low, high = _extremes_of(images)
    others = "the images that were looked at are 8-bit"
    if value_range is not None:
        low = min(low, value_range.low)
        others = f"{value_range} was found from others, --data.range={value_range} clips them"
    return (
        f"data.range=auto: {len(images):,} of {count:,} images hold {_type_names({i.dtype for i in images})} "
        f"{_format(*_extremes_of(images))}, the first is {example}; {others}. Use --data.range={_format(low, high)}"
    )


def _find_range(images: Sequence[ImageValues]) -> ValueRange:
    """Return the range of images with more than 8 bits.

    Raises:
        UsageError: it is not certain.
    """
    low, high = _extremes_of(images)
    found = _format(low, high)
    kinds = {image.dtype.kind == "f" for image in images}
    if len(kinds) > 1:
        raise UsageError(
            f"data.range=auto: images of {_type_names({i.dtype for i in images})} have no common range. Use images of "
            "one type"
        )
    if kinds == {True} and low >= -1 and high <= 1:
        return ValueRange(-1 if low < 0 else 0, 1, clips=False)
    if low >= 0 and all(image.is_integral for image in images):
        depth = next((bits for bits in _DEPTHS if high < 2**bits), None)
        if depth is not None:
            return ValueRange(0, 2**depth - 1, clips=False)
    readings = [found]
    if low >= 0 and high < 2:
        readings.insert(0, "0:1 (clips)")
    elif low >= 0 and high <= _MAX_8_BIT:
        readings.insert(0, f"0:{_MAX_8_BIT} (8-bit values)")
    if low < 0 < high:
        readings.append(f"{format_value(0)}:{format_value(high)} (clips)")
    raise UsageError(
        f"data.range=auto: values {found} were found, which may mean several ranges. Use "
        + ", or ".join(f"--data.range={reading}" for reading in readings)
    )


def _extremes_of(images: Sequence[ImageValues]) -> tuple[float, float]:
    return min(min(image.lows) for image in images), max(max(image.highs) for image in images)


def _pixel_extremes(image: ImageValues, value_range: ValueRange | None) -> np.ndarray:
    """Return the smallest and the largest value [2, 3] of an image as training sees it, int64."""
    values = np.array([image.lows, image.highs], image.dtype)
    if value_range is not None and (not image.is_plain or value_range.changes_8_bit):
        values = dataclasses.replace(value_range, clips=True).to_uint8(values)
    return values.astype(np.int64)


def _describe_mapping(value_range: ValueRange, images: Sequence[ImageValues]) -> str:
    low, high = _extremes_of(images)
    if not value_range.clips:
        return "data.range=auto"
    is_clipped = low < value_range.low or high > value_range.high
    return "values outside are clipped" if is_clipped else "no value is outside"


def _format(low: float, high: float) -> str:
    """Format a range that holds both values, for `parse_range`."""
    if float(low) == float(high):
        high = max(low + 1, math.nextafter(low, math.inf))
    return f"{format_value(low)}:{format_value(high)}"


def _count_images(images: Sequence[ImageValues]) -> str:
    return "1 image" if len(images) == 1 else f"{len(images):,} images"


def _type_names(dtypes: Iterable[np.dtype]) -> str:
    return " and ".join(sorted(map(str, dtypes)))
