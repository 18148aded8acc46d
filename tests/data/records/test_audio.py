"""Decoding of audio: WAV without soundfile, other formats with it, rates and channels."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from fake_records import RATE, noise, wav_bytes
from paragan.core.errors import UsageError
from paragan.data.records.audio import Audio, decode_audio, is_audio, prepare_audio
from paragan.data.source import DecodeError

soundfile = pytest.importorskip("soundfile")


def encode(samples: np.ndarray, kind: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
def test_16_bit_audio_is_exact_in_every_container(channels):
    samples = noise(600).reshape(-1, channels)
    for data in (wav_bytes(samples), encode(samples, "WAV", "PCM_16"), encode(samples, "FLAC")):
        assert is_audio(data)
        audio = decode_audio(data)
        assert audio.rate == RATE
        assert audio.samples.dtype == np.int16
        assert np.array_equal(audio.samples, samples.T)


def test_floats_stay_floats():
    samples = np.linspace(-1, 1, 50, dtype=np.float32)
    audio = decode_audio(encode(samples, "WAV", "FLOAT"))
    assert audio.samples.dtype == np.float32
    assert np.array_equal(audio.samples[0], samples)


def test_truncated_flac_is_damaged():
    data = encode(noise(50_000), "FLAC")
    for size in (10, 2000, len(data) - 100):
        with pytest.raises(DecodeError):
            decode_audio(data[:size])


def test_other_formats_name_what_they_need(monkeypatch):
    data = encode(noise(100), "FLAC")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "soundfile", None)
        with pytest.raises(UsageError, match="need soundfile: pip install soundfile, or"):
            decode_audio(data)
        assert decode_audio(wav_bytes(noise(100))).samples.shape == (1, 100)
    assert decode_audio(data).samples.shape == (1, 100)


def test_resampling_keeps_a_tone():
    time = np.arange(16000) / 16000
    audio = Audio((np.sin(2 * np.pi * 440 * time) * 16384).astype(np.int16)[None], 16000)
    with pytest.raises(DecodeError, match="its sample rate is 16000 Hz, not 8000 Hz"):
        prepare_audio(audio, 8000, 0, resample=False)
    samples = prepare_audio(audio, 8000, 0, resample=True)
    assert samples.shape == (1, 8000)
    expected = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000) * 0.5
    assert np.abs(samples[0] - expected)[100:-100].max() < 2e-3


def test_channels_are_mixed_down_on_request_only():
    stereo = Audio(np.stack([noise(10), -noise(10) // 2]), RATE)
    with pytest.raises(DecodeError, match=r"it has 2 channels, not 1: use --data\.channels=1 to mix them down"):
        prepare_audio(stereo, RATE, 0, resample=False)
    mixed = prepare_audio(stereo, RATE, 1, resample=False)
    np.testing.assert_allclose(mixed[0], stereo.samples.mean(0) / 32768, rtol=1e-6)
    assert np.array_equal(prepare_audio(stereo, RATE, 2, resample=False), stereo.samples)
