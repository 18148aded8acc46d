"""Bottlenecks against plain PyTorch: nearest codes, moving averages, restart, additivity, gradients, no waiting."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import standin
from paragan.nets.codebook import (
    SPLIT,
    ResidualVectorQuantizer,
    VectorQuantizer,
    codebook_usage,
    nearest_codes,
    split_codes,
)
from paragan.nets.quantizers import DiagonalGaussian, FiniteScalarQuantizer


def quantizer(codes=7, dim=3, **options):
    torch.manual_seed(0)
    vq = VectorQuantizer(codes, dim, **options).double()
    vq.codebook.normal_()
    vq.embed_sum.copy_(vq.codebook)
    return vq


def z_like(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_nearest_codes_are_those_of_all_distances():
    rows, codebook = z_like(3000, 5), z_like(900, 5, seed=2)  # more than one block
    assert torch.equal(nearest_codes(rows, codebook), torch.cdist(rows, codebook).argmin(1))


def test_output_is_the_nearest_code_at_every_position():
    vq, z = quantizer(), z_like(4, 3, 5, 2)
    out = vq(z)
    expected = (z[:, None] - vq.codebook[None, :, :, None, None]).square().sum(2).argmin(1)
    assert torch.equal(out.codes, expected)
    assert torch.equal(out.quantized, vq.codebook[expected].permute(0, 3, 1, 2))  # exactly, not z + (q - z)
    assert torch.equal(vq.codes_to_values(out.codes), out.quantized)
    torch.testing.assert_close(out.commitment, (z - out.quantized).square().mean())


def test_cosine_compares_directions():
    vq, z = quantizer(normalize=True), z_like(40, 3)
    vq.codebook.copy_(F.normalize(vq.codebook))
    out = vq(z)
    assert torch.equal(out.codes, F.cosine_similarity(z[:, None], vq.codebook, dim=2).argmax(1))
    assert torch.equal(vq(5 * z).codes, out.codes)
    vq.apply_synchronised()
    torch.testing.assert_close(vq.codebook.norm(dim=1), torch.ones(7, dtype=torch.float64))


def test_gradient_passes_straight_through_and_of_the_commitment_goes_to_the_input():
    vq, z = quantizer(), z_like(4, 3, 2).requires_grad_()
    out = vq(z)
    weights = z_like(4, 3, 2, seed=3)
    (grad,) = torch.autograd.grad((out.quantized * weights).sum(), z, retain_graph=True)
    assert torch.equal(grad, weights)
    (grad,) = torch.autograd.grad(out.commitment, z)
    torch.testing.assert_close(grad, 2 * (z - out.quantized).detach() / z.numel())


def test_codebook_is_the_moving_average_of_its_rows():
    vq, sizes = quantizer(restart_below=0), torch.ones(7, dtype=torch.float64)
    sums = vq.codebook.clone()
    for step in range(5):
        rows = z_like(60, 3, seed=step)
        one_hot = F.one_hot(torch.cdist(rows, vq.codebook).argmin(1), 7).double()
        sizes = 0.99 * sizes + 0.01 * one_hot.sum(0)
        sums = 0.99 * sums + 0.01 * one_hot.T @ rows
        n = sizes.sum()
        vq(rows)
        vq.apply_synchronised()
        torch.testing.assert_close(vq.codebook, sums / ((sizes + 1e-5) / (n + 7e-5) * n)[:, None])
    assert not vq.counts.any()
    assert not vq.sums.any()


def test_what_a_step_collects_is_a_sum_over_rows():
    merged, divided, z = quantizer(), quantizer(), z_like(24, 3, 4)
    merged(z)
    for part in z.split([8, 12, 4]):
        divided(part)
    assert torch.equal(merged.counts, divided.counts)
    torch.testing.assert_close(merged.sums, divided.sums, rtol=1e-14, atol=1e-14)
    assert merged.counts.sum() == 96


def test_evaluation_and_a_step_without_rows_change_nothing():
    vq = quantizer()
    before = copy.deepcopy(vq.state_dict())
    vq.eval()(z_like(24, 3))
    vq.apply_synchronised()
    for name, value in vq.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_unused_codes_become_halves_of_the_most_used():
    codebook = z_like(6, 3)
    sizes = torch.tensor([5.0, 0, 9, 0.001, 4, 0], dtype=torch.float64)  # 3 unused; 2, 0, 4 are the most used
    values, halves, sums = split_codes(codebook, sizes, codebook * sizes[:, None], 0.1)
    step = torch.tensor([SPLIT, -SPLIT, SPLIT])
    for copied, donor in ((1, 2), (3, 0), (5, 4)):
        torch.testing.assert_close(values[copied], codebook[donor] * (1 + step))
        torch.testing.assert_close(values[donor], codebook[donor] * (1 - step))
        assert halves[copied] == halves[donor] == sizes[donor] / 2
    torch.testing.assert_close(sums, values * halves[:, None])


def test_codes_whose_halves_would_be_unused_are_not_split():
    codebook, sizes = z_like(4, 3), torch.tensor([1.0, 0, 0, 0.1], dtype=torch.float64)
    values, halves, _ = split_codes(codebook, sizes, codebook, 0.3)
    assert halves.tolist() == [0.5, 0.5, 0, 0.1]
    assert torch.equal(values[2:], codebook[2:])


def test_restart_brings_all_codes_into_use():
    torch.manual_seed(0)
    vq = VectorQuantizer(32, 2)
    vq.codebook[1:] += 100  # one code gets all rows
    vq.embed_sum.copy_(vq.codebook)
    for _ in range(600):
        vq(torch.randn(512, 2))
        vq.apply_synchronised()
    assert vq(torch.randn(4096, 2)).codes.unique().numel() == 32


def test_usage_is_the_share_of_codes_in_use_and_the_exponential_of_their_entropy():
    quantizers = nn.ModuleList([VectorQuantizer(4, 2), ResidualVectorQuantizer(1, 4, 2)])
    assert codebook_usage(quantizers) == {"Codebook/use": 1, "Codebook/perplexity": pytest.approx(4)}
    for sizes, use, perplexity in (([9.0, 9.0, 0.0, 0.0], 0.5, 2), ([1.0, 0.2, 0.001, 0.0], 0.5, None)):
        quantizer = VectorQuantizer(4, 2)
        quantizer.cluster_size.copy_(torch.tensor(sizes))
        usage = codebook_usage(quantizer)
        assert usage["Codebook/use"] == use
        shares = [size / sum(sizes) for size in sizes if size]
        entropy = -sum(share * math.log(share) for share in shares)
        assert float(usage["Codebook/perplexity"]) == pytest.approx(perplexity or math.exp(entropy), rel=1e-5)
    assert codebook_usage(FiniteScalarQuantizer((4, 4))) == {}


def test_stages_quantize_what_is_left():
    torch.manual_seed(0)
    rvq = ResidualVectorQuantizer(3, 8, 4).double()
    for stage in rvq.stages:
        stage.codebook.normal_()
    z = z_like(5, 4, 6).requires_grad_()
    out = rvq(z)
    left, commitments = z.detach(), []
    for i, stage in enumerate(rvq.stages):
        index = torch.cdist(left.permute(0, 2, 1).reshape(-1, 4), stage.codebook).argmin(1).view(5, 6)
        assert torch.equal(out.codes[:, i], index)
        left = left - stage.codebook[index].permute(0, 2, 1)
        commitments.append(left.square().mean())
    torch.testing.assert_close(out.quantized, z - left)
    torch.testing.assert_close(out.commitment, sum(commitments) / 3)
    assert torch.equal(rvq.codes_to_values(out.codes), out.quantized)
    (grad,) = torch.autograd.grad(out.quantized.sum(), z)
    assert torch.equal(grad, torch.ones_like(z))
    coarse = rvq.codes_to_values(out.codes[:, :1])
    assert torch.equal(coarse, rvq.stages[0].codes_to_values(out.codes[:, 0]))


@pytest.mark.parametrize("levels", [(8, 5, 5), (2, 3, 4), (7,)])
def test_scalars_are_rounded_to_their_levels(levels):
    fsq, n = FiniteScalarQuantizer(levels), torch.tensor(levels)
    z = torch.empty(9000, len(levels), 2).uniform_(-5, 5)
    out = fsq(z)
    half = (n - 1) * (1 - 1e-3) / 2
    offset = torch.where(n % 2 == 1, 0.0, 0.5)  # the authors' code
    digits = (torch.tanh(z.mT + torch.tan(offset / half)) * half - offset).round()
    assert torch.equal(out.quantized, (digits / (n // 2)).mT)
    assert [channel.unique().numel() for channel in out.quantized.unbind(1)] == list(levels)
    assert fsq.codes_to_values(torch.arange(fsq.codes)).unique(dim=0).shape[0] == fsq.codes == n.prod()
    assert torch.equal(fsq.codes_to_values(out.codes), out.quantized)
    assert torch.equal(fsq(torch.zeros(1, len(levels))).quantized, torch.zeros(1, len(levels)))
    assert out.commitment == 0


def test_gradient_of_rounded_scalars_is_that_of_the_bounded_ones():
    fsq, z = FiniteScalarQuantizer((8, 5)), torch.randn(6, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(fsq(z).quantized.sum(), z)
    half, n = fsq.half_range, torch.tensor((8, 5))
    torch.testing.assert_close(grad, (1 - torch.tanh(z + fsq.shift).square()) * half / (n // 2))


def test_gaussian_samples_and_their_divergence():
    gaussian, moments = DiagonalGaussian(), z_like(50, 4, 300)
    moments[:, 2:] *= 0.3
    out = gaussian(moments)
    mean, log_variance = moments[:, :2], moments[:, 2:]
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(out.kl, divergence.sum((1, 2)).mean())
    noise = (out.sample - mean) / normal.scale
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    assert torch.equal(gaussian.eval()(moments).sample, mean)
    assert gaussian(moments.clone().fill_(1e4)).kl.isfinite()


@pytest.mark.parametrize(
    "make",
    [
        lambda: VectorQuantizer(6, 4),
        lambda: VectorQuantizer(6, 4, normalize=True),
        lambda: ResidualVectorQuantizer(2, 6, 4),
        lambda: FiniteScalarQuantizer((3, 4, 5, 6)),
        DiagonalGaussian,
    ],
)
def test_autocast_does_not_make_bottlenecks_coarser(make):
    torch.manual_seed(0)
    module, z = make(), torch.randn(8, 4, 3)
    module.eval()
    expected = module(z)
    with torch.autocast("cpu", torch.bfloat16):
        for value, other in zip(module(z), expected):
            assert torch.equal(value, other)
        assert module(z.bfloat16())[0].dtype == torch.float32


@pytest.mark.parametrize(
    "make", [lambda: VectorQuantizer(6, 4, normalize=True), lambda: ResidualVectorQuantizer(2, 6, 4)]
)
def test_steps_do_not_wait_for_the_device(make):
    torch.manual_seed(0)
    on_cpu, z = make(), torch.randn(40, 4)
    device = standin.install()
    on_device = copy.deepcopy(on_cpu).to(device)
    moved = z.to(device)
    with standin.recording() as waits:
        for _ in range(3):
            on_device(moved)
            for stage in on_device.modules():
                if isinstance(stage, VectorQuantizer):
                    stage.apply_synchronised()
    assert not waits, "\n".join(map(str, waits))
    for _ in range(3):
        on_cpu(z)
        for stage in on_cpu.modules():
            if isinstance(stage, VectorQuantizer):
                stage.apply_synchronised()
    for name, value in on_device.state_dict().items():
        torch.testing.assert_close(value.cpu(), on_cpu.state_dict()[name])


def test_declared_buffers_exist_and_nothing_is_trained():
    vq = quantizer()
    assert set(vq.synchronised) <= {name for name, _ in vq.named_buffers()}
    assert isinstance(vq, nn.Module)
    assert not list(vq.parameters())
