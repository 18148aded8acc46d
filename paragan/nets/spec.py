"""The data that networks are built for, and which sizes of images networks of halvings can make."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize, Resolution, parse_resolution

MIN_GRID_SIDE = 4  # of the grid at which a generator starts and a discriminator ends, pixels
MAX_GRID_SIDE = 32


@dataclass(frozen=True)
class Spec:
    """Shape and number of classes of the data.

    resolution  : side of square images, pixels, or "WIDTHxHEIGHT" of others; 0 for arrays
    channels    : of the images; 0 for arrays
    classes     : number of classes; 0: unconditional
    array_shape : shape of a record, for arrays of numbers that are no images
    fields      : of records of several arrays, the shape of each by name
    main_field  : the name of the one that D judges, whose shape is `shape`; "" for other data
    sample_rate : of waves [C, T], Hz; 0 for other data, and for waves of which it is not known
    image_shape : (C, H, W) of the images that latents are decoded to; () for other data
    """

    resolution: Resolution
    channels: int
    classes: int = 0
    array_shape: tuple[int, ...] = ()
    fields: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]], hash=False)
    main_field: str = ""
    sample_rate: int = 0
    image_shape: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "resolution", parse_resolution(self.resolution))

    @property
    def size(self) -> ImageSize:
        """Width and height of the images, pixels; (0, 0) for arrays."""
        return ImageSize.of(self.resolution)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image, (C, H, W), or of one record of numbers."""
        return self.array_shape or (self.channels, self.size.height, self.size.width)

    @property
    def sample_spec(self) -> "Spec":
        """What samples look like: the decoded images, if the networks make latents; else the spec itself."""
        if not self.image_shape:
            return self
        channels, height, width = self.image_shape
        return replace(self, resolution=ImageSize(width, height).resolution, channels=channels, image_shape=())


def num_halvings(size: ImageSize) -> int:
    """Return how often both sides can be halved to whole numbers of at least MIN_GRID_SIDE: 4 for 64 x 64."""
    halvings = 0
    while not (size.width | size.height) & ((2 << halvings) - 1) and size.short_side >> halvings + 1 >= MIN_GRID_SIDE:
        halvings += 1
    return halvings


def start_grid(size: ImageSize) -> tuple[int, int]:
    """Return (height, width) after all halvings: (4, 4) for powers of two, (4, 8) for 256 wide, 128 high."""
    halvings = num_halvings(size)
    return size.height >> halvings, size.width >> halvings


def check_size(spec: Spec, min_halvings: int = 1, max_halvings: int | None = None) -> None:
    """Raise `UsageError` unless images can be halved so often, down to a grid of 4 to 32 pixels a side.

    Args:
        spec: the images.
        min_halvings: 1 is at least 8 x 8 pixels, 3 at least 32 x 32.
        max_halvings: 8 is at most 1024 x 1024 for powers of two; None: any number.
    """
    size = spec.size
    if _fits(size, min_halvings, max_halvings):
        return
    height, width = start_grid(size)
    halvings = num_halvings(size)
    times = {0: "not at all", 1: f"once, to {ImageSize(width, height)}"}.get(
        halvings, f"{halvings} times, to {ImageSize(width, height)}"
    )
    span = f"{min_halvings} or more" if max_halvings is None else f"{min_halvings} to {max_halvings}"
    options = [str(near.resolution) for near in _nearest_sizes(size, min_halvings, max_halvings)]
    raise UsageError(
        f"data.resolution={spec.resolution}: {size} can be halved {times}; these networks halve {span} times, to "
        f"sides of {MIN_GRID_SIDE} to {MAX_GRID_SIDE} pixels. Use {' or '.join(options)}"
    )


def _fits(size: ImageSize, min_halvings: int, max_halvings: int | None) -> bool:
    halvings = num_halvings(size)
    sides = start_grid(size)
    is_deep_enough = min_halvings <= halvings and (max_halvings is None or halvings <= max_halvings)
    return is_deep_enough and min(sides) >= MIN_GRID_SIDE and max(sides) <= MAX_GRID_SIDE


def _nearest_sizes(size: ImageSize, min_halvings: int, max_halvings: int | None) -> list[ImageSize]:
    """Return one or two sizes near `size` that fit, the nearest first."""
    halvings = max(min_halvings, (size.short_side // MIN_GRID_SIDE).bit_length() - 1)
    halvings = halvings if max_halvings is None else min(halvings, max_halvings)
    step = 1 << halvings
    candidates: list[ImageSize] = []
    for rounding in (step // 2, 0, step - 1):  # to the nearest multiple of `step`, the one below, the one above
        cells = [(side + rounding) // step for side in size]
        shortest = min(max(min(cells), MIN_GRID_SIDE), 2 * MIN_GRID_SIDE)
        cells = [min(max(count, shortest), MAX_GRID_SIDE) for count in cells]
        candidate = ImageSize(cells[0] * step, cells[1] * step)
        if not _fits(candidate, min_halvings, max_halvings):  # the deepest networks have grids below 8 only
            candidate = ImageSize(*(min(count, 2 * MIN_GRID_SIDE - 1) * step for count in cells))
        candidates.append(candidate)
    return list(dict.fromkeys(candidates))[:2]
