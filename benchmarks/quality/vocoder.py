"""Train `vocoder` on spoken digits, and score it on recordings that it has not seen.

    python -m benchmarks.quality.vocoder --recordings recordings.zip [--kimg N] [--json F] [--picture PNG]

The recordings are those of the Free Spoken Digit Dataset (DIGIT_speaker_NN.wav, 8 kHz, CC BY-SA 4.0); as its authors
suggest, numbers 0 to 4 of every digit and speaker are held out: 300 recordings. Each of these is reduced to its
logarithmic mel spectrogram, and made a wave again by G. Scores, means over recordings: the distance of the logarithmic
mel spectrograms (`log_mel`), the multi-resolution STFT distance (`stft`), and the share that a classifier of digits
recognises. The classifier is a small convolutional network on logarithmic mel spectrograms, trained on the real
recordings that are not held out. Of real held-out recordings it recognises the share in the row "real". Griffin and
Lim's algorithm (1984, 32 iterations), which needs no training, is a row of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import paragan as pg
from benchmarks.lib.timing import describe_machine, format_table, save_json
from benchmarks.quality.quality import run_paragan
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.core.schema import from_dict, read_yaml
from paragan.core.spectrograms import MelConfig, log_mel, mel_filters, stft_distance
from paragan.core.wav_files import encode_wav
from paragan.data.records.audio import decode_audio

MEL = MelConfig()
RESOLUTIONS = ((512, 128), (256, 64), (128, 32))
HELD_OUT = 5  # recordings of every digit and speaker
FRAMES = 96  # that the classifier sees: 0.77 s
EPOCHS, BATCH = 30, 64
PICTURED = 10  # recordings: one of every digit
SILENCE = float(np.log(1e-5))
Recordings = list[tuple[str, Tensor]]  # name, wave [1, T]


def read_recordings(path: Path) -> tuple[Recordings, Recordings]:
    """Return the recordings to train on, and those that are held out."""
    training: Recordings = []
    held_out: Recordings = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".wav"):
                continue
            samples = torch.tensor(decode_audio(archive.read(name)).samples).float() / 32768
            number = int(Path(name).stem.split("_")[2])
            (held_out if number < HELD_OUT else training).append((Path(name).name, samples))
    return training, held_out


def write_recordings(recordings: Recordings, folder: Path) -> Path:
    """Write waves as 16-bit WAV files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in recordings:
        (folder / name).write_bytes(encode_wav(samples.numpy(), MEL.sample_rate))
    return folder


# The classifier -------------------------------------------------------------------------------------------


def padded_mel(samples: Tensor) -> Tensor:
    """Return the logarithmic mel spectrogram [mels, frames] of a wave [1, T] padded to whole frames."""
    size = max(MEL.n_fft, -(-samples.shape[1] // MEL.hop) * MEL.hop)
    return log_mel(F.pad(samples, (0, size - samples.shape[1]))[None], MEL)[0]


def classifier_input(samples: Tensor) -> Tensor:
    """Return the spectrogram [1, mels, FRAMES] of the middle of a wave, padded with silence."""
    mel = padded_mel(samples)
    missing = FRAMES - mel.shape[1]
    if missing < 0:
        mel = mel[:, -missing // 2 :][:, :FRAMES]
    else:
        mel = F.pad(mel, (missing // 2, missing - missing // 2), value=SILENCE)
    return (mel[None] + 5) / 3


def make_classifier() -> nn.Module:
    """Return an untrained classifier: [N, 1, mels, FRAMES] -> logits [N, 10]."""
    widths = (1, 16, 32, 64)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 5, 2, padding=2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10))


def train_classifier(recordings: Recordings) -> nn.Module:
    """Train a classifier of the digits, on spectrograms that are shifted by up to 8 frames and 4 filters."""
    torch.manual_seed(0)
    x = torch.stack([classifier_input(samples) for _, samples in recordings])
    y = torch.tensor([int(name[0]) for name, _ in recordings])
    net = make_classifier()
    steps = EPOCHS * len(x) // BATCH
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        shifts = int(torch.randint(-4, 5, ())), int(torch.randint(-8, 9, ()))
        loss = F.cross_entropy(net(x[rows].roll(shifts, (2, 3))), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


# Scores ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(made: Recordings, real: Recordings, classifier: nn.Module) -> dict[str, float]:
    """Score waves by the real ones that they were made of."""
    mel, stft, recognised = [], [], []
    for (name, x), (_, target) in zip(made, real, strict=True):
        mel.append(float((padded_mel(x) - padded_mel(target)).abs().mean()))
        stft.append(float(stft_distance(x[None], target[None], RESOLUTIONS)))
        recognised.append(int(classifier(classifier_input(x)[None]).argmax()) == int(name[0]))
    return {"log_mel": np.mean(mel).item(), "stft": np.mean(stft).item(), "recognised": np.mean(recognised).item()}


def vocode(mel_to_wave: Callable[[Tensor], Tensor], recordings: Recordings) -> Recordings:
    """Make waves of the spectrograms of recordings."""
    with torch.no_grad():
        return [(name, mel_to_wave(padded_mel(x)[None])[0, :, : x.shape[1]]) for name, x in recordings]


def load_generator(folder: Path) -> nn.Module:
    """Return the averaged G of a run."""
    options = from_dict(Run, read_yaml(folder / "run.yaml")).data
    return pg.load(folder, dataset=load_dataset(options)).sampler.g.eval()


def griffin_lim(mel: Tensor, iterations: int = 32) -> Tensor:
    """Return waves [1, 1, T] of logarithmic mel spectrograms [1, mels, frames], with random first phases."""
    filters = mel_filters(MEL).float()
    magnitude = (torch.linalg.pinv(filters) @ mel[0].exp()).clamp(min=0)
    window, before = torch.hann_window(MEL.n_fft), (MEL.n_fft - MEL.hop) // 2
    spectrum = magnitude * torch.exp(2j * torch.pi * torch.rand(magnitude.shape, generator=torch.manual_seed(0)))
    length = (mel.shape[2] - 1) * MEL.hop + MEL.n_fft
    options: dict[str, Any] = {"n_fft": MEL.n_fft, "hop_length": MEL.hop, "window": window}
    for _ in range(iterations):
        x = _overlap_add(spectrum, window, length)
        frames = torch.stft(x, center=False, return_complex=True, **options)
        spectrum = magnitude * torch.exp(1j * frames.angle())
    return _overlap_add(spectrum, window, length)[None, None, before : before + mel.shape[2] * MEL.hop]


def _overlap_add(spectrum: Tensor, window: Tensor, length: int) -> Tensor:
    """Return the wave [length] whose spectrogram is nearest (Griffin and Lim, eq. 6)."""
    frames = torch.fft.irfft(spectrum, MEL.n_fft, dim=0) * window[:, None]
    weight = (window**2)[:, None].expand_as(frames)
    x, total = (
        F.fold(part[None], (1, length), (1, MEL.n_fft), stride=(1, MEL.hop)).flatten() for part in (frames, weight)
    )
    return x / total.clamp(min=1e-3)


def save_picture(rows: Sequence[Recordings], path: Path) -> None:
    """Save the logarithmic mel spectrograms of recordings, low frequencies below: a row for each of `rows`."""
    lines = [torch.cat([classifier_input(samples)[0].flip(0) for _, samples in row], 1) for row in rows]
    values = torch.cat(lines)
    low = values.quantile(0.3)
    pixels = ((values - low) / (values.max() - low)).clamp(0, 1).mul(255).to(torch.uint8)
    image = Image.fromarray(pixels.numpy())
    image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True, metavar="ZIP")
    parser.add_argument("--kimg", type=float, help="length of training (default: that of the recipe)")
    parser.add_argument("--settings", nargs="*", default=[], help="more settings, such as device.kind=cuda")
    parser.add_argument("--runs", type=Path, default=Path("runs/vocoder"), metavar="DIR")
    parser.add_argument("--json", metavar="F")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="spectrograms: real, Griffin-Lim, vocoder")
    options = parser.parse_args(arguments)
    training, held_out = read_recordings(options.recordings)
    data, folder = write_recordings(training, options.runs / "training"), options.runs / "vocoder"
    if not (folder / "report.html").exists():
        length = [f"--kimg={options.kimg:g}"] if options.kimg else []
        more = [f"--{setting}" for setting in options.settings]
        run_paragan("train", "vocoder", f"--data={data}", *length, *more, f"--run-dir={folder}")
    stats = json.loads((folder / "stats.jsonl").read_text().splitlines()[-1])
    classifier = train_classifier(training)
    g = load_generator(folder)
    made, inverted = vocode(lambda mel: g(mel, None), held_out), vocode(griffin_lim, held_out)
    write_recordings(held_out, options.runs / "real")
    write_recordings(made, options.runs / "vocoded")
    if options.picture:
        save_picture([side[:: len(held_out) // PICTURED] for side in (held_out, inverted, made)], options.picture)
    rows = {
        "real": score(held_out, held_out, classifier),
        "Griffin-Lim": score(inverted, held_out, classifier),
        "vocoder": score(made, held_out, classifier),
    }
    names = list(rows["real"])
    print(format_table(["", *names], [[name, *(f"{row[key]:.4f}" for key in names)] for name, row in rows.items()]))
    if options.json:
        progress = {"kimg": stats["Progress/kimg"], "train_s": stats["Timing/total_s"]}
        save_json(options.json, {"machine": describe_machine(), "settings": options.settings, **progress, "rows": rows})


if __name__ == "__main__":
    main()
