import pytest
import torch
from torch import nn
from torchmetrics.image.kid import KernelInceptionDistance

from paragan.eval import kid as kid_module
from paragan.eval.kid import kid as kid_of_shares
from paragan.eval.sharding import FeatureShard, block_shards


def two_sets(n=200, m=150, features=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=g) / features**0.5
    return torch.randn(n, features, generator=g) @ mix, torch.randn(m, features, generator=g) @ mix.T + 0.3


def kid(x, y, **options):
    return kid_of_shares(FeatureShard(x, len(x), 10), FeatureShard(y, len(y), 10), **options)


def brute_force_mmd(x, y):
    def kernel(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    x, y = x.tolist(), y.tolist()
    within = [sum(kernel(a, b) for i, a in enumerate(z) for b in z[:i]) * 2 / len(z) / (len(z) - 1) for z in (x, y)]
    return sum(within) - 2 * sum(kernel(a, b) for a in x for b in y) / len(x) / len(y)


def test_kid_is_the_unbiased_polynomial_mmd():
    x, y = two_sets(20, 20, 4)
    assert kid(x, y) == pytest.approx(brute_force_mmd(x.double(), y.double()), rel=1e-10)


def test_kid_depends_on_its_seed_only():
    x, y = two_sets()
    first = kid(x, y, subsets=3, subset_size=50, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert kid(x, y, subsets=3, subset_size=50, seed=1) == first != kid(x, y, subsets=3, subset_size=50, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*will save all extracted features")
def test_kid_is_torchmetrics_value():
    x, y = two_sets()
    metric = KernelInceptionDistance(nn.Identity(), 7, 50, sync_on_compute=False)
    metric.update(x.double(), real=True)
    metric.update(y.double(), real=False)
    torch.manual_seed(3)
    assert kid(x, y, subsets=7, subset_size=50, seed=3) == pytest.approx(metric.compute()[0].item(), rel=1e-11)


def test_kid_is_the_same_on_any_number_of_ranks_and_for_any_block(on_ranks, monkeypatch):
    monkeypatch.setattr(kid_module, "WINDOW_ROWS", 40)
    x, y = two_sets()
    options = {"subsets": 5, "subset_size": 60}
    single = kid(x, y, **options)

    def part(z, block, group):
        return FeatureShard(
            torch.cat([z[:0], *(z[r.start : r.stop] for r in block_shards(len(z), block, group.rank, group.size))]),
            len(z),
            block,
        )

    for size, block in ((2, 10), (3, 7), (4, 64)):
        result = on_ranks(
            size, lambda group, b=block: kid_of_shares(part(x, b, group), part(y, b, group), group=group, **options)
        )
        assert set(result) == {result[0]}
        assert result[0] == pytest.approx(single, rel=1e-10)
