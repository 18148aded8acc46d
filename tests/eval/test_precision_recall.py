import numpy as np
import pytest
import torch

from advice import advises
from paragan.eval import precision_recall
from paragan.eval.precision_recall import prdc as prdc_of_shares
from paragan.eval.sharding import FeatureShard, block_shards


def two_sets(n=200, m=150, features=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=g) / features**0.5
    return torch.randn(n, features, generator=g) @ mix, torch.randn(m, features, generator=g) @ mix.T + 0.3


def prdc(x, y, k, **options):
    return prdc_of_shares(FeatureShard(x, len(x), 8), FeatureShard(y, len(y), 8), k, **options)


def brute_force_prdc(x, y, k):
    def reach(z):
        return [sorted(np.linalg.norm(a - b) for j, b in enumerate(z) if j != i)[k - 1] for i, a in enumerate(z)]

    separate = np.linalg.norm(x[:, None] - y[None], axis=2)
    in_real, in_fake = separate <= np.array(reach(x))[:, None], separate <= np.array(reach(y))[None]
    return in_real.any(0).mean(), in_fake.any(1).mean(), in_real.sum() / k / len(y), in_real.any(1).mean()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_prdc_equals_the_definition(k):
    x, y = two_sets(60, 45, 4)
    expected = brute_force_prdc(x.double().numpy(), y.double().numpy(), k)
    assert 0 < expected[1] < 1
    for chunk in (7, 1024):
        assert prdc(x, y, k, chunk=chunk) == pytest.approx(expected, abs=1e-12)


def test_prdc_of_equal_and_of_distant_sets():
    x, _ = two_sets(50)
    assert prdc(x, x, 5) == pytest.approx((1, 1, 6 / 5, 1))  # each lies in its own ball and in 5 more on average
    assert prdc(x, x + 100, 5) == (0, 0, 0, 0)


def test_prdc_of_a_collapsed_generator():
    x, _ = two_sets(50)
    result = prdc(x, x[:1].repeat(50, 1), 5)
    assert result.precision == 1
    assert result.recall == 1 / 50  # the one image that it copies


def test_prdc_is_the_same_on_any_number_of_ranks_and_for_any_block(on_ranks, monkeypatch):
    monkeypatch.setattr(precision_recall, "WINDOW_ROWS", 24)
    x, y = two_sets(60, 45, 4)
    single = prdc(x, y, 3, chunk=16)

    def part(z, block, group):
        return FeatureShard(
            torch.cat([z[:0], *(z[r.start : r.stop] for r in block_shards(len(z), block, group.rank, group.size))]),
            len(z),
            block,
        )

    for size, block in ((2, 16), (4, 7), (5, 20)):  # of the last, ranks 3 and 4 have none
        result = on_ranks(
            size, lambda group, b=block: prdc_of_shares(part(x, b, group), part(y, b, group), 3, chunk=16, group=group)
        )
        assert set(result) == {single}


def test_prdc_needs_more_images_than_neighbors():
    x, y = two_sets(20, 5)
    with advises("count=5: 5 nearest neighbors need at least 6 images. Use more images"):
        prdc(x, y, 5)
    assert prdc(*two_sets(20, 6), 5)
