"""Scores of pairs equal a few lines of torch, on any number of ranks, and need no feature space."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from advice import advises
from paragan.core.spectrograms import mel_filters
from paragan.eval import METRICS, PairedReals, evaluate, pixels
from paragan.eval.features import raw_values
from paragan.eval.paired import MAX_PSNR, mel_config
from paragan.eval.sharding import SINGLE

COUNT = 21
RATE = 8000
SAMPLES = 1024
IMAGES = torch.randint(0, 256, (COUNT, 3, 6, 6), generator=torch.manual_seed(0), dtype=torch.uint8)
NOISY = (IMAGES + torch.randint(-9, 10, IMAGES.shape, generator=torch.manual_seed(1))).clamp(0, 255).to(torch.uint8)
WAVES = torch.rand(COUNT, 1, SAMPLES, generator=torch.manual_seed(2)) - 0.5
NOISY_WAVES = WAVES + 0.1 * torch.randn(WAVES.shape, generator=torch.manual_seed(3))


def unbuildable():
    raise AssertionError("a score of pairs needs no features")


def score(metric: str, fakes: torch.Tensor, reals: torch.Tensor, group=SINGLE, batch=4, rate=RATE):
    space = raw_values(tuple(fakes.shape[1:])) if fakes.is_floating_point() else pixels(6, 3)
    space = dataclasses.replace(space, build=unbuildable, name="any")
    pairs = PairedReals(lambda rows: reals[rows.start : rows.stop], rate)
    (result,) = evaluate(
        lambda rows: fakes[rows.start : rows.stop],
        None,
        space=space,
        metrics=[metric],
        count=COUNT,
        group=group,
        batch=batch,
        pairs=pairs,
    )
    return result


def magnitudes(wave: torch.Tensor, window: int) -> torch.Tensor:
    hop = window // 4
    before = (window - hop) // 2
    padded = torch.nn.functional.pad(wave, (before, window - hop - before), mode="reflect")[:, 0]
    spectrum = torch.stft(
        padded, window, hop, window=torch.hann_window(window, dtype=wave.dtype), center=False, return_complex=True
    )
    return (spectrum.abs() ** 2 + 1e-9).sqrt()


def expected_psnr() -> float:
    errors = ((NOISY.double() - IMAGES.double()) ** 2).mean((1, 2, 3))
    return float((10 * torch.log10(255**2 / errors)).mean())


def expected_log_mel() -> float:
    filters = mel_filters(mel_config(RATE, SAMPLES))
    a, b = ((filters @ magnitudes(wave.double(), 256)).clamp(min=1e-5).log() for wave in (NOISY_WAVES, WAVES))
    return float((a - b).abs().mean())


def expected_stft() -> float:
    total = 0.0
    for window in (512, 256, 128):
        a, b = (magnitudes(wave.double(), window) for wave in (NOISY_WAVES, WAVES))
        total += float(((a - b).norm(dim=(1, 2)) / b.norm(dim=(1, 2)) + (a.log() - b.log()).abs().mean((1, 2))).mean())
    return total / 3


CASES = {
    "psnr": (NOISY, IMAGES, expected_psnr),
    "log_mel": (NOISY_WAVES, WAVES, expected_log_mel),
    "stft": (NOISY_WAVES, WAVES, expected_stft),
}


@pytest.mark.parametrize("metric", CASES)
def test_a_score_is_the_mean_over_pairs(metric, on_ranks):
    fakes, reals, expected = CASES[metric]
    result = score(metric, fakes, reals)
    assert result.name == metric
    assert result.value == pytest.approx(expected(), rel=1e-9 if metric == "psnr" else 1e-5)
    assert "space" not in result.protocol
    assert result.protocol["fakes"] == COUNT
    for other in on_ranks(3, lambda group: score(metric, fakes, reals, group)):
        assert other.value == result.value  # bit for bit
    assert score(metric, fakes, reals, batch=64).value == pytest.approx(result.value, rel=1e-6)


def test_equal_pairs_have_the_best_values():
    assert score("psnr", IMAGES, IMAGES).value == MAX_PSNR
    assert score("log_mel", WAVES, WAVES).value == score("stft", WAVES, WAVES).value == 0


def test_windows_of_mel_spectrograms_follow_the_sample_rate():
    assert [mel_config(rate, 10**6).n_fft for rate in (8000, 16000, 22050, 48000)] == [256, 512, 512, 2048]
    assert mel_config(48000, 600).n_fft == 512
    assert score("log_mel", NOISY_WAVES, WAVES, rate=192_000).value > 0


def test_fakes_that_are_not_finite_have_no_score():
    fakes = NOISY_WAVES.clone()
    fakes[3] = math.nan
    with pytest.raises(Exception, match="1 of 21 fakes are not finite"):
        score("stft", fakes, WAVES)


def test_data_of_another_kind_is_refused():
    images = pixels(6, 3)
    with advises("metrics=psnr: is of images, and the data are numbers. Use stft for waves [1, T], or fd"):
        METRICS["psnr"].check_space("psnr", raw_values((1, 512)))
    METRICS["stft"].check_space("stft", raw_values((1, 512)))
    for name in ("log_mel", "stft"):
        with advises(f"metrics={name}: is of waves, and the data are images. Use psnr"):
            METRICS[name].check_space(name, images)
        with advises(f"metrics={name}: is of waves [1, T], and the data are [2, 9]. Use fd or kid"):
            METRICS[name].check_space(name, raw_values((2, 9)))
        with advises(f"metrics={name}: needs waves of 512 samples, and the data have 500. Use --data.segment=512"):
            METRICS[name].check_space(name, raw_values((1, 500)))
    METRICS["psnr"].check_space("psnr", images)
    with advises("metrics=log_mel: needs the sample rate of audio files, and arrays have none. Use stft"):
        score("log_mel", NOISY_WAVES, WAVES, rate=0)
    assert score("stft", NOISY_WAVES, WAVES, rate=0).value > 0


def test_pairs_of_other_shapes_are_refused():
    with advises(
        "fakes: are torch.uint8 [4, 3, 6, 6], and the reals they were made from torch.uint8 [4, 1, 6, 6]. "
        "Leave psnr, log_mel and stft out, or return the shape of the reals"
    ):
        score("psnr", NOISY, IMAGES[:, :1])
