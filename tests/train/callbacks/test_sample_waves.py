"""Runs on waves: what they write to listen to, and what is made of their models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fake_records import RATE, noise, wav_bytes
from paragan.cli.main import main
from paragan.core.jsonl import read_jsonl
from paragan.core.wav_files import Wave, read_wav
from paragan.data.dataset import from_arrays, load_data
from paragan.data.records.decoder import RecordOptions
from paragan.models.model import load_model
from paragan.models.sampler import DataSource, LabelPrior, Sampler, to_float32
from paragan.train.callbacks.sample_images import draw_fakes, write_wave_pairs

SEGMENT = 64
TINY = (
    *("--nets=hifigan", "--nets.width=4", "--nets.d_width=2", "--nets.resolution_width=2", "--nets.mels=4"),
    *("--nets.n_fft=32", "--nets.upsample_rates=[4,4]", "--nets.periods=[2]", "--nets.resolutions=[[32,8]]"),
    *("--objective=reconstruction", f"--data.segment={SEGMENT}", "--batch=8", "--kimg=0.016", "--device.threads=1"),
    *("--evaluation.metrics=fd", "--evaluation.count=8", "--device.precision=float32"),
)


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of 12 sine waves."""
    folder = tmp_path_factory.mktemp("tones") / "data"
    folder.mkdir()
    for number in range(12):
        wave = 12000 * np.sin(np.arange(SEGMENT) * (number + 1) / 20 + 0.1)
        (folder / f"{number:02d}.wav").write_bytes(wav_bytes(wave))
    return folder


@pytest.fixture(scope="module")
def vocoder_run(tones: Path) -> Path:
    """A finished run of a tiny vocoder."""
    folder = tones.parent / "run"
    assert main(["train", "custom", f"--data={tones}", f"--run-dir={folder}", *TINY]) == 0
    return folder


class HalfInput(nn.Module):
    """A G that halves its input."""

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x / 2


def read(path: Path) -> Wave:
    wave = read_wav(path, 10_000)
    assert wave
    assert wave.sample_rate == RATE
    return wave


def test_a_run_writes_generated_waves_beside_real_ones(vocoder_run, tones):
    folder = vocoder_run / "samples" / "000000kimg"
    names = [f"{number}_{side}.wav" for number in range(4) for side in ("generated", "real")]
    assert sorted(path.name for path in folder.iterdir()) == names
    dataset = load_data(str(tones), resolution=None, records=RecordOptions(segment=SEGMENT))
    generated = load_model(vocoder_run, dataset=dataset).sampler.images(range(12), None)
    for number in range(4):
        record = 3 * number  # of all parts of the data
        assert np.array_equal(read(folder / f"{number}_real.wav").samples, dataset.images[record])
        expected = generated[record].clip(-1, 32767 / 32768)
        np.testing.assert_allclose(read(folder / f"{number}_generated.wav").samples, expected, atol=1e-4)
    page = (vocoder_run / "report.html").read_text("utf-8")
    assert len(re.findall(r'<audio controls src="data:audio/wav;base64,', page)) == 8


def test_a_generated_wave_is_made_from_the_real_one_of_its_number(tones, tmp_path):
    dataset = load_data(str(tones), resolution=None)
    source = DataSource(dataset, lambda real: real.images / 2)
    sampler = Sampler(HalfInput(), source, LabelPrior(()), to_output=to_float32)
    write_wave_pairs(sampler, dataset, tmp_path, 1200)
    folder = tmp_path / "samples" / "001200kimg"
    for number in range(4):
        generated, real = (read(folder / f"{number}_{side}.wav").samples for side in ("generated", "real"))
        np.testing.assert_allclose(generated, real / 4, atol=1 / 32768)
        assert np.array_equal(real, dataset.images[3 * number])


@pytest.mark.parametrize("model", [".", "model", "model/model.safetensors"])
def test_waves_are_sampled_from_the_data_of_the_run(model, vocoder_run, tmp_path, capsys):
    assert main(["sample", str(vocoder_run / model), "--count=3", f"--out={tmp_path}/waves"]) == 0
    assert f"3 waves, 8000 Hz, in {tmp_path}/waves" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "waves").iterdir()) == [f"00000{i}.wav" for i in range(3)]
    first = read(vocoder_run / "samples" / "000000kimg" / "0_generated.wav").samples
    np.testing.assert_allclose(read(tmp_path / "waves" / "000000.wav").samples, first, atol=1e-4)


def test_waves_are_sampled_from_other_data(vocoder_run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.wav").write_bytes(wav_bytes(noise(SEGMENT)))
    out = ("--count=1", f"--out={tmp_path}/samples.npz")
    assert main(["sample", str(vocoder_run), f"--data={tmp_path}/other", *out]) == 0
    assert np.load(tmp_path / "samples.npz")["x"].shape == (1, 1, SEGMENT)
    assert main(["sample", str(vocoder_run), "--count=1", f"--out={tmp_path}/picture.png"]) == 0


@pytest.fixture(scope="module")
def named_run(tones: Path) -> Path:
    """A finished run whose G makes waves from latents and returns a NamedTuple."""
    folder = tones.parent / "named"
    options = ("--batch=8", "--kimg=0.016", "--evaluation.metrics=fd", "--evaluation.count=8", "--device.threads=1")
    data = f"--data={tones}"
    assert main(["train", "custom", "--nets=named_waves:Nets", data, f"--run-dir={folder}", *options]) == 0
    return folder


def test_a_named_wave_is_scored_sampled_and_exported(named_run, tmp_path, capsys):
    (row,) = read_jsonl(named_run / "metrics.jsonl")
    assert row["name"] == "fd_values"
    assert np.isfinite(row["value"])
    nets = "--nets=named_waves:Nets"
    assert main(["sample", str(named_run), nets, "--count=2", f"--out={tmp_path}/waves"]) == 0
    graph_file = tmp_path / "g.pt2"
    assert main(["export", str(named_run), nets, "--format=torch-export", f"--out={graph_file}"]) == 0
    model = load_model(named_run, nets="named_waves:Nets")
    waves = model.sample(2)
    assert waves.shape == (2, 1, SEGMENT)
    for number in range(2):
        np.testing.assert_allclose(read(tmp_path / "waves" / f"00000{number}.wav").samples, waves[number], atol=1e-4)
    z = torch.randn(2, 3)
    torch.testing.assert_close(torch.export.load(graph_file).module()(z), model.g(z, None).wave)


def test_waves_without_a_rate_are_not_written(named_run, tones, tmp_path):
    model = load_model(named_run, nets="named_waves:Nets")
    dataset = load_data(str(tones), resolution=None)
    without_rate = from_arrays({"wave": dataset.images[:]})
    for name, data in (("audio", dataset), ("arrays", without_rate)):
        (tmp_path / name).mkdir()
        draw_fakes(model.sampler, None, data, None, tmp_path / name, 7)
    assert len(list((tmp_path / "audio" / "samples" / "000007kimg").iterdir())) == 8
    assert [path.name for path in (tmp_path / "arrays").iterdir()] == ["fakes000007.png"]
