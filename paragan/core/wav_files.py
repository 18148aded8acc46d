"""Write and read waves as 16-bit WAV files."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np

INT16_SCALE = 32768  # int16 becomes float32 in [-1, 1) by this divisor


class Wave(NamedTuple):
    """Waves of some channels.

    samples     : [C, T] float32 in [-1, 1]
    sample_rate : Hz
    """

    samples: np.ndarray
    sample_rate: int


def encode_wav(samples: np.ndarray, sample_rate: int) -> bytes:
    """Return a wave as the content of a 16-bit WAV file.

    Args:
        samples: [C, T] float; values outside [-1, 1] are clipped, NaN is 0.
        sample_rate: Hz.
    """
    scaled = np.nan_to_num(samples.astype(np.float64), posinf=1, neginf=-1) * INT16_SCALE
    pcm = scaled.round().clip(-INT16_SCALE, INT16_SCALE - 1).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(len(pcm))
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(pcm.T.tobytes())
    return file.getvalue()


def read_wav(path: Path, max_bytes: int) -> Wave | None:
    """Read the start of a 16-bit WAV file.

    Args:
        path: the file.
        max_bytes: of samples that are read.

    Returns:
        The wave, or None if the file is missing, empty, ends too early, or is of another kind.
    """
    try:
        with wave.open(str(path), "rb") as reader:
            channels, width, sample_rate, count, *_ = reader.getparams()
            frame_bytes = width * channels
            num_frames = min(count, max_bytes // frame_bytes)
            data = reader.readframes(num_frames)
    except (OSError, EOFError, wave.Error):
        return None
    if width != 2 or not sample_rate or not data or len(data) < num_frames * frame_bytes:
        return None
    samples = np.frombuffer(data, "<i2").reshape(-1, channels).T
    return Wave(samples.astype(np.float32) / INT16_SCALE, sample_rate)
