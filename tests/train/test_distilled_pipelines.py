"""Distillation of `diffusers` pipelines, by command line."""

from __future__ import annotations

import shutil
import sys

import pytest
import safetensors.torch
import torch

from paragan.core.jsonl import read_jsonl
from paragan.core.schema import read_yaml
from paragan.models.diffusion_teacher import load_denoiser
from paragan.models.model import load_model
from processes import run_cli
from tiny_pipelines import edit_json, make_pipeline

COMMON = (
    *("train", "distill", "--kimg=0.064", "--batch=16", "--lanes=2", "--d_steps=1", "--output.tick_kimg=0.016"),
    *("--evaluation.metrics=[fd]", "--evaluation.count=16", "--device.threads=1", "--data=digits"),
)


def train(folder, teacher, *more):
    result = run_cli(*COMMON, f"--teacher={teacher}", f"--run-dir={folder}", *more)
    assert result.status == 0, result.err
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "teacher"
    make_pipeline(folder)
    return folder


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    return train(tmp_path_factory.mktemp("pipeline") / "student", teacher)


def test_students_start_as_the_pipeline_and_take_one_evaluation(teacher, student):
    record = read_yaml(student / "run.yaml")
    assert record["device"]["precision"] == "float32"  # the error of an epsilon grows with sigma
    assert record["fingerprints"]["distill_from"]
    model = load_model(student)
    assert model.sampler.g.sigmas == pytest.approx([15, 0])
    denoiser, _ = load_denoiser(teacher)
    change = [(a - b).abs().max() for a, b in zip(model.sampler.g.parameters(), denoiser.parameters(), strict=True)]
    assert 0 < max(change) < 0.05  # of four small steps
    rows = read_jsonl(student / "stats.jsonl")
    assert {"Loss/G/matching", "Loss/G/adversarial", "Loss/D/denoising", "Loss/D/adversarial"} <= rows[-1].keys()


def test_models_are_sampled_and_scored_without_the_folder(student, tmp_path, monkeypatch):
    copied = shutil.copytree(student / "model", tmp_path / "model")
    for name in ("sample", "eval"):
        more = [f"--out={tmp_path / 'grid.png'}"] if name == "sample" else ["--metrics=fd", "--data=digits"]
        result = run_cli(name, str(copied), "--count=4", *more)
        assert result.status == 0, result.err
    monkeypatch.setitem(sys.modules, "diffusers", None)
    result = run_cli("sample", str(copied), "--count=4", f"--out={tmp_path / 'grid.png'}")
    assert result.status == 2
    assert "needs the package diffusers: pip install diffusers" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_from_its_record(teacher, student, tmp_path):
    parts = train(tmp_path / "parts", teacher, "--kimg=0.032")
    moved = shutil.copytree(teacher, tmp_path / "moved")
    train(parts, moved)
    a, b = (safetensors.torch.load_file(folder / "model" / "model.safetensors") for folder in (student, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    again = run_cli("train", str(student / "run.yaml"), f"--run-dir={tmp_path / 'again'}", "-n")
    assert again.status == 0, again.err
    assert "name: diffusers-unet" in again.out
    assert "# 4 rounds; G has 18,841 parameters" in again.out


def test_a_teacher_that_changed_is_refused(teacher, student, tmp_path):
    other = tmp_path / "other"
    make_pipeline(other)
    file = other / "unet" / "diffusion_pytorch_model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["conv_in.bias"] += 1
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    result = run_cli(*COMMON, f"--teacher={other}", f"--run-dir={student}", "--kimg=0.096")
    assert result.status == 2
    assert "holds another run: distill_from was" in result.err


def test_refusals_are_one_line_and_leave_no_folder(teacher, tmp_path):
    text = shutil.copytree(teacher, tmp_path / "text")
    edit_json(text / "model_index.json", lambda index: index.update(text_encoder=["transformers", "CLIPTextModel"]))
    for arguments, message in (
        ((f"--teacher={text}",), "is conditioned on text (text_encoder, UNet2DModel)"),
        ((f"--teacher={teacher}", "--data.labels=false"), "classes 10"),
        ((f"--teacher={teacher}", "--data.resolution=16"), "Use --data.resolution=8"),
        ((f"--teacher={teacher}", "--data.channels=3"), "Use --data.channels=1"),
    ):
        result = run_cli(*COMMON, *arguments, f"--run-dir={tmp_path / 'refused'}")
        assert result.status == 2, arguments
        assert message in result.err
        assert result.err.count("\n") == 1
    assert not (tmp_path / "refused").exists()


def test_an_unconditional_pipeline_of_velocities(tmp_path):
    make_pipeline(tmp_path / "teacher", "v_prediction", "squaredcos_cap_v2", num_class_embeds=None)
    folder = train(tmp_path / "student", tmp_path / "teacher", "--data.labels=false", "--kimg=0.016")
    model = load_model(folder)
    assert model.sampler.g.sigmas == pytest.approx([80, 0])
    assert model.config["net"]["scheduler"]["beta_schedule"] == "squaredcos_cap_v2"
    assert model.sample(3).shape == (3, 8, 8, 1)
