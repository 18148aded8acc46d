"""What a pair of networks is built for."""

from dataclasses import dataclass

from paragan.core.errors import Unusable


@dataclass(frozen=True)
class Spec:
    """Square images [channels, resolution, resolution] (pixels) of `classes` classes (0: unconditional); or numbers of
    any other shape, `values` (then resolution and channels are 0)."""

    resolution: int
    channels: int
    classes: int = 0
    values: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image, [C, H, W], or of one record of numbers."""
        return self.values or (self.channels, self.resolution, self.resolution)


def need_power_of_two(spec: Spec, least: int, most: int | None = None) -> None:
    """Raise `Unusable`, naming the nearest that fits, unless the resolution is a power of two, least ... most."""
    size = spec.resolution
    below = 1 << max(size, 1).bit_length() - 1
    nearest = max(least, below if size - below < 2 * below - size else 2 * below)
    nearest = nearest if most is None else min(nearest, most)
    if size != nearest:
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise Unusable(
            f"data.resolution={size}: these networks need a power of two {span} pixels; {nearest} would work"
        )
