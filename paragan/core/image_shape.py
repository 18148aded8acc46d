"""Sizes and channels of images. A size is one number for squares, WIDTHxHEIGHT for others, as image tools write it.

Arrays and tensors have the height first, [..., H, W]; only sizes that people read or type have the width first.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from paragan.core.errors import UsageError

PICTURE_CHANNELS = (1, 3)  # grey and RGB, which are converted to each other
MAX_CHANNELS = 512
RESOLUTION_HINT = "Use one number for squares, such as 64, or WIDTHxHEIGHT, such as 256x128"
_WIDTH_X_HEIGHT = re.compile(r"\s*(\d{1,9})\s*[xX]\s*(\d{1,9})\s*")


def parse_resolution(value: Any) -> int | str:
    """Return a resolution in its one form: the side of squares, or "WIDTHxHEIGHT" of other images.

    Args:
        value: an int, or text such as "64" or "256x128".

    Raises:
        ValueError: it is neither; 0 is allowed as one number ("not known yet"), and not as a width or a height.
    """
    if isinstance(value, str) and (match := _WIDTH_X_HEIGHT.fullmatch(value)):
        width, height = int(match[1]), int(match[2])
        if width and height:
            return width if width == height else f"{width}x{height}"
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"not a size. {RESOLUTION_HINT}")


Resolution = Annotated[int | str, BeforeValidator(parse_resolution)]


class ImageSize(NamedTuple):
    """Width and height of an image, pixels."""

    width: int
    height: int

    @classmethod
    def of(cls, resolution: int | str) -> ImageSize:
        """Return the size that a resolution means. Raises `ValueError` as `parse_resolution` does."""
        parsed = parse_resolution(resolution)
        if isinstance(parsed, int):
            return cls(parsed, parsed)
        width, height = parsed.split("x")
        return cls(int(width), int(height))

    @property
    def resolution(self) -> int | str:
        """Return the value of `data.resolution` for this size: 64, or "256x128"."""
        return self.width if self.is_square else f"{self.width}x{self.height}"

    @property
    def is_square(self) -> bool:
        return self.width == self.height

    @property
    def short_side(self) -> int:
        return min(self)

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def __str__(self) -> str:
        """The size for people, who see which number is which: "64 x 64", or "256 wide, 128 high"."""
        if self.is_square:
            return f"{self.width} x {self.height}"
        return f"{self.width} wide, {self.height} high"

    def fit_within(self, side: int) -> ImageSize:
        """Return the size of the same shape whose longer side is at most `side`."""
        longest = max(self)
        if longest <= side:
            return self
        return ImageSize(max(1, self.width * side // longest), max(1, self.height * side // longest))


def check_resolution(name: str, resolution: int | str) -> ImageSize:
    """Return the size that `resolution` means. Raises UsageError, which calls it `name`, if it is none."""
    try:
        size = ImageSize.of(parse_resolution(resolution))
    except ValueError as error:
        raise UsageError(f"{name}={resolution}: {error}") from None
    if not size.pixels:
        raise UsageError(f"{name}={resolution}: not a size. Use 8 or more, such as 64, or 256x128 (WIDTHxHEIGHT)")
    return size


def check_channels(name: str, channels: int | None) -> None:
    """Raise UsageError, which calls it `name`, for an impossible number of channels."""
    if channels is not None and not 1 <= channels <= MAX_CHANNELS:
        raise UsageError(
            f"{name}={channels}: not possible. Use 1 (grey), 3 (RGB), 4 (RGB and alpha), or the number that an array "
            f"has, up to {MAX_CHANNELS}"
        )


def channels_option(channels: int) -> str:
    """Return how a user asks for so many channels, for messages."""
    return f"--data.channels={channels} (`paragan data`: `--channels {channels}`)"
