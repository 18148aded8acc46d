"""Decode audio files. 16-bit WAV needs nothing; FLAC, Ogg and other WAV need `soundfile` (the extra `audio`).

16-bit audio stays int16, all other is float32 in [-1, 1]. Audio that is truncated, empty or silent counts as damaged.
"""

from __future__ import annotations

import io
import math
import wave
from typing import NamedTuple

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.records.layout import to_float
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import format_error

MAX_RATE = 1_000_000  # Hz, against headers that lie: far above that of any audio
MAX_SAMPLES = 2**28  # of all channels of a file, against headers that lie: 46 minutes of CD stereo are 2 ** 28 samples


class Audio(NamedTuple):
    """Decoded audio.

    samples : [C, T] int16 or float32
    rate    : Hz
    """

    samples: np.ndarray
    rate: int


class OtherRate(DecodeError):
    """Audio of another sample rate than the rest."""


def is_audio(data: bytes) -> bool:
    """Return whether a file is WAV, FLAC or Ogg, by its first bytes."""
    return data[:4] in (b"fLaC", b"OggS") or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")


def decode_audio(data: bytes) -> Audio:
    """Decode a WAV, FLAC or Ogg file.

    Raises:
        DecodeError: it is damaged, truncated or empty, or its rate is no rate of audio.
        UsageError: it needs `soundfile`, which is not installed.
    """
    audio = _decode_wav(data) if data[:4] == b"RIFF" else None
    audio = audio or _decode_by_soundfile(data)
    if not audio.samples.size:
        raise DecodeError("holds no audio: its length is zero")
    if not 0 < audio.rate <= MAX_RATE:
        raise DecodeError(f"claims a sample rate of {audio.rate:,} Hz, expected 1 to {MAX_RATE:,}")
    return audio


def prepare_audio(audio: Audio, rate: int, channels: int, resample: bool) -> np.ndarray:
    """Return audio [C, T] at the rate and with the channels of the data set.

    Args:
        audio: the file.
        rate: Hz.
        channels: C; 0 for files that have one; 1 mixes down.
        resample: convert audio of another rate.

    Raises:
        DecodeError: it has another rate or other channels, is silent, or is too long once it is resampled.
    """
    samples = audio.samples
    if audio.rate != rate and not resample:
        raise OtherRate(
            f"its sample rate is {audio.rate} Hz, not {rate} Hz: use --data.sample_rate={rate} --data.resample=true"
        )
    if len(samples) != (channels or 1):
        if channels != 1:
            raise DecodeError(
                f"it has {len(samples)} channels, not {channels or 1}: use --data.channels=1 to mix them down"
            )
        samples = to_float(samples).mean(axis=0, keepdims=True)
    if not samples.any():
        raise DecodeError("is silent: all samples are 0")
    if audio.rate != rate:
        return _resample(to_float(samples), audio.rate, rate)
    return to_float(samples) if resample or channels == 1 else samples  # the type of files that had to be converted


def _resample(samples: np.ndarray, old_rate: int, new_rate: int) -> np.ndarray:
    """Resample [C, T] float32 by a polyphase filter. Raises `DecodeError` if it becomes too long."""
    from scipy.signal import resample_poly  # slow to import

    _check_length(samples.size * new_rate // old_rate, f" at {new_rate} Hz")
    divisor = math.gcd(old_rate, new_rate)
    return resample_poly(samples, new_rate // divisor, old_rate // divisor, axis=1).astype(np.float32)


def _decode_wav(data: bytes) -> Audio | None:
    """Decode WAV of 16 bits; None for other kinds."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return None
            channels, count, rate = file.getnchannels(), file.getnframes(), file.getframerate()
            _check_length(count * channels)
            frames = file.readframes(count)
    except EOFError:
        raise DecodeError("is truncated: its header is not complete") from None
    except wave.Error:
        return None  # floats, compressed, or damaged: soundfile decides
    samples = np.frombuffer(frames, "<i2", len(frames) // (2 * channels) * channels)
    _check_complete(len(samples) // channels, count)
    return Audio(np.ascontiguousarray(samples.reshape(-1, channels).T, np.int16), rate)


def _decode_by_soundfile(data: bytes) -> Audio:
    try:
        import soundfile
    except (ImportError, OSError):
        raise UsageError(
            "data: FLAC, Ogg, and WAV of other than 16 bits need soundfile: pip install soundfile, or convert the "
            "files to 16-bit WAV"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames * file.channels)
            dtype = "int16" if file.subtype in ("PCM_16", "PCM_S8", "PCM_U8") else "float32"
            samples = file.read(dtype=dtype, always_2d=True)
            _check_complete(len(samples), file.frames)
            return Audio(np.ascontiguousarray(samples.T), file.samplerate)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise DecodeError(f"is no audio, or is damaged or truncated ({format_error(error)})") from None


def _check_length(num_samples: int, at_rate: str = "") -> None:
    if num_samples > MAX_SAMPLES:
        raise DecodeError(
            f"claims {num_samples:,} samples{at_rate}, more than {MAX_SAMPLES:,}: split it into shorter files"
        )


def _check_complete(count: int, expected: int) -> None:
    if count < expected:
        raise DecodeError(f"is truncated: it holds {count:,} of {expected:,} samples")
