"""Runs of a diffusion model and of its distillation, by command line."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from advice import advises
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.jsonl import read_jsonl
from paragan.models.diffusion_teacher import load_denoiser
from paragan.models.model import load_model
from paragan.nets import Spec
from paragan.nets.denoiser import Denoiser
from paragan.recipes import get_recipe
from processes import run_cli, train_tiny

NETS = ("--nets.widths=[8,8]", "--nets.blocks=1")
LENGTH = ("--kimg=0.128", "--batch=16", "--lanes=2", "--output.tick_kimg=0.016")
EVALUATION = ("--evaluation.metrics=[fd]", "--evaluation.count=16", "--device.threads=1", "--device.precision=float32")
COMMON = (*LENGTH, *EVALUATION, "--data=digits", "--output.fakes_kimg=0.064")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion") / "teacher"
    result = run_cli("train", "diffusion", *COMMON, *NETS, "--nets.steps=2", f"--run-dir={folder}")
    assert result.status == 0, result.err
    return folder


def test_a_diffusion_model_is_a_model_like_others(teacher, tmp_path):
    rows = read_jsonl(teacher / "stats.jsonl")
    assert [row["Progress/step"] for row in rows] == list(range(1, 9))
    assert all(row["Loss/G/denoising"] > 0 for row in rows)
    assert list(read_jsonl(teacher / "metrics.jsonl"))
    model = load_model(teacher)
    assert isinstance(model.sampler.g, Denoiser)
    assert model.sampler.g.sigmas == pytest.approx([80, 0.002, 0])
    assert model.sample(3).shape == (3, 8, 8, 1)
    result = run_cli("sample", str(teacher), "--count=2", f"--out={tmp_path / 'grid.png'}")
    assert result.status == 0, result.err


def test_students_start_as_their_teacher_and_take_one_evaluation(teacher, tmp_path):
    folder = tmp_path / "student"
    result = run_cli("train", "distill", *COMMON, f"--teacher={teacher}", "--d_steps=1", f"--run-dir={folder}")
    assert result.status == 0, result.err
    assert "networks: those of the teacher" in (folder / "run.yaml").read_text()
    model = load_model(folder)
    assert model.sampler.g.sigmas == pytest.approx([80, 0])
    denoiser, _ = load_denoiser(teacher)
    change = [(a - b).abs().max() for a, b in zip(model.sampler.g.parameters(), denoiser.parameters(), strict=True)]
    assert 0 < max(change) < 0.05  # of eight small steps
    rows = read_jsonl(folder / "stats.jsonl")
    assert {"Loss/G/matching", "Loss/G/adversarial", "Loss/D/denoising", "Loss/D/adversarial"} <= rows[-1].keys()
    checkpoint = sorted((folder / "checkpoints").glob("*"))[-1]
    files = [safetensors.torch.load_file(file) for file in checkpoint.glob("*.safetensors")]
    assert not [name for tensors in files for name in tensors if "teacher" in name]


@pytest.mark.slow
def test_a_distillation_resumes_bit_for_bit(teacher, tmp_path):
    def train(name, *more):
        folder = tmp_path / name
        result = run_cli("train", "distill", *COMMON, f"--teacher={teacher}", f"--run-dir={folder}", *more)
        assert result.status == 0, result.err
        return folder

    whole = train("whole")
    train("parts", "--kimg=0.064")
    parts = train("parts")
    a, b = (safetensors.torch.load_file(folder / "model" / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_refused(teacher, tmp_path):
    def train(*arguments):
        return run_cli("train", *arguments, *LENGTH, *EVALUATION, f"--run-dir={tmp_path / 'refused'}")

    other = train_tiny(tmp_path / "other", "--kimg=0.032")
    for arguments, message in (
        (("distill", "--data=digits"), "distill needs --teacher MODEL: a run of `paragan train diffusion`"),
        (("distill", "--data=digits", f"--teacher={other}"), "is no diffusion model"),
        (("distill", "--data=digits", "--data.labels=false", f"--teacher={teacher}"), "classes 10"),
        (("diffusion", "--data=digits", "--strategy=async"), "Use --strategy=sync"),
        (("digits", "--nets=edm"), "Use --objective=denoising"),
    ):
        result = train(*arguments)
        assert result.status == 2, arguments
        assert message in result.err
        assert result.err.count("\n") == 1
    assert not (tmp_path / "refused").exists()


def test_advice_is_followed(teacher, tmp_path):
    other = train_tiny(tmp_path / "other", "--kimg=0.032")
    with advises(
        "is no diffusion model. Use a run of `paragan train diffusion`, or the folder of a diffusers pipeline"
    ):
        load_denoiser(other)
    load_denoiser(teacher)
    with advises(
        f"--data.resolution: the teacher in {teacher} makes images of resolution 8, and the data have 16. Use "
        "--data.resolution=8"
    ):
        load_denoiser(teacher, Spec(16, 1, 10))
    load_denoiser(teacher, Spec(8, 1, 10))


def test_recipes_of_one_and_of_two_players():
    for name in ("diffusion", "distill"):
        assert isinstance(get_recipe(name), Run)
    with pytest.raises(UsageError):
        get_recipe("diffuson")
