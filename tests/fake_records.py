"""Records for tests: audio files, files of arrays, and transforms that options name."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from paragan.core.wav_files import encode_wav
from paragan.report.embedded_audio import GENERATED, REAL, wave_name, waves_dir

RATE = 8000


def wav_bytes(samples: np.ndarray, rate: int = RATE) -> bytes:
    """Return 16-bit WAV of samples [T] or [T, C] int16."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def with_rate(data: bytes, rate: int) -> bytes:
    """Return a WAV file with another rate in its header, Hz."""
    return data[:24] + rate.to_bytes(4, "little") + data[28:]


def write_wave_samples(run_dir: Path, kimg: int, waves: np.ndarray, rate: int = RATE) -> None:
    """Write waves [n, 2, C, T], generated and real, as a run does."""
    folder = waves_dir(run_dir, kimg)
    folder.mkdir(parents=True)
    for number, pair in enumerate(waves):
        for side, samples in zip((GENERATED, REAL), pair):
            (folder / wave_name(number, side)).write_bytes(encode_wav(samples, rate))


def noise(count: int, seed: int = 0) -> np.ndarray:
    """Return samples [count] int16, none of which is 0."""
    return np.random.default_rng(seed).integers(1, 30000, count).astype(np.int16)


def write_recordings(folder: Path, count: int = 12, rate: int = RATE) -> Path:
    """Write `CLASS_NUMBER.wav` of 300 to 300 + 40 * count samples, three classes."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        name = f"{number % 3}_{number}.wav"
        (folder / name).write_bytes(wav_bytes(noise(300 + 40 * number, number), rate))
    return folder


def frames(record: dict, rng: np.random.Generator) -> dict:
    """Add noise, and the energies of frames of 16 samples as float16."""
    x = record["wave"]
    noisy = (x + rng.normal(0, 0.01, x.shape)).astype(np.float32)
    energy = np.square(x.reshape(-1, 16)).mean(1).astype(np.float16)
    return {"wave": x, "noisy": noisy, "energy": energy}


def failing(record: dict, rng: np.random.Generator) -> dict:
    """Fail on records whose first sample is low."""
    if record["wave"][0, 0] < 0.5:
        raise ValueError("too low")
    return record


def listing(record: dict, rng: np.random.Generator) -> list:
    """Return something else than a record."""
    return list(record.values())


def halving(record: dict, rng: np.random.Generator) -> dict:
    """Change the arrays in place."""
    for array in record.values():
        array *= np.float32(0.5)
    return record


def exiting(record: dict, rng: np.random.Generator) -> dict:
    """End the program on records whose first sample is low."""
    if record["wave"][0, 0] < 0.5:
        raise SystemExit(3)
    return record


def empty(record: dict, rng: np.random.Generator) -> dict:
    """Return no arrays."""
    return {}


def list_values(record: dict, rng: np.random.Generator) -> dict:
    """Return lists of numbers."""
    return {name: array.tolist() for name, array in record.items()}


def numbered(record: dict, rng: np.random.Generator) -> dict:
    """Return an array under a number too."""
    return {**record, 1: record["wave"]}


def as_float32(record: dict, rng: np.random.Generator) -> dict:
    """Convert all arrays."""
    return {name: array.astype(np.float32) for name, array in record.items()}


def growing(record: dict, rng: np.random.Generator) -> dict:
    """Return arrays of any length."""
    return {"wave": record["wave"][:, : 4 + int(rng.integers(100))]}
