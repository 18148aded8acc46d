"""The Inception score (Salimans et al. 2016, arXiv 1606.03498), computed from sums over a stream of logits."""

import torch
from torch import Tensor

from paragan.core.host_copies import copy_to_device
from paragan.eval.sharding import SINGLE, ReduceGroup


class InceptionScoreSums:
    """Sums over the images of each of several random splits, from which the score is computed.

    Splits depend on `seed` only, and are those of torchmetrics.
    """

    def __init__(self, count: int, num_logits: int, splits: int, seed: int, device: torch.device | str = "cpu"):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        split = torch.empty_like(order)
        split[order] = torch.arange(count) // -(-count // splits)
        self.split = copy_to_device(split, torch.device(device))  # [count], the split of each image
        self.sums = torch.zeros(splits, num_logits + 2, dtype=torch.float64, device=device)  # p(y|x), entropies, images

    def update(self, rows: range, logits: Tensor) -> None:
        """Add logits [len(rows), K] of the images `rows`."""
        p = logits.double().softmax(1)
        entropies = torch.special.entr(p).sum(1, keepdim=True)
        self.sums.index_add_(0, self.split[rows.start : rows.stop], torch.cat([p, entropies, p.new_ones(len(p), 1)], 1))

    def compute(self, group: ReduceGroup = SINGLE) -> float:
        """Return exp of the mean KL(p(y|x) | p(y)), averaged over splits; between 1 and K. Every rank calls it."""
        group.all_reduce_sum(self.sums).wait()
        sums = self.sums.cpu()
        sums = sums[sums[:, -1] > 0]
        means = sums[:, :-1] / sums[:, -1:]
        kl = torch.special.entr(means[:, :-1]).sum(1) - means[:, -1]
        return kl.exp().mean().item()
