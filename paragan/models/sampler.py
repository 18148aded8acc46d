"""Images from a trained generator, or from one for every label."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from paragan.core.errors import Unusable
from paragan.core.rng import CPU, Draw, generator
from paragan.core.types import Batch
from paragan.data.dataset import Images
from paragan.data.loader.device_transfer import floats
from paragan.game.game import Given

MOST_BYTES = 1 << 30  # of generators per label that are kept in memory
WINDOW_BYTES = 1 << 28  # of images that are made ahead, label by label


@dataclass(frozen=True)
class Prior:
    """How often each label occurs in the data; () in an unconditional game."""

    shares: tuple[float, ...]

    @staticmethod
    def of(labels: np.ndarray | None, classes: int) -> Prior:
        if labels is None or classes == 0:
            return Prior(())
        return Prior(tuple(float(n) / len(labels) for n in np.bincount(labels, minlength=classes)))

    def labels(self, seed: int, indices: Sequence[int]) -> np.ndarray | None:
        """[n] int64 labels of samples, each drawn with the chances of the data; None without labels."""
        if not self.shares:
            return None
        upto, last = np.cumsum(self.shares), len(self.shares) - 1
        chances = [generator(seed, "sample label", position=i).random() for i in indices]
        return np.minimum(np.searchsorted(upto, chances, side="right"), last).astype(np.int64)


@dataclass(frozen=True)
class Latents:
    """What G makes its images from: normal numbers, by (seed, index) alone.

    The truncation trick of BigGAN (Brock et al. 2019): values over the threshold are drawn again; below 1
    the threshold is 2 psi standard deviations.
    """

    size: int

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        return torch.from_numpy(np.stack([latent(seed, i, self.size, truncation) for i in indices]))


@dataclass(frozen=True)
class Inputs:
    """What G makes its images from where that is data: of sample i, what it is given of image i, counted around."""

    images: Images
    given: Given

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        return torch.cat([self._of(index, seed) for index in indices])

    def _of(self, index: int, seed: int) -> Tensor:
        """One by one, so that a draw of its own depends on (seed, index) alone."""
        row = self.rows([index])
        labels = None if self.images.labels is None else torch.from_numpy(self.images.labels[row])
        image = floats(torch.from_numpy(self.images.images[row]), torch.contiguous_format)
        return self.given(Batch(image, labels, Draw(seed, index, (0,), 1)))

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """[n] which images these samples are made of."""
        return np.asarray(indices, np.int64) % len(self.images.images)


@dataclass(frozen=True)
class Sampler:
    """Images from a generator: image i depends on (seed, i) alone, not on what is sampled with it.

    source : what it makes them from
    finish : what it makes -> what is kept
    """

    g: nn.Module
    source: Latents | Inputs
    prior: Prior
    device: torch.device = CPU
    batch: int = 256
    finish: Callable[[Tensor], Tensor] = field(default_factory=lambda: to_uint8)

    @property
    def latent(self) -> int:
        """The size of the latents; 0 where G is given data."""
        return self.source.size if isinstance(self.source, Latents) else 0

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """[n] int64 labels drawn from the prior; where G is given data, theirs."""
        if isinstance(self.source, Inputs) and self.prior.shares and self.source.images.labels is not None:
            return self.source.images.labels[self.source.rows(indices)]
        return self.prior.labels(seed, indices)

    def to(self, device: torch.device) -> Sampler:
        """The same on another device; the network itself moves."""
        return replace(self, g=self.g.to(device), device=device)

    @torch.no_grad()
    def images(
        self, indices: Sequence[int], labels: np.ndarray | None, seed: int = 0, truncation: float = 1.0
    ) -> Tensor:
        """[n, C, H, W] uint8 (of numbers: float32 [n, ...]) on the CPU. truncation: latents beyond this size are drawn
        again (1: all kept)."""
        made = []
        for start in range(0, len(indices), self.batch):
            part = indices[start : start + self.batch]
            z = self.source(part, seed, truncation).to(self.device)
            y = None
            if labels is not None:
                y = torch.from_numpy(np.asarray(labels[start : start + self.batch], np.int64)).to(self.device)
            made.append(self.finish(self.g(z, y)).cpu())
        return torch.cat(made)


@dataclass
class Merged:
    """Images from a generator for every label, loaded when it is first wanted; those wanted last stay in memory, up to
    `most_bytes`. Image i depends on (seed, i, its label) alone.

    load : label -> its sampler
    """

    load: Callable[[int], Sampler]
    prior: Prior
    device: torch.device = CPU
    most_bytes: int = MOST_BYTES
    _kept: OrderedDict[int, Sampler] = field(default_factory=OrderedDict[int, Sampler])

    def to(self, device: torch.device) -> Merged:
        """The same on another device."""
        return Merged(lambda label: self.load(label).to(device), self.prior, device, self.most_bytes)

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """[n] int64 labels drawn from the prior."""
        return self.prior.labels(seed, indices)

    def images(
        self, indices: Sequence[int], labels: np.ndarray | None, seed: int = 0, truncation: float = 1.0
    ) -> Tensor:
        """[n, C, H, W] uint8 on the CPU, made label by label."""
        wanted = self.labels(indices, seed) if labels is None else np.asarray(labels)
        assert wanted is not None
        order = np.argsort(wanted, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(wanted[order])) + 1)
        made = [
            self.of(int(wanted[rows[0]])).images([indices[row] for row in rows], None, seed, truncation)
            for rows in groups
        ]
        images = torch.cat(made)
        return images[torch.from_numpy(np.argsort(order))]

    def of(self, label: int) -> Sampler:
        """The sampler of one label."""
        if label not in self._kept:
            self._kept[label] = self.load(label)
            while len(self._kept) > 1 and sum(size_of(one.g) for one in self._kept.values()) > self.most_bytes:
                self._kept.popitem(last=False)
        self._kept.move_to_end(label)
        return self._kept[label]


def size_of(net: nn.Module) -> int:
    """Bytes of its weights and buffers."""
    return sum(t.nbytes for t in (*net.parameters(), *net.buffers()))


def ahead(
    sampler: Sampler | Merged, blocks: Sequence[range], seed: int, truncation: float
) -> Callable[[range], Tensor]:
    """`blocks` in turn, each [n, C, H, W] uint8. Those of a model per label are made many at a time, so that a
    generator is loaded once for all of its images in a window, and not once for every block."""
    made: dict[int, Tensor] = {}

    def images(rows: Sequence[int]) -> Tensor:
        return sampler.images(rows, sampler.labels(rows, seed), seed, truncation)

    def sample(block: range) -> Tensor:
        if isinstance(sampler, Sampler):
            return images(block)
        if block.start not in made:
            first = images(block)
            number = max(1, WINDOW_BYTES // max(first.nbytes, 1))
            at = blocks.index(block)
            window = list(blocks[at : at + number])
            several = images([i for one in window for i in one]).split([len(one) for one in window])
            made.clear()
            made.update(zip((one.start for one in window), several, strict=True))
        return made.pop(block.start)

    return sample


def latent(seed: int, index: int, size: int, truncation: float = 1.0) -> np.ndarray:
    """[size] float32 normal; with truncation < 1 cut off at 2 * truncation standard deviations. Unusable below 0.05,
    where drawing again would hardly end."""
    if not 0.05 <= truncation <= 1:
        raise Unusable(f"truncation={truncation} must be between 0.05 and 1 (1: none)")
    rng = generator(seed, "sample latent", position=index)
    z = rng.standard_normal(size, dtype=np.float32)
    if truncation < 1:
        while (beyond := np.abs(z) > 2 * truncation).any():
            z[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    return z


def to_numbers(made: Tensor) -> Tensor:
    """As they are, float32."""
    return made.float()


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] float -> [0, 255] uint8, the inverse of what the lanes feed."""
    return images.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
