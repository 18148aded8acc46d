"""Spectrograms against written-out transforms, mel frequencies against published values, distances row by row."""

import math

import pytest
import torch

from paragan.core.spectrograms import (
    MelConfig,
    hz_to_mel,
    log_mel,
    mel_filters,
    mel_to_hz,
    stft_distance,
    stft_magnitude,
)

CONFIG = MelConfig(sample_rate=8000, n_fft=64, hop=16, mels=12)


def waves(n=3, samples=160):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, samples, dtype=torch.float64, generator=generator) * 0.1


def test_magnitudes_are_those_of_windowed_frames():
    x, n_fft, hop = waves(), 64, 16
    padded = torch.cat([x.flip(2)[..., -25:-1], x, x.flip(2)[..., 1:25]], 2)[:, 0]  # mirrored by (64 - 16) / 2
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(n_fft, dtype=torch.float64) / n_fft)
    frames = torch.stack([padded[:, i * hop : i * hop + n_fft] * window for i in range(10)], 2)
    spectrum = torch.fft.rfft(frames, dim=1)
    torch.testing.assert_close(stft_magnitude(x, n_fft, hop), (spectrum.abs().square() + 1e-9).sqrt())


def test_mel_frequencies_are_slaneys():
    hz = torch.tensor([60.0, 110, 220, 440, 8000], dtype=torch.float64)
    mel = hz_to_mel(hz)
    expected = torch.tensor([0.9, 1.65, 3.3, 6.6, 45.245640471924965], dtype=torch.float64)  # librosa.hz_to_mel
    torch.testing.assert_close(mel, expected)
    torch.testing.assert_close(mel_to_hz(mel), hz)


def test_mel_filters_are_triangles_of_area_one():
    filters = mel_filters(MelConfig(sample_rate=22050, n_fft=2048, hop=512, mels=128))
    assert filters.shape == (128, 1025)
    assert filters[0, 1].item() == pytest.approx(0.016, abs=5e-4)  # librosa.filters.mel(sr=22050, n_fft=2048)
    area = filters.sum(1) * 22050 / 2048
    assert ((area - 1).abs() < 0.25).all()  # sampled at the frequencies of the transform
    assert (area[60:] - 1).abs().max() < 0.02  # wide ones exactly
    assert (mel_filters(MelConfig()).sum(1) > 0).all()  # none is empty


def test_log_mel_of_a_tone_has_its_maximum_at_the_tone():
    time = torch.arange(1600, dtype=torch.float64) / 8000
    config = MelConfig()
    centers = mel_filters(config).argmax(1) * 8000 / config.n_fft
    mel = log_mel(torch.sin(2 * math.pi * 1250 * time)[None], config)
    assert mel.shape == (1, 64, 25)
    loudest = centers[mel[0, :, 5:20].argmax(0)]
    assert ((loudest - 1250).abs() < 60).all()


def test_log_mel_is_the_logarithm_of_filtered_magnitudes():
    x = waves()
    expected = torch.einsum("mf,nft->nmt", mel_filters(CONFIG), stft_magnitude(x, 64, 16)).clamp(min=1e-5).log()
    torch.testing.assert_close(log_mel(x, CONFIG), expected)


def test_gradients_are_finite_also_in_silence():
    for x in (waves(), torch.zeros(2, 1, 160, dtype=torch.float64)):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(log_mel(x, CONFIG).sum() + stft_distance(x, waves(len(x)), [(64, 16)]).sum(), x)
        assert grad.isfinite().all()


def test_distance_is_of_each_wave_and_zero_for_equal_ones():
    x, y = waves(), waves().flip(0) * 2
    resolutions = [(64, 16), (32, 8)]
    together = stft_distance(x, y, resolutions)
    assert together.shape == (3,)
    torch.testing.assert_close(
        together, torch.cat([stft_distance(a[None], b[None], resolutions) for a, b in zip(x, y)])
    )
    assert not stft_distance(x, x, resolutions).any()
    a, b = stft_magnitude(x[:1], 64, 16), stft_magnitude(y[:1], 64, 16)
    expected = torch.linalg.norm((a - b).flatten()) / torch.linalg.norm(b.flatten()) + (a / b).log().abs().mean()
    torch.testing.assert_close(stft_distance(x[:1], y[:1], [(64, 16)])[0], expected)


def test_autocast_changes_nothing():
    x = waves().float()
    expected = log_mel(x, CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(log_mel(x, CONFIG), expected)
