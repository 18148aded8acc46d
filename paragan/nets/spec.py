"""The data that networks are built for."""

from dataclasses import dataclass

from paragan.core.errors import UsageError


@dataclass(frozen=True)
class Spec:
    """Shape and number of classes of the data.

    resolution  : side of the square images, pixels; 0 for arrays
    channels    : of the images; 0 for arrays
    classes     : number of classes; 0: unconditional
    array_shape : shape of a record, for arrays of numbers that are no images
    """

    resolution: int
    channels: int
    classes: int = 0
    array_shape: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image, (C, H, W), or of one record of numbers."""
        return self.array_shape or (self.channels, self.resolution, self.resolution)


def check_power_of_two(spec: Spec, minimum: int, maximum: int | None = None) -> None:
    """Raise `UsageError` unless the resolution is a power of two from `minimum` to `maximum`."""
    size = spec.resolution
    below = 1 << max(size, 1).bit_length() - 1
    nearest = max(minimum, below if size - below < 2 * below - size else 2 * below)
    nearest = nearest if maximum is None else min(nearest, maximum)
    if size != nearest:
        span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise UsageError(f"data.resolution={size}: these networks need a power of two {span} pixels. Use {nearest}")
