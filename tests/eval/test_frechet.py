import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from advice import advises
from paragan.eval.frechet import Gaussian, RunningMoments, frechet_distance, pivoted_cholesky
from paragan.eval.sharding import block_shards


def gaussian(*batches, num_features=None):
    moments = RunningMoments(num_features or batches[0].shape[1])
    for batch in batches:
        moments.update(batch)
    return moments.compute()


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


def test_moments_of_batches_equal_those_of_all():
    x, _ = two_sets()
    fitted = gaussian(x[:7], x[7:100], x[100:])
    assert fitted.count == 200
    torch.testing.assert_close(fitted.mean, x.double().mean(0), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(fitted.covariance, torch.cov(x.double().T), rtol=1e-12, atol=1e-14)


def test_moments_do_not_cancel():
    x = 1e6 + 1e-3 * torch.randn(100, 3, dtype=torch.float64)
    torch.testing.assert_close(gaussian(x[:50], x[50:]).covariance, torch.cov(x.T), rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3])
def test_moments_combine_over_ranks_even_if_one_has_none(on_ranks, size):
    x, _ = two_sets()

    def share(group):
        moments = RunningMoments(16)
        for rows in block_shards(200, 100, group.rank, group.size):
            moments.update(x[rows.start : rows.stop])
        return moments.compute(group)

    for fitted in on_ranks(size, share):
        assert fitted.count == 200
        torch.testing.assert_close(fitted.covariance, gaussian(x).covariance, rtol=1e-12, atol=1e-14)


def test_one_image_has_no_covariance():
    with advises("count: a covariance needs at least 2 images. Use a larger count"):
        gaussian(torch.zeros(1, 3))
    assert gaussian(torch.zeros(2, 3)).count == 2


def test_frechet_is_the_formula():
    x, y = two_sets()
    a, b = gaussian(x), gaussian(y)
    root = scipy.linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    shift = (a.mean - b.mean).square().sum().item()
    expected = shift + np.trace((a.covariance + b.covariance).numpy() - 2 * root)
    assert frechet_distance(a, b).value == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a).value == pytest.approx(expected, rel=1e-9)


def test_frechet_is_torchmetrics_of_the_features_themselves():
    x, y = two_sets()
    pixel = nn.Identity()
    pixel.num_features = 16
    metric = FrechetInceptionDistance(pixel, sync_on_compute=False).set_dtype(torch.float64)
    metric.update(x.double(), real=True)
    metric.update(y.double(), real=False)
    assert frechet_distance(gaussian(x), gaussian(y)).value == pytest.approx(metric.compute().item(), rel=1e-9)


def test_frechet_of_singular_covariances(digits):
    x = torch.from_numpy(digits.reshape(-1, 64) / 255)
    for a, b in [(x[:900], x[900:]), (x[:30], x[900:940]), (x[:1].repeat(50, 1) + 1e-3 * x[:50], x[900:])]:
        assert frechet_distance(gaussian(a), gaussian(b)).value == pytest.approx(from_features(a, b), rel=1e-6)
    assert 0 <= frechet_distance(gaussian(x[:30]), gaussian(x[:30])).value < 1e-6


def test_frechet_does_not_cancel_far_from_the_origin():
    x, y = two_sets()
    near, remote = (
        frechet_distance(gaussian(x + s), gaussian(y + s)).value for s in (0, 1e6 * torch.ones(16, dtype=torch.float64))
    )
    assert remote == pytest.approx(near, rel=1e-6)


def test_frechet_of_a_constant_is_distance_and_variance():
    x, _ = two_sets()
    fitted, constant = gaussian(x), gaussian(torch.ones(5, 16))
    expected = (fitted.mean - 1).square().sum() + fitted.covariance.trace()
    assert frechet_distance(fitted, constant).value == pytest.approx(expected.item(), rel=1e-12)


# closed forms


def turned(values, seed, count=10_000):
    """A Gaussian whose covariance has these eigenvalues; of one seed they commute."""
    size = len(values)
    turn, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).double())
    return Gaussian(count, torch.zeros(size).double(), (turn * values) @ turn.T)


SPECTRA = {
    "alike": (torch.linspace(1, 2, 64), torch.linspace(3, 1, 64)),
    "over ten magnitudes": (torch.logspace(0, -10, 64), torch.logspace(-10, 1, 64)),
    "without rank": (torch.cat([torch.ones(20), torch.zeros(44)]), torch.cat([torch.zeros(10), torch.ones(54)])),
    "nothing": (torch.zeros(64), torch.ones(64)),
}


@pytest.mark.parametrize("spectra", SPECTRA.values(), ids=SPECTRA.keys())
def test_error_bound_holds_for_commuting_covariances(spectra):
    s, t = (values.double() for values in spectra)
    exact = (s.sqrt() - t.sqrt()).square().sum().item()
    result = frechet_distance(turned(s, 0), turned(t, 0))
    assert abs(result.value - exact) <= result.error
    assert result.value == pytest.approx(exact, rel=1e-5)


def test_error_bound_is_small_only_for_exact_cases():
    well, ill = (turned(values.double(), 0) for values in (SPECTRA["alike"][0], SPECTRA["over ten magnitudes"][0]))
    good, bad = (
        frechet_distance(well, turned(SPECTRA["alike"][1].double(), 1)),
        frechet_distance(ill, turned(ill.covariance.diag(), 0)),
    )
    assert good.error < 1e-9 * good.value
    assert 1e-9 < bad.error < 1e-4


def test_known_rank_removes_rounding():
    """40 vectors in 200 dimensions: 161 eigenvalues are rounding, and each root of 1e-16 would count 1e-8."""
    x, y = two_sets(40, 300, 200)
    result = frechet_distance(gaussian(x), gaussian(y))
    assert result.value == pytest.approx(from_features(x, y), rel=1e-11)


def test_cholesky_factor_multiplies_back_for_any_rank():
    for rank in (0, 1, 30, 64):
        covariance = turned(torch.cat([torch.ones(rank), torch.zeros(64 - rank)]).double(), rank).covariance
        lower, residual = pivoted_cholesky(covariance)
        assert lower.shape == (64, rank)
        torch.testing.assert_close(lower @ lower.T, covariance, rtol=0, atol=1e-13)
        assert residual < 1e-13


def test_moments_do_not_depend_on_the_batch():
    x, _ = two_sets(1300, 2, 700)
    first = gaussian(*x.split(1))
    for batch in (7, 512, 1300):
        repeated = gaussian(*x.split(batch))
        assert torch.equal(repeated.covariance, first.covariance)
        assert torch.equal(repeated.mean, first.mean)
