"""Vector quantization with a codebook that follows the data: nearest code, moving averages, restart of unused codes.

van den Oord et al., "Neural Discrete Representation Learning", 2017, appendix A.1; residual stages as in Zeghidour et
al., "SoundStream", 2021. A training forward only adds to `counts` and `sums`, which are sums over rows;
`apply_synchronised`, once a step, moves the codebook. So it does not matter how the rows of a step are divided among
passes and ranks, if the sums of all are added before.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAPLACE = 1e-5  # pseudo-counts of a code, in rows
SPLIT = 1 / 1024  # by which the two halves of a code differ from it, relative
LEAST_USE = 0.03  # of the mean use, of a code in use
MAX_SCORES_ON_CPU = 1 << 20  # numbers of one block of row-code products: they stay in the cache
MAX_SCORES = 1 << 26


class QuantizerOutput(NamedTuple):
    """Output of a quantizer.

    quantized  : [N, D, ...] the values of the codes; their gradient is passed on to the input (straight-through)
    codes      : int64 [N, ...], with several stages [N, stages, ...]
    commitment : scalar, mean over all elements of (z - quantized)^2, with a gradient for z only
    """

    quantized: Tensor
    codes: Tensor
    commitment: Tensor


def straight_through(values: Tensor, z: Tensor) -> Tensor:
    """Return exactly `values`, with the gradient passed on to z (Bengio et al. 2013, arXiv:1308.3432)."""
    return values.detach() + (z - z.detach())


def to_rows(z: Tensor) -> Tensor:
    """Return [N, D, ...] as rows [M, D]."""
    return z.movedim(1, -1).flatten(0, -2)


class VectorQuantizer(nn.Module):
    """z [N, D, ...] -> `QuantizerOutput`: the nearest of `codes` vectors for every position.

    Computes in the dtype of the codebook, whatever autocast says. Buffers: `codebook` [K, D]; `cluster_size` [K] and
    `embed_sum` [K, D], the moving averages of the rows that a code is the nearest of, and of their sum; `counts` [K]
    and `sums` [K, D] of the current step, to which a forward in training mode adds.

    Departures from the paper: averages begin at one row per code, so that codes stay where they are until they are
    used; codes that are not used are restarted.

    Args:
        codes: K, the size of the codebook.
        dim: D, the length of a code.
        decay: of the moving averages, per step.
        normalize: whether rows and codes are scaled to length 1: nearest by cosine (Yu et al. 2022, arXiv:2110.04627).
        restart_below: a code is restarted where its `cluster_size` is below this multiple of the mean; 0: never.
    """

    synchronised: ClassVar[tuple[str, ...]] = ("counts", "sums")

    codebook: Tensor
    cluster_size: Tensor
    embed_sum: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, codes: int, dim: int, decay: float = 0.99, normalize: bool = False, restart_below: float = 0.03):
        super().__init__()
        self.decay = decay
        self.normalize = normalize
        self.restart_below = restart_below
        codebook = torch.empty(codes, dim).uniform_(-1 / codes, 1 / codes)
        codebook = F.normalize(codebook) if normalize else codebook
        self.register_buffer("codebook", codebook)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_sum", codebook.clone())
        self.register_buffer("counts", torch.zeros(codes))
        self.register_buffer("sums", torch.zeros(codes, dim))

    def forward(self, z: Tensor) -> QuantizerOutput:
        with torch.autocast(z.device.type, enabled=False):
            z = z.to(self.codebook.dtype)
            z = F.normalize(z, dim=1) if self.normalize else z
            rows = to_rows(z.detach())
            indices = nearest_codes(rows, self.codebook)
            if self.training:
                self._accumulate(rows, indices)
            codes = indices.view(len(z), *z.shape[2:])
            values = self.codes_to_values(codes)
            return QuantizerOutput(straight_through(values, z), codes, (z - values).square().mean())

    def codes_to_values(self, codes: Tensor) -> Tensor:
        """Return the values [N, D, ...] of codes int64 [N, ...]."""
        return F.embedding(codes, self.codebook).movedim(-1, 1)

    @torch.no_grad()
    def _accumulate(self, rows: Tensor, indices: Tensor) -> None:
        if rows.device.type == "cpu":
            self.counts.index_add_(0, indices, rows.new_ones(len(rows)))
            self.sums.index_add_(0, indices, rows)
            return
        size = block_rows(rows, self.codebook)
        for block, index in zip(rows.split(size), indices.split(size)):  # index_add_ adds in any order on a GPU
            one_hot = block.new_zeros(len(block), len(self.codebook)).scatter_(1, index[:, None], 1)
            self.counts.add_(one_hot.sum(0))
            self.sums.addmm_(one_hot.T, block)

    @torch.no_grad()
    def apply_synchronised(self) -> None:
        """Move averages and codebook by `counts` and `sums`, and set these to 0. Without rows, nothing changes."""
        has_rows = self.counts.sum() > 0
        cluster_size = torch.lerp(self.counts, self.cluster_size, self.decay)
        embed_sum = torch.lerp(self.sums, self.embed_sum, self.decay)
        total = cluster_size.sum()
        smoothed = (cluster_size + LAPLACE) / (total + len(cluster_size) * LAPLACE) * total
        codebook = embed_sum / smoothed[:, None]
        if self.restart_below:
            codebook, cluster_size, embed_sum = split_codes(codebook, cluster_size, embed_sum, self.restart_below)
        codebook = F.normalize(codebook) if self.normalize else codebook
        self.codebook.copy_(torch.where(has_rows, codebook, self.codebook))
        self.cluster_size.copy_(torch.where(has_rows, cluster_size, self.cluster_size))
        self.embed_sum.copy_(torch.where(has_rows, embed_sum, self.embed_sum))
        self.counts.zero_()
        self.sums.zero_()


class ResidualVectorQuantizer(nn.Module):
    """z [N, D, ...] -> `QuantizerOutput`: every stage quantizes what the stages before it have left.

    Zeghidour et al., "SoundStream", 2021 (arXiv:2107.03312). `codes` is int64 [N, stages, ...], `commitment` the mean
    over stages. Every stage is a `VectorQuantizer`.

    Args:
        stages: number of codebooks.
        codes, dim, decay, restart_below: of each, as of `VectorQuantizer`.
    """

    def __init__(self, stages: int, codes: int, dim: int, decay: float = 0.99, restart_below: float = 0.03):
        super().__init__()
        self.stages = nn.ModuleList(
            VectorQuantizer(codes, dim, decay, restart_below=restart_below) for _ in range(stages)
        )

    def forward(self, z: Tensor) -> QuantizerOutput:
        residual = z
        codes: list[Tensor] = []
        commitments: list[Tensor] = []
        for stage in self.stages:
            output: QuantizerOutput = stage(residual)
            residual = residual - output.quantized.detach()
            codes.append(output.codes)
            commitments.append(output.commitment)
        stacked = torch.stack(codes, 1)
        return QuantizerOutput(
            straight_through(self.codes_to_values(stacked), z), stacked, torch.stack(commitments).mean()
        )

    def codes_to_values(self, codes: Tensor) -> Tensor:
        """Return the values [N, D, ...] of codes int64 [N, stages, ...]; of fewer stages coarser ones."""
        parts = [stage.codes_to_values(part) for stage, part in zip(self.stages, codes.unbind(1))]  # pyright: ignore
        return torch.stack(parts).sum(0)


@torch.no_grad()
def codebook_usage(net: nn.Module) -> dict[str, Tensor]:
    """Return scalars `Codebook/use` and `Codebook/perplexity` of a network, means over its codebooks; {} without any.

    Use is the share of codes whose `cluster_size` is at least LEAST_USE of the mean, perplexity the exponential of the
    entropy of `cluster_size` (the number of codes if all are used equally).
    """
    sizes = [module.cluster_size for module in net.modules() if isinstance(module, VectorQuantizer)]
    if not sizes:
        return {}
    use = [(size >= LEAST_USE * size.mean()).float().mean() for size in sizes]
    perplexity = [torch.special.entr(size / size.sum()).sum().exp() for size in sizes]
    return {"Codebook/use": torch.stack(use).mean(), "Codebook/perplexity": torch.stack(perplexity).mean()}


@torch.no_grad()
def nearest_codes(rows: Tensor, codebook: Tensor) -> Tensor:
    """Return the index [M] of the code nearest to each of rows [M, D]; of equally near ones, any.

    |r - c|^2 = |r|^2 - 2 (r . c - |c|^2 / 2), so the nearest has the largest product less half its squared length.
    """
    offset = codebook.square().sum(1) / -2
    blocks = rows.split(block_rows(rows, codebook))
    return torch.cat([torch.addmm(offset, block, codebook.T).max(1).indices for block in blocks])


def block_rows(rows: Tensor, codebook: Tensor) -> int:
    """Return how many rows to multiply with the codebook at once."""
    max_scores = MAX_SCORES_ON_CPU if rows.device.type == "cpu" else MAX_SCORES
    return max(1, max_scores // len(codebook))


def split_codes(
    codebook: Tensor, cluster_size: Tensor, embed_sum: Tensor, restart_below: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace unused codes by halves of the most used ones, as faiss does for k-means (`split_clusters`).

    The k-th unused code and the k-th most used one become two codes that differ by 1/1024 to either side of the latter
    in every coordinate, with half of its rows each (Johnson et al., "Billion-scale similarity search with GPUs", 2019;
    faiss draws the code to be split, here no random number is drawn). A code whose half would count as unused is left.

    Args:
        codebook: [K, D].
        cluster_size: [K].
        embed_sum: [K, D].
        restart_below: least `cluster_size` of a code in use, as a multiple of the mean.

    Returns:
        The three after the change.
    """
    least = restart_below * cluster_size.mean()
    order = cluster_size.argsort(descending=True, stable=True)
    is_unused = cluster_size < least
    donors = order[is_unused.cumsum(0).sub(1).clamp(min=0)]
    is_copy = is_unused & (cluster_size[donors] >= 2 * least)
    rank = order.argsort()
    is_donor = rank < is_copy.sum()  # the most used codes, as many as are copied
    step = torch.full_like(codebook[0], SPLIT)
    step[1::2] *= -1
    sizes = torch.where(is_copy, cluster_size[donors], cluster_size)
    sizes = torch.where(is_copy | is_donor, sizes / 2, sizes)
    values = torch.where(is_copy[:, None], codebook[donors] * (1 + step), codebook)
    values = torch.where(is_donor[:, None], codebook * (1 - step), values)
    sums = torch.where((is_copy | is_donor)[:, None], values * sizes[:, None], embed_sum)
    return values, sizes, sums
