"""Scores of fakes against the reals that they were made from: in a run, of its folder, on other data, with --follow."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from advice import Case, change
from fake_records import write_recordings
from paragan.core.jsonl import read_jsonl
from paragan.data.dataset import load_data
from paragan.models.model import load_model
from processes import run_cli, usage_error

TOKENIZER = [
    *("train", "custom", "--nets=vq-autoencoder", "--nets.width=4", "--nets.codes=8", "--nets.d_width=4"),
    *("--nets.d_layers=1", "--nets.downsample=1", "--objective=reconstruction", "--data=digits"),
    *("--data.resolution=8", "--batch=16", "--lanes=2", "--kimg=0.032", "--evaluation.count=40"),
    *("--device.threads=1", "--device.precision=float32"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paired") / "run"
    ended = run_cli(*TOKENIZER, "--evaluation.metrics=[psnr,fd]", f"--run-dir={folder}")
    assert ended.status == 0, ended.err
    return folder


def measured(folder) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in read_jsonl(folder / "metrics.jsonl"):
        values.setdefault(str(row["name"]), []).append(row["value"])
    return values


@torch.no_grad()
def psnr_of_rows(folder, images: np.ndarray, count: int) -> float:
    """PSNR by hand: images [N, H, W, 1] to G one by one, and back."""
    g = load_model(folder, dataset=load_data("digits", resolution=8)).sampler.g
    values = []
    for image in images[:count]:
        real = torch.from_numpy(image)[None].permute(0, 3, 1, 2).float()
        fake = ((g(real / 127.5 - 1, None).images + 1) * 127.5).round().clamp(0, 255)
        values.append(10 * torch.log10(255**2 / (fake - real).double().square().mean()))
    return float(torch.stack(values).mean())


def test_a_run_is_scored_on_its_pairs(tokenizer):
    values = measured(tokenizer)
    images = load_data("digits", resolution=8).images
    assert values["psnr"][0] == pytest.approx(psnr_of_rows(tokenizer, images, 40), rel=1e-3)
    assert "psnr, higher is better" in (tokenizer / "report.html").read_text()
    best = (tokenizer / "best" / "config.json").read_text()
    assert '"psnr"' in best


def test_a_run_logs_how_its_codebook_is_used(tokenizer):
    rows = read_jsonl(tokenizer / "stats.jsonl")
    assert all(0 < row["Codebook/use"] <= 1 <= row["Codebook/perplexity"] <= 8.001 for row in rows)


def test_other_data_give_inputs_and_reals(tokenizer, tmp_path):
    other = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "other.npz", images=other)
    ended = run_cli("eval", tokenizer, "--data", tmp_path / "other.npz", "--metrics=psnr", "--count=30")
    assert ended.status == 0, ended.err
    assert measured(tokenizer)["psnr"][-1] == pytest.approx(psnr_of_rows(tokenizer, other, 30), rel=1e-3)


def test_a_model_folder_is_scored_without_its_features(tokenizer, tmp_path):
    ended = run_cli("eval", tokenizer / "model", "--data=digits", "--metrics=psnr", "--count=40")
    assert ended.status == 0, ended.err
    assert measured(tokenizer / "model")["psnr"] == measured(tokenizer)["psnr"][:1]


def test_models_are_scored_while_they_appear(tmp_path):
    folder = tmp_path / "run"
    assert run_cli(*TOKENIZER, "--evaluation.metrics=[]", f"--run-dir={folder}").status == 0
    assert run_cli("eval", folder, "--follow", "--metrics=psnr", "--count=40").status == 0
    assert len(measured(folder)["psnr"]) == 1


LATENTS = "train digits --nets.width=4 --kimg=0.016 --batch=16 --evaluation.count=40 --evaluation.metrics=[psnr] -n"
CASES = [
    Case(
        LATENTS,
        "metrics=psnr: compares each fake with the real that it was made from, and G is not given reals "
        "(conditioning_input), or there is a G for each label. Use fd, kid or prdc",
        ("~evaluation.metrics --evaluation.metrics=[fd,kid,prdc]",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.advice[:12])
def test_games_without_pairs_are_refused(case):
    assert case.advice in usage_error(*case.arguments.split())
    for follow in case.follow:
        assert run_cli(*change(case.arguments.split(), follow)).status == 0


def test_a_folder_without_pairs_is_refused(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")  # --follow writes a lock into it
    assert "metrics=psnr: compares each fake" in usage_error("eval", folder, "--metrics=psnr", "--count=40")
    assert "metrics=psnr: compares each fake" in usage_error("eval", folder, "--follow", "--metrics=psnr")


def test_waves_have_distances_of_their_spectrograms(tmp_path):
    recordings = write_recordings(tmp_path / "recordings")
    folder = tmp_path / "run"
    ended = run_cli(
        *("train", "custom", "--nets=hifigan", "--nets.width=8", "--nets.mels=8", "--nets.d_width=4"),
        *("--nets.resolution_width=4", "--nets.periods=[2]", "--objective=reconstruction", f"--data={recordings}"),
        *("--data.segment=512", "--batch=4", "--lanes=2", "--kimg=0.004", "--evaluation.count=12"),
        *("--evaluation.metrics=[log_mel,stft]", "--device.threads=1", f"--run-dir={folder}"),
    )
    assert ended.status == 0, ended.err
    other = write_recordings(tmp_path / "other", count=5)
    ended = run_cli("eval", folder, f"--data={other}", "--metrics=stft,log_mel", "--count=5")
    assert ended.status == 0, ended.err
    values = measured(folder)
    assert [len(values[name]) for name in ("log_mel", "stft")] == [2, 2]
    assert values["stft"][0] != values["stft"][1]
    assert "metrics=psnr: is of images" in usage_error("eval", folder, "--metrics=psnr")
