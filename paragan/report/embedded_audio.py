"""The newest waves of a run as data URIs, each with a spectrogram, within a limit of characters.

RUN/samples/000120kimg/0_generated.wav, 0_real.wav, ...    written by train/callbacks/sample_images.py
"""

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paragan.core.wav_files import Wave, encode_wav, read_wav
from paragan.report.embedded_images import EmbeddedImage, embed_png

WAVES_DIR = "samples"
GENERATED = "generated"
REAL = "real"
MAX_PAIRS = 4
MAX_SPECTROGRAM_CHARS = 40_000  # of a page, for one picture
MAX_FRAMES = 400  # columns of a spectrogram
MEL_BANDS = 64  # rows of a spectrogram
WINDOW_S = 0.032  # of a spectrogram
WAV_HEADER_BYTES = 44
MAX_DYNAMIC_RANGE = 8.0  # of a spectrogram, natural logarithm: 69 dB; what is fainter is black


@dataclass(frozen=True)
class EmbeddedWave:
    """A wave as a data URI."""

    name: str  # of the file
    seconds: float
    uri: str
    spectrogram: EmbeddedImage | None


@dataclass(frozen=True)
class WavePair:
    """A generated wave, and the real one whose input G was given, or any real one if G is given none."""

    generated: EmbeddedWave
    real: EmbeddedWave | None


@dataclass(frozen=True)
class ReportAudio:
    """The newest waves of a run. `notes` are lines about what is not shown."""

    kimg: int = 0
    pairs: tuple[WavePair, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_chars(self) -> int:
        """Characters of a page that waves and spectrograms take."""
        waves = [wave for pair in self.pairs for wave in (pair.generated, pair.real) if wave]
        return sum(len(wave.uri) + (len(wave.spectrogram.uri) if wave.spectrogram else 0) for wave in waves)


def waves_dir(run_dir: Path, kimg: int) -> Path:
    """Return the folder of the waves that a run writes at `kimg`."""
    return run_dir / WAVES_DIR / f"{kimg:06d}kimg"


def wave_name(index: int, side: str) -> str:
    """Return the name of the file of a wave.

    Args:
        index: of the sample.
        side: GENERATED or REAL.
    """
    return f"{index}_{side}.wav"


def load_audio(run_dir: Path, max_chars: int) -> ReportAudio:
    """Embed the newest waves of a run folder, in at most `max_chars` characters of page.

    Long waves are cut. A folder without a complete generated wave is passed over.
    """
    for kimg, folder in reversed(_find_wave_dirs(run_dir)):
        names = {path.name for path in folder.iterdir()}
        indices = [index for index in range(MAX_PAIRS) if wave_name(index, GENERATED) in names]
        if not indices:
            continue
        max_bytes = (max_chars // (2 * len(indices)) - MAX_SPECTROGRAM_CHARS) * 3 // 4 - WAV_HEADER_BYTES - 100
        if max_bytes <= 0:
            return ReportAudio(kimg, notes=("Its waves are in the run folder: this page has no room for them.",))
        waves = {path: wave for path in _paths(folder, indices) if (wave := read_wav(path, max_bytes))}
        pairs = tuple(_embed_pairs(folder, indices, waves))
        if pairs:
            return ReportAudio(kimg, pairs, tuple(_notes(folder, indices, names, waves)))
    return ReportAudio()


def _find_wave_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (kimg, folder) of every folder of waves, oldest first."""
    folder = run_dir / WAVES_DIR
    paths = list(folder.iterdir()) if folder.is_dir() else []
    matches = ((re.fullmatch(r"(\d{6,})kimg", path.name), path) for path in paths if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _paths(folder: Path, indices: Sequence[int]) -> list[Path]:
    return [folder / wave_name(index, side) for index in indices for side in (GENERATED, REAL)]


def _embed_pairs(folder: Path, indices: Sequence[int], waves: dict[Path, Wave]) -> Iterator[WavePair]:
    for index in indices:
        generated = folder / wave_name(index, GENERATED)
        real = folder / wave_name(index, REAL)
        if generated in waves:
            spectrograms = _draw_spectrograms({path: waves[path] for path in (generated, real) if path in waves})
            embedded = {path: _embed(path, waves[path], spectrograms[path]) for path in spectrograms}
            yield WavePair(embedded[generated], embedded.get(real))


def _notes(folder: Path, indices: Sequence[int], names: set[str], waves: dict[Path, Wave]) -> Iterator[str]:
    for path in _paths(folder, indices):
        if path not in waves and path.name in names:
            yield f"{path.name} is not a complete 16-bit WAV file and is left out."
    if any(WAV_HEADER_BYTES + 2 * wave.samples.size < path.stat().st_size for path, wave in waves.items()):
        yield "Long waves are cut here; the run folder has all of them."


def _embed(path: Path, wave: Wave, spectrogram: EmbeddedImage | None) -> EmbeddedWave:
    data = base64.b64encode(encode_wav(*wave)).decode()
    return EmbeddedWave(
        path.name, wave.samples.shape[1] / wave.sample_rate, f"data:audio/wav;base64,{data}", spectrogram
    )


def _draw_spectrograms(waves: dict[Path, Wave]) -> dict[Path, EmbeddedImage | None]:
    """Draw the spectrograms of a pair in the same greys; None for waves shorter than a window."""
    levels = {path: _log_mel(wave) for path, wave in waves.items()}
    top = max((float(level.max()) for level in levels.values() if level is not None), default=0.0)
    return {path: None if level is None else _draw_level(path.name, level, top) for path, level in levels.items()}


def _log_mel(wave: Wave) -> np.ndarray | None:
    """Return the logarithmic mel spectrogram [MEL_BANDS, frames] of the mean of all channels."""
    import torch  # slow to import, and most runs have no waves

    from paragan.core.spectrograms import MelConfig, log_mel

    n_fft = 1 << max(5, round(float(np.log2(WINDOW_S * wave.sample_rate))))
    mono = wave.samples.mean(0, keepdims=True)
    if mono.shape[1] < n_fft:
        return None
    hop = max(n_fft // 4, mono.shape[1] // MAX_FRAMES)
    config = MelConfig(wave.sample_rate, max(n_fft, hop), hop, MEL_BANDS)
    return log_mel(torch.from_numpy(mono), config)[0].numpy()


def _draw_level(name: str, level: np.ndarray, top: float) -> EmbeddedImage | None:
    grey = (255 * (1 - (top - level) / MAX_DYNAMIC_RANGE)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grey[::-1]).save(file, format="png")  # low frequencies at the bottom
    return embed_png(name, file.getvalue(), MAX_SPECTROGRAM_CHARS)
