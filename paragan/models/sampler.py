"""Images from a trained generator, or from one for every label."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.rng import CPU, LaneRng, philox_generator
from paragan.core.types import Batch
from paragan.data.dataset import Dataset
from paragan.data.loader.device_transfer import to_model_input
from paragan.game.game import ConditioningFn

MAX_CACHED_BYTES = 1 << 30  # of generators per label that are kept in memory
PREFETCH_BYTES = 1 << 28  # of images that are made ahead, label by label


@dataclass(frozen=True)
class LabelPrior:
    """How often each label occurs in the data; () in an unconditional game."""

    probabilities: tuple[float, ...]

    @staticmethod
    def from_labels(labels: np.ndarray | None, num_classes: int) -> LabelPrior:
        if labels is None or num_classes == 0:
            return LabelPrior(())
        return LabelPrior(tuple(float(n) / len(labels) for n in np.bincount(labels, minlength=num_classes)))

    def labels(self, seed: int, indices: Sequence[int]) -> np.ndarray | None:
        """[n] int64 labels of samples, each drawn with the chances of the data; None without labels."""
        if not self.probabilities:
            return None
        upto, last = np.cumsum(self.probabilities), len(self.probabilities) - 1
        chances = [philox_generator(seed, "sample label", position=i).random() for i in indices]
        return np.minimum(np.searchsorted(upto, chances, side="right"), last).astype(np.int64)


@dataclass(frozen=True)
class LatentSource:
    """What G makes its images from: normal numbers, by (seed, index) alone.

    The truncation trick of BigGAN (Brock et al. 2019): values over the threshold are drawn again; below 1
    the threshold is 2 psi standard deviations.
    """

    size: int

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        return torch.from_numpy(np.stack([sample_latent(seed, i, self.size, truncation) for i in indices]))


@dataclass(frozen=True)
class DataSource:
    """What G makes its images from where that is data: of sample i, what it is given of image i, counted around."""

    dataset: Dataset
    conditioning_input: ConditioningFn

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        return torch.cat([self._input_for(index, seed) for index in indices])

    def _input_for(self, index: int, seed: int) -> Tensor:
        """One by one, so that a draw of its own depends on (seed, index) alone."""
        row = self.rows([index])
        labels = None if self.dataset.labels is None else torch.from_numpy(self.dataset.labels[row])
        image = to_model_input(torch.from_numpy(self.dataset.images[row]), torch.contiguous_format)
        return self.conditioning_input(Batch(image, labels, LaneRng(seed, index, (0,), 1)))

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """[n] which images these samples are made of."""
        return np.asarray(indices, np.int64) % len(self.dataset.images)


@dataclass(frozen=True)
class Sampler:
    """Images from a generator: image i depends on (seed, i) alone, not on what is sampled with it.

    source : what it makes them from
    finish : what it makes -> what is kept
    """

    g: nn.Module
    source: LatentSource | DataSource
    prior: LabelPrior
    device: torch.device = CPU
    batch_size: int = 256
    to_output: Callable[[Tensor], Tensor] = field(default_factory=lambda: to_uint8)

    @property
    def latent_size(self) -> int:
        """The size of the latents; 0 where G is given data."""
        return self.source.size if isinstance(self.source, LatentSource) else 0

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """[n] int64 labels drawn from the prior; where G is given data, theirs."""
        if isinstance(self.source, DataSource) and self.prior.probabilities and self.source.dataset.labels is not None:
            return self.source.dataset.labels[self.source.rows(indices)]
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
        for start in range(0, len(indices), self.batch_size):
            part = indices[start : start + self.batch_size]
            z = self.source(part, seed, truncation).to(self.device)
            y = None
            if labels is not None:
                y = torch.from_numpy(np.asarray(labels[start : start + self.batch_size], np.int64)).to(self.device)
            made.append(self.to_output(self.g(z, y)).cpu())
        return torch.cat(made)


@dataclass
class PerLabelSampler:
    """Images from a generator for every label, loaded when it is first wanted; those wanted last stay in memory, up to
    `most_bytes`. Image i depends on (seed, i, its label) alone.

    load : label -> its sampler
    """

    load_sampler: Callable[[int], Sampler]
    prior: LabelPrior
    device: torch.device = CPU
    max_cached_bytes: int = MAX_CACHED_BYTES
    _cached_samplers: OrderedDict[int, Sampler] = field(default_factory=OrderedDict[int, Sampler])

    def to(self, device: torch.device) -> PerLabelSampler:
        """The same on another device."""
        return PerLabelSampler(
            lambda label: self.load_sampler(label).to(device), self.prior, device, self.max_cached_bytes
        )

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
            self.for_label(int(wanted[rows[0]])).images([indices[row] for row in rows], None, seed, truncation)
            for rows in groups
        ]
        images = torch.cat(made)
        return images[torch.from_numpy(np.argsort(order))]

    def for_label(self, label: int) -> Sampler:
        """The sampler of one label."""
        if label not in self._cached_samplers:
            self._cached_samplers[label] = self.load_sampler(label)
            while (
                len(self._cached_samplers) > 1
                and sum(module_bytes(one.g) for one in self._cached_samplers.values()) > self.max_cached_bytes
            ):
                self._cached_samplers.popitem(last=False)
        self._cached_samplers.move_to_end(label)
        return self._cached_samplers[label]


def module_bytes(net: nn.Module) -> int:
    """Bytes of its weights and buffers."""
    return sum(t.nbytes for t in (*net.parameters(), *net.buffers()))


def prefetch(
    sampler: Sampler | PerLabelSampler, blocks: Sequence[range], seed: int, truncation: float
) -> Callable[[range], Tensor]:
    """`blocks` in turn, each [n, C, H, W] uint8. Those of a model per label are made many at a time, so that a
    generator is loaded once for all of its images in a window, and not once for every block."""
    made: dict[int, Tensor] = {}

    def sample_rows(rows: Sequence[int]) -> Tensor:
        return sampler.images(rows, sampler.labels(rows, seed), seed, truncation)

    def sample_block(block: range) -> Tensor:
        if isinstance(sampler, Sampler):
            return sample_rows(block)
        if block.start not in made:
            first = sample_rows(block)
            number = max(1, PREFETCH_BYTES // max(first.nbytes, 1))
            at = blocks.index(block)
            window = list(blocks[at : at + number])
            several = sample_rows([i for one in window for i in one]).split([len(one) for one in window])
            made.clear()
            made.update(zip((one.start for one in window), several, strict=True))
        return made.pop(block.start)

    return sample_block


def sample_latent(seed: int, index: int, size: int, truncation: float = 1.0) -> np.ndarray:
    """[size] float32 normal; with truncation < 1 cut off at 2 * truncation standard deviations. Unusable below 0.05,
    where drawing again would hardly end."""
    if not 0.05 <= truncation <= 1:
        raise UsageError(f"truncation={truncation} must be between 0.05 and 1 (1: none)")
    rng = philox_generator(seed, "sample latent", position=index)
    z = rng.standard_normal(size, dtype=np.float32)
    if truncation < 1:
        while (beyond := np.abs(z) > 2 * truncation).any():
            z[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    return z


def to_float32(output: Tensor) -> Tensor:
    """As they are, float32."""
    return output.float()


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] float -> [0, 255] uint8, the inverse of what the lanes feed."""
    return images.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
