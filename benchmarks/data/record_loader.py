"""Records per second of audio with a mel spectrogram: paragan's loader against torch's DataLoader.

    python -m benchmarks.data.record_loader --json benchmarks/results/record_loader.json

Both read the same WAV files, cut a random segment of 8,192 samples, compute a log mel spectrogram with NumPy and give
float32 batches of 16: paragan with nothing set by hand, DataLoader with two workers, whose matrix products have one
thread each. They take turns, several times, each for so many seconds after a warm-up; the ratio is the median over the
turns.

Then the recipe `vocoder` trains on the files, streamed; the result is the share of the steps' time that it waited for
data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.lib.timing import Spread, describe_machine, save_json
from benchmarks.quality.quality import run_paragan
from paragan.data.dataset import load_data
from paragan.data.lanes import LaneLoader
from paragan.data.records.decoder import RecordOptions

RATE, SEGMENT, WINDOW, HOP, MELS, BATCH = 22050, 8192, 1024, 256, 80, 16
WARM_UP_S = 5.0  # after which a waiting loader has found its workers
BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TRAINED_KIMG, TICK_KIMG = 1.0, 0.2


def mel_filters() -> np.ndarray:
    """Return triangular filters [MELS, WINDOW / 2 + 1] on the mel scale."""
    edges = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    up = (bins - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    down = (hertz[2:, None] - bins) / (hertz[2:] - hertz[1:-1])[:, None]
    return np.maximum(0, np.minimum(up, down)).astype(np.float32)


FILTERS = mel_filters()
HANN = np.hanning(WINDOW + 1)[:-1].astype(np.float32)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Return the log mel spectrogram [MELS, SEGMENT / HOP] of samples [SEGMENT] float32."""
    padded = np.pad(samples, (WINDOW - HOP) // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP] * HANN
    magnitude = np.abs(np.fft.rfft(frames, axis=1)).astype(np.float32)
    return np.log(np.maximum(FILTERS @ magnitude.T, 1e-5))


def add_mel(record: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Add the mel spectrogram: `data.transform`."""
    return {"wave": record["wave"], "mel": log_mel(record["wave"][0])}


def write_files(folder: Path, count: int) -> None:
    """Write `count` files of 2 to 6 seconds of noise."""
    rng = np.random.default_rng(0)
    for number in range(count):
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(rng.integers(-9000, 9000, int(RATE * rng.uniform(2, 6)), np.int16).tobytes())


def paragan_batches(folder: Path) -> tuple[Iterator[dict[str, Tensor]], Callable[[], object]]:
    """Return the batches of a streamed data set, and what closes it."""
    options = RecordOptions(segment=SEGMENT, transform="benchmarks.data.record_loader:add_mel")
    data = load_data(str(folder), resolution=None, cache="stream", records=options)
    lanes = LaneLoader(data.images, None, local_lanes=(0,), num_lanes=1, batch_size=BATCH, seed=0)

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            for batch in lanes.next_micro_batches():
                yield dict(batch.fields)

    return batches(), lanes.close


class _Files(Dataset[dict[str, Tensor]]):
    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.wav"))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with wave.open(str(self.paths[index])) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        start = int(torch.randint(len(samples) - SEGMENT + 1, ()))
        segment = samples[start : start + SEGMENT].astype(np.float32) / np.float32(32768)
        return {"wave": torch.from_numpy(segment[None]), "mel": torch.from_numpy(log_mel(segment))}


class _Endless(Sampler[int]):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


def dataloader_batches(folder: Path) -> tuple[Iterator[dict[str, Tensor]], Callable[[], object]]:
    """Return the batches of torch's DataLoader with two workers, and what closes it."""
    files = _Files(folder)
    with environment(dict.fromkeys(BLAS_THREADS, "1")):  # that the workers inherit
        batches: Any = iter(
            DataLoader(files, BATCH, sampler=_Endless(len(files.paths)), num_workers=2, multiprocessing_context="spawn")
        )
    return batches, batches._shutdown_workers


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(make: Callable[..., Any], folder: Path, seconds: float) -> float:
    """Return records per second after a warm-up."""
    batches, close = make(folder)
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        next(batches)
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        assert batch["mel"].shape == (BATCH, MELS, SEGMENT // HOP)
        count += BATCH
    rate = count / (time.perf_counter() - start)
    close()
    return rate


def measure_waiting(files: Path, run_dir: Path) -> dict[str, float]:
    """Train the vocoder on files that are streamed. Return its speed, and the share of time that it waits for data."""
    rate = (f"--nets.sample_rate={RATE}", f"--objective.spectrogram.sample_rate={RATE}")
    options = (f"--kimg={TRAINED_KIMG:g}", f"--output.tick_kimg={TICK_KIMG:g}", "--evaluation.metrics=[]")
    run_paragan("train", "vocoder", f"--data={files}", "--data.cache=stream", *rate, *options, f"--run-dir={run_dir}")
    ticks = [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]
    ticks = [tick for tick in ticks if tick["Progress/kimg"] > 0][1:]  # the first one starts the loader
    waiting = sum(tick["Timing/data_wait_s"] for tick in ticks) / sum(
        TICK_KIMG * t["Timing/sec_per_kimg"] for t in ticks
    )
    return {"records_per_s": float(np.median([tick["Timing/img_per_sec"] for tick in ticks])), "waiting": waiting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"paragan": [], "dataloader": []}
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "files")
        files.mkdir()
        write_files(files, options.files)
        for turn in range(options.turns):
            rates["paragan"].append(measure(paragan_batches, files, options.seconds))
            rates["dataloader"].append(measure(dataloader_batches, files, options.seconds))
            print(f"turn {turn}: " + ", ".join(f"{side} {found[-1]:,.0f} records/s" for side, found in rates.items()))
        training = measure_waiting(files, Path(name, "run"))
    ratio = Spread.from_values([ours / theirs for ours, theirs in zip(rates["paragan"], rates["dataloader"])])
    medians = {side: float(np.median(found)) for side, found in rates.items()}
    print(f"paragan / DataLoader = {ratio}; training waits {100 * training['waiting']:.2g} % of its time for data")
    result = {"records_per_s": medians, "paragan/dataloader": ratio.to_json(), "rates": rates, "training": training}
    save_json(options.json, {"machine": describe_machine(), **result})


if __name__ == "__main__":
    main()
