import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from paragan.errors import Unusable
from paragan.eval.scores import Moments, frechet, inception_score, kid, prdc
from paragan.eval.shares import dealt, whole


def gaussian(*batches, num_features=None):
    moments = Moments(num_features or batches[0].shape[1])
    for batch in batches:
        moments.add(batch)
    return moments.gaussian()


def two_sets(n=200, m=150, features=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=g) / features**0.5
    return torch.randn(n, features, generator=g) @ mix, torch.randn(m, features, generator=g) @ mix.T + 0.3


def from_features(x, y):
    """The Fréchet distance without a covariance: the root's trace is the nuclear norm of X Y'."""
    x, y = x.double(), y.double()
    a, b = ((z - z.mean(0)) / (len(z) - 1) ** 0.5 for z in (x, y))
    root = torch.linalg.svdvals(a @ b.T).sum()
    return ((x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * root).item()


# Fréchet distance


def test_moments_are_those_of_all_batches():
    x, _ = two_sets()
    fitted = gaussian(x[:7], x[7:100], x[100:])
    assert fitted.count == 200
    torch.testing.assert_close(fitted.mean, x.double().mean(0), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(fitted.covariance, torch.cov(x.double().T), rtol=1e-12, atol=1e-14)


def test_moments_do_not_cancel():
    x = 1e6 + 1e-3 * torch.randn(100, 3, dtype=torch.float64)
    torch.testing.assert_close(gaussian(x[:50], x[50:]).covariance, torch.cov(x.T), rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3])
def test_moments_join_over_ranks_even_where_one_has_none(on_ranks, size):
    x, _ = two_sets()

    def share(group):
        moments = Moments(16)
        for rows in dealt(200, 100, group.rank, group.size):
            moments.add(x[rows.start : rows.stop])
        return moments.gaussian(group)

    for fitted in on_ranks(size, share):
        assert fitted.count == 200
        torch.testing.assert_close(fitted.covariance, gaussian(x).covariance, rtol=1e-12, atol=1e-14)


def test_one_image_has_no_covariance():
    with pytest.raises(Unusable, match="at least 2 images, not 1"):
        gaussian(torch.zeros(1, 3))


def test_frechet_is_the_formula():
    x, y = two_sets()
    a, b = gaussian(x), gaussian(y)
    root = scipy.linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    shift = (a.mean - b.mean).square().sum().item()
    expected = shift + np.trace((a.covariance + b.covariance).numpy() - 2 * root)
    assert frechet(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet(b, a) == pytest.approx(expected, rel=1e-9)


def test_frechet_is_torchmetrics_of_the_features_themselves():
    x, y = two_sets()
    pixel = nn.Identity()
    pixel.num_features = 16
    metric = FrechetInceptionDistance(pixel, sync_on_compute=False).set_dtype(torch.float64)
    metric.update(x.double(), real=True)
    metric.update(y.double(), real=False)
    assert frechet(gaussian(x), gaussian(y)) == pytest.approx(metric.compute().item(), rel=1e-9)


def test_frechet_is_close_where_covariances_lack_rank(digits):
    x = torch.from_numpy(digits.reshape(-1, 64) / 255)
    for a, b in [(x[:900], x[900:]), (x[:30], x[900:940]), (x[:1].repeat(50, 1) + 1e-3 * x[:50], x[900:])]:
        assert frechet(gaussian(a), gaussian(b)) == pytest.approx(from_features(a, b), rel=1e-6)
    assert 0 <= frechet(gaussian(x[:30]), gaussian(x[:30])) < 1e-6


def test_frechet_does_not_cancel_far_from_the_origin():
    x, y = two_sets()
    near, far = (frechet(gaussian(x + s), gaussian(y + s)) for s in (0, 1e6 * torch.ones(16, dtype=torch.float64)))
    assert far == pytest.approx(near, rel=1e-6)


def test_frechet_of_a_constant_is_distance_and_variance():
    x, _ = two_sets()
    fitted, constant = gaussian(x), gaussian(torch.ones(5, 16))
    expected = (fitted.mean - 1).square().sum() + fitted.covariance.trace()
    assert frechet(fitted, constant) == pytest.approx(expected.item(), rel=1e-12)


# kernel distance, Inception score


def brute_force_mmd(x, y):
    def kernel(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    x, y = x.tolist(), y.tolist()
    within = [sum(kernel(a, b) for i, a in enumerate(z) for b in z[:i]) * 2 / len(z) / (len(z) - 1) for z in (x, y)]
    return sum(within) - 2 * sum(kernel(a, b) for a in x for b in y) / len(x) / len(y)


def test_kid_is_the_unbiased_polynomial_mmd():
    x, y = two_sets(20, 20, 4)
    assert kid(x, y) == pytest.approx(brute_force_mmd(x.double(), y.double()), rel=1e-10)


def test_kid_follows_from_its_seed_alone():
    x, y = two_sets()
    first = kid(x, y, subsets=3, subset_size=50, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert kid(x, y, subsets=3, subset_size=50, seed=1) == first != kid(x, y, subsets=3, subset_size=50, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_inception_score_counts_the_classes_it_is_sure_of():
    sure = 1000.0 * torch.eye(10).repeat(200, 1)  # 200 of each class
    assert inception_score(sure, splits=2) == pytest.approx(10, rel=1e-2)
    assert inception_score(torch.zeros(100, 10)) == pytest.approx(1)
    assert inception_score(1000.0 * torch.eye(10)[:1].repeat(100, 1)) == pytest.approx(1)


def test_inception_score_is_the_formula():
    logits, _ = two_sets(40, 2, 5)
    halves = logits[torch.randperm(40, generator=torch.Generator().manual_seed(3))].double().chunk(2)
    expected = 0
    for p in (half.softmax(1) for half in halves):
        expected += (p * (p / p.mean(0)).log()).sum(1).mean().exp().item() / 2
    assert inception_score(logits, splits=2, seed=3) == pytest.approx(expected, rel=1e-12)


# manifolds


def brute_force_prdc(x, y, k):
    def reach(z):
        return [sorted(np.linalg.norm(a - b) for j, b in enumerate(z) if j != i)[k - 1] for i, a in enumerate(z)]

    apart = np.linalg.norm(x[:, None] - y[None], axis=2)
    in_real, in_fake = apart <= np.array(reach(x))[:, None], apart <= np.array(reach(y))[None]
    return in_real.any(0).mean(), in_fake.any(1).mean(), in_real.sum() / k / len(y), in_real.any(1).mean()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_prdc_is_the_definition(k):
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
    found = prdc(x, x[:1].repeat(50, 1), 5)
    assert found.precision == 1
    assert found.recall == 1 / 50  # the one image that it copies


def test_prdc_is_the_same_on_any_number_of_ranks(on_ranks):
    x, y = two_sets(60, 45, 4)
    alone = prdc(x, y, 3, chunk=16)
    for size in (2, 3, 5):
        assert set(on_ranks(size, lambda group: prdc(x, y, 3, chunk=16, group=group))) == {alone}


def test_prdc_refuses_fewer_images_than_neighbours():
    x, y = two_sets(20, 5)
    with pytest.raises(Unusable, match="at least 6 images, not 5"):
        prdc(x, y, 5)


# shares


@pytest.mark.parametrize(("count", "block", "size"), [(10, 3, 2), (9, 3, 3), (2, 5, 3), (7, 1, 4)])
def test_rows_are_dealt_once_and_come_back_in_order(on_ranks, count, block, size):
    shares = [i for rank in range(size) for rows in dealt(count, block, rank, size) for i in rows]
    assert sorted(shares) == list(range(count))
    x = torch.arange(2.0 * count).view(count, 2)

    def gathered(group):
        mine = [i for rows in dealt(count, block, group.rank, group.size) for i in rows]
        return whole(x[mine], count, block, group)

    assert all(torch.equal(found, x) for found in on_ranks(size, gathered))
