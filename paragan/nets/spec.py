"""What a pair of networks is built for."""

from dataclasses import dataclass

from paragan.core.errors import UsageError


@dataclass(frozen=True)
class Spec:
    """Square images [channels, resolution, resolution] (pixels) of `classes` classes (0: unconditional); or numbers of
    any other shape, `values` (then resolution and channels are 0)."""

    resolution: int
    channels: int
    classes: int = 0
    array_shape: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image, [C, H, W], or of one record of numbers."""
        return self.array_shape or (self.channels, self.resolution, self.resolution)


def check_power_of_two(spec: Spec, minimum: int, maximum: int | None = None) -> None:
    """Raise `Unusable`, naming the nearest that fits, unless the resolution is a power of two, least ... most."""
    size = spec.resolution
    below = 1 << max(size, 1).bit_length() - 1
    nearest = max(minimum, below if size - below < 2 * below - size else 2 * below)
    nearest = nearest if maximum is None else min(nearest, maximum)
    if size != nearest:
        span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise UsageError(
            f"data.resolution={size}: these networks need a power of two {span} pixels; {nearest} would work"
        )
