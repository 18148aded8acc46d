"""HiFi-GAN: its generator against the paper's sum of blocks, discriminators, weight norm in the trainer, refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter

from advice import advises
from paragan.comm.flat_params import FlatParams
from paragan.config.user_code import check_nets
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.spectrograms import log_mel, stft_magnitude
from paragan.core.types import Batch
from paragan.nets import HiFiGAN, Nets, Spec
from paragan.nets.hifigan import HiFiGANGenerator, WaveUpsample
from paragan.nets.memory_format import set_memory_format
from paragan.nets.spectral_norm import power_iteration, train_mode
from paragan.nets.wave_discriminators import PeriodDiscriminator, ResolutionDiscriminator, wave_discriminator

SMALL = HiFiGAN(
    n_fft=32, mels=5, upsample_rates=(4, 2), width=8, periods=(2, 3), resolutions=((32, 8),), d_width=1,
    resolution_width=2,
)  # fmt: skip
WAVE = Spec(0, 0, array_shape=(1, 128))


def build(config=SMALL, spec=WAVE):
    torch.manual_seed(0)
    return train_mode(config.generator(spec)), train_mode(config.discriminator(spec))


def waves(n=3, samples=128, dtype=torch.float32):
    return (torch.randn(n, 1, samples, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("rates", [(4, 2), (5, 3), (8,)])
def test_every_frame_becomes_a_hop_of_samples(block, rates):
    torch.manual_seed(0)
    G = HiFiGANGenerator(5, rates, 16, block)
    hop = torch.tensor(rates).prod()
    wave = G(torch.randn(2, 5, 7))
    assert wave.shape == (2, 1, 7 * hop)
    assert wave.abs().max() <= 1
    wave.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in G.parameters())


@pytest.mark.parametrize("block", [1, 2])
def test_a_stage_is_the_mean_of_its_blocks(block):
    torch.manual_seed(0)
    stage, x = WaveUpsample(8, 4, block).double(), torch.randn(2, 8, 9, dtype=torch.float64)
    up = F.conv_transpose1d(F.leaky_relu(x, 0.1), stage.up.weight[:, :, 0], stage.up.bias, 4, 2)
    assert up.shape == (2, 4, 36)
    total = torch.zeros_like(up)
    for part, kernel in zip(stage.blocks, (3, 7, 11) if block == 1 else (3, 5, 7)):
        h = up
        for i, conv in enumerate(part.dilated):
            step = conv.dilation[1]
            weight = conv.weight[:, :, 0]
            inner = F.conv1d(F.leaky_relu(h, 0.1), weight, conv.bias, 1, step * (kernel - 1) // 2, step)
            if block == 1:
                plain = part.plain[i]
                inner = F.conv1d(F.leaky_relu(inner, 0.1), plain.weight[:, :, 0], plain.bias, 1, (kernel - 1) // 2)
            h = h + inner
        total = total + h
    torch.testing.assert_close(stage(x[:, :, None])[:, :, 0], total / 3)


def test_number_of_parameters_of_the_paper():
    """Table 1 of the paper: V1 13.92, V2 0.92 and V3 1.46 million, without the lengths of weight norm."""
    sizes = []
    for rates, width, block in (((8, 8, 2, 2), 512, 1), ((8, 8, 2, 2), 128, 1), ((8, 8, 4), 256, 2)):
        with torch.device("meta"):
            G = HiFiGANGenerator(80, rates, width, block)
        lengths = sum(p.numel() for name, p in G.named_parameters() if name.endswith("original0"))
        sizes.append((sum(p.numel() for p in G.parameters()) - lengths) / 1e6)
    assert sizes == pytest.approx([13.92, 0.92, 1.46], abs=0.02)


def test_a_period_sees_every_pth_sample():
    torch.manual_seed(0)
    D, x = PeriodDiscriminator(3, 1).double(), waves(2, 101, torch.float64).requires_grad_()
    out = D(x)
    column = out.logits.view(2, 3, -1)[:, 1]
    (grad,) = torch.autograd.grad(column.sum(), x)
    seen = grad.abs().sum((0, 1)).nonzero().flatten() % 3
    assert set(seen.tolist()) == {1}
    assert len(out.features) == 5


def test_a_resolution_sees_its_spectrogram():
    torch.manual_seed(0)
    D, x = ResolutionDiscriminator(32, 8, 2).double(), waves(2, 128, torch.float64)
    h = stft_magnitude(x, 32, 8)[:, None]
    for i, conv in enumerate(D.stack.convs):
        stride = (1, 2) if 1 <= i <= 3 else 1
        h = F.leaky_relu(F.conv2d(h, conv.weight, conv.bias, stride, (1, 4) if i < 4 else 1), 0.2)
        torch.testing.assert_close(D(x).features[i], h)
    logits = F.conv2d(h, D.stack.last.weight, D.stack.last.bias, 1, 1).flatten(1)
    torch.testing.assert_close(D(x).logits, logits)


def test_discriminators_stand_next_to_one_another():
    torch.manual_seed(0)
    D, x = wave_discriminator((2, 3), ((32, 8), (16, 4)), 1, 2).double(), waves(dtype=torch.float64)
    out = D(x, None)
    parts = [part(x) for part in D.discriminators]
    assert out.patches == tuple(part.logits.shape[1] for part in parts)
    torch.testing.assert_close(out.logits, torch.cat([part.logits for part in parts], 1))
    assert len(out.features) == sum(len(part.features) for part in parts) == 20
    torch.testing.assert_close(out.logits, torch.cat([D(row[None]).logits for row in x]))  # rows are independent
    out.logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in D.parameters())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_narrow_maps_are_right(precision):
    torch.manual_seed(0)
    D = wave_discriminator((2, 11, 257, 512), ((64, 64), (512, 512)), 4, 4)
    set_memory_format(D, torch.channels_last)
    exact, x = copy.deepcopy(D).double(), torch.randn(4, 1, 512)
    exact(x.double()).logits.square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        D(x).logits.square().mean().backward()
    tolerance = 0.1 if precision == torch.bfloat16 else 1e-4
    for (name, p), q in zip(D.named_parameters(), exact.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-3)
        assert error < tolerance, (name, error)


def test_weight_norm_trains_in_flat_vectors_and_is_copied_and_saved():
    G, _ = build()
    mel = torch.randn(2, 5, 16)
    expected = G(mel)
    copied = copy.deepcopy(G)
    flat = FlatParams.from_network(G)
    assert torch.equal(G(mel), expected)
    flat.clear_grads()
    power_iteration(G)  # of spectral norm: leaves weight norm as it is
    G(mel).square().mean().backward()
    assert flat.grads.any()
    flat.params.sub_(flat.grads, alpha=10)
    changed = G(mel)
    assert not torch.equal(changed, expected)
    assert torch.equal(copied(mel), expected)
    copied.load_state_dict(G.state_dict())
    assert torch.equal(copied(mel), changed)


def test_input_of_g_is_the_mel_spectrogram():
    x = waves()
    mel = SMALL.conditioning_input(Batch(x, None, LaneRng(0, 0, (0,), 3)))
    assert torch.equal(mel, log_mel(x, SMALL.mel))
    G, D = build()
    assert G(mel, None).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        wave = G(mel)
        assert wave.dtype == D(wave).logits.dtype == torch.float32


def test_waves_fit_as_advised():
    with advises("--nets=hifigan: makes waves [1, T], and the data are [3, 32, 32]. Use audio, or records [1, T]"):
        check_nets(HiFiGAN(), Spec(32, 3))
    check_nets(HiFiGAN(), Spec(0, 0, array_shape=(1, 4096)))
    with advises(
        "data.segment: the waves have 1000 samples (data.segment, or what data.transform returns), no multiple of the "
        "64 of a frame (the product of nets.upsample_rates). Use 1024 samples"
    ):
        HiFiGAN().check(Spec(0, 0, array_shape=(1, 1000)))
    HiFiGAN().check(Spec(0, 0, array_shape=(1, 1024)))
    with advises(
        "data.segment: the waves have 256 samples (data.segment, or what data.transform returns), fewer than the 512 "
        "of a window. Use 512 samples"
    ):
        HiFiGAN().check(Spec(0, 0, array_shape=(1, 256)))
    HiFiGAN().check(Spec(0, 0, array_shape=(1, 512)))


def test_the_rate_fits_as_advised():
    with advises("nets.sample_rate=8000: the audio has 22050 Hz. Use nets.sample_rate=22050"):
        HiFiGAN().check(Spec(0, 0, array_shape=(1, 1024), sample_rate=22050))
    HiFiGAN(sample_rate=22050).check(Spec(0, 0, array_shape=(1, 1024), sample_rate=22050))


def test_sizes_fit_as_advised():
    with advises("nets.width=30: cannot be halved 2 times. Use nets.width=32"):
        HiFiGAN(width=30).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(width=32).check(Spec(0, 0, array_shape=(1, 1024)))
    with advises("nets.n_fft=32: windows leave gaps between frames of 64 samples. Use nets.n_fft=128"):
        HiFiGAN(n_fft=32).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(n_fft=128).check(Spec(0, 0, array_shape=(1, 1024)))
    with advises("nets.mels=200: a window of 256 samples has 129 frequencies. Use nets.mels=64 or a longer window"):
        HiFiGAN(mels=200).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(mels=64).check(Spec(0, 0, array_shape=(1, 1024)))
    with advises(
        "nets.resolutions: windows of 64 samples leave gaps between frames of 128 samples. Use [256, 128] in place of "
        "[64, 128]"
    ):
        HiFiGAN(resolutions=((64, 128),)).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(resolutions=((256, 128),)).check(Spec(0, 0, array_shape=(1, 1024)))
    with advises("nets.periods=[2, 2000]: the waves have 1024 samples. Use periods of at most 1024"):
        HiFiGAN(periods=(2, 2000)).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(periods=(2, 1024)).check(Spec(0, 0, array_shape=(1, 1024)))
    with advises("nets.periods=[]: leaves no discriminator beside nets.resolutions=[]. Use nets.periods=[2,3]"):
        HiFiGAN(periods=(), resolutions=()).check(Spec(0, 0, array_shape=(1, 1024)))
    HiFiGAN(periods=(2, 3), resolutions=()).check(Spec(0, 0, array_shape=(1, 1024)))
    with pytest.raises(UsageError, match="makes waves"):
        HiFiGAN().generator(Spec(0, 0, array_shape=(2, 1024)))


def test_config_by_name():
    config = TypeAdapter(Nets).validate_python({"name": "hifigan", "upsample_rates": [4, 4]})
    assert config == HiFiGAN(upsample_rates=(4, 4))
    assert config.hop == config.mel.hop == 16
