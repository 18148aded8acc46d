"""One generator that learns from those of all labels: an ordinary run with a teacher, and `paragan merge`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_run
from advice import Case
from paragan.core.jsonl import read_jsonl
from paragan.core.rng import CPU
from paragan.core.schema import read_yaml, to_dict
from paragan.models.model import init_per_label_model, load_model, make_model_config, save_model
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import LabelPrior
from paragan.nets import DCGAN, Spec
from paragan.train.build import make_teacher
from paragan.train.loop import play_round
from processes import TINY_RUN_ARGS, final_tensors, run_cli, train_interrupted, train_tiny, usage_error


@pytest.fixture(scope="module")
def per_label(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run per label of the digits, as far as others look into it: its generators are drawn, not trained."""
    folder = tmp_path_factory.mktemp("labels") / "run"
    images, nets, spec = tiny_run.make_dataset(), DCGAN(width=4, latent=8), Spec(8, 1, 0)
    init_per_label_model(folder / "model", Spec(8, 1, 10), LabelPrior.from_labels(images.labels, 10), images.classes)
    config = make_model_config(nets, spec, LabelPrior(()), (), kimg=0.1, batch_norm="none")
    for label in range(10):
        torch.manual_seed(label)
        g = nets.generator(spec)
        with torch.no_grad():
            for parameter in g.parameters():
                parameter += 0.2 * torch.randn_like(parameter)  # so that it makes more than grey
        save_model(label_dir(folder / "model", label), g, nets.discriminator(spec), config)
    (folder / "run.yaml").write_text(run_cli("train", *TINY_RUN_ARGS, "--strategy=per-label", "-n").out)
    return folder


def student_run(teacher: Path, *settings: str, weight: float = 10.0):
    return tiny_run.make_run(f"distill_from={teacher}", f"distill_weight={weight}", *settings)


# The objective --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_distance_to_the_teacher_shrinks(per_label):
    def distances(weight: float) -> list[float]:
        s, losses = tiny_run.make_session(student_run(per_label, weight=weight)), []
        for _ in range(4):
            for _ in range(15):
                play_round(s)
            losses.append(s.stats.tick(s.clock.images, s.clock.step)["Loss/G/distance"])
        return losses

    much, hardly = distances(100), distances(1e-6)
    assert much == sorted(much, reverse=True)
    assert much[-1] < 0.5 * hardly[-1]


def test_weight_zero_equals_a_plain_run(per_label):
    plainly = tiny_run.play_rounds(tiny_run.make_run(), 4)
    assert tiny_run.is_equal(tiny_run.play_rounds(student_run(per_label, weight=0), 4), plainly)
    assert not tiny_run.is_equal(tiny_run.play_rounds(student_run(per_label), 4), plainly)


def test_the_teacher_uses_the_generator_of_each_label(per_label):
    run = student_run(per_label)
    teacher, sampler = make_teacher(run, tiny_run.make_dataset(), CPU), load_model(per_label).sampler
    z, y = torch.randn(7, 8), torch.tensor([3, 0, 9, 3, 3, 1, 0])
    images = teacher(z, y)
    assert not images.requires_grad
    for latent, label, image in zip(z, y, images):
        torch.testing.assert_close(image, sampler.for_label(int(label)).g(latent[None], None)[0].detach())


@pytest.mark.parametrize("strategy", ["sync", "async", "gossip"])
def test_six_and_four_rounds_equal_ten(per_label, strategy, tmp_path):
    run = student_run(per_label, f"strategy={strategy}", "nets.batch_norm=true")
    saved, _ = tiny_run.save_after(run, 6, tiny_run.World.solo(), tmp_path)
    s = tiny_run.make_session(run, checkpoint_dir=saved)
    for _ in range(4):
        play_round(s)
    assert tiny_run.is_equal(tiny_run.gather_owner_state(s), tiny_run.play_rounds(run, 10))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "settings", [("strategy=sync",), ("strategy=async",), ("g_batch=32", "device.lanes_per_pass=1")]
)
def test_two_ranks_equal_one(pool, per_label, settings):
    run = student_run(per_label, *settings, "nets.batch_norm=true")
    one, two = tiny_run.play_rounds(run, 6), pool(2, lambda world: tiny_run.play_rounds(run, 6, world))[0]
    assert tiny_run.relative_distance(two, one, "G/") < 2e-4
    assert tiny_run.relative_distance(two, one, "D/") < 2e-4


# The command ----------------------------------------------------------------------------------------------


def test_merge_makes_one_model_and_compares_it(tmp_path):
    few = tiny_run.make_dataset().labels < 2
    np.savez(
        tmp_path / "two.npz", images=tiny_run.make_dataset().images[few], labels=tiny_run.make_dataset().labels[few]
    )
    per_label = train_tiny(tmp_path / "run", f"--data={tmp_path / 'two.npz'}", "--strategy=per-label", "--kimg=0.064")
    command, out = ["merge", per_label, "--kimg=0.16", "--weight=3"], per_label / "merged"
    ended = run_cli(*command)
    assert ended.status == 0, ended
    record = read_yaml(out / "run.yaml")
    assert record["distill_from"] == str(per_label)
    assert record["distill_weight"] == 3
    assert record["strategy"]["name"] == "sync"

    comparison = json.loads((out / "merge.json").read_text())
    before, after = comparison["per_label"], comparison["merged"]
    assert [one["name"] for one in (*before["scores"], *after["scores"])] == ["fd_pixels"] * 2
    assert before["scores"][0]["protocol"] == after["scores"][0]["protocol"]
    assert after["scores"][0]["value"] == read_jsonl(out / "metrics.jsonl")[-1]["value"]
    assert after["bytes"] == (out / "model/model.safetensors").stat().st_size
    assert before["bytes"] > 1.5 * after["bytes"]
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["per", "label", "merged"] in lines
    assert ["bytes", "of", "G", f"{before['bytes']:,}", f"{after['bytes']:,}"] in lines

    assert read_jsonl(out / "stats.jsonl")[-1]["Loss/G/distance"] > 0
    assert run_cli("sample", out, "--labels=0,1", "--count=8", "--out", tmp_path / "grid.png").status == 0
    assert "distill_weight was 3.0, is 2.0" in usage_error(*command[:-1], "--weight=2")
    assert run_cli("label", per_label, "1", "--retrain").status == 0
    assert "label 1 is not trained to its end" in usage_error("merge", per_label, f"--out={tmp_path / 'other'}")


def test_a_resumed_merge_equals_an_uninterrupted_one(per_label, tmp_path):
    arguments = ("--kimg=0.16", f"--distill_from={per_label}")
    stopped = train_interrupted(tmp_path / "a", 4, *arguments)
    assert run_cli("train", *TINY_RUN_ARGS, f"--run-dir={stopped}", *arguments).status == 0
    assert final_tensors(stopped) == final_tensors(train_tiny(tmp_path / "b", *arguments))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["sync", "gossip"])
def test_two_ranks_merge_and_compare(processes, per_label, tmp_path, strategy):
    out = tmp_path / "merged"
    command = ("merge", str(per_label), f"--out={out}", "--kimg=0.064", f"--strategy={strategy}")
    ranks = processes.start_ranks(2, *command)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    comparison = json.loads((out / "merge.json").read_text())
    assert comparison["merged"]["scores"][0]["value"] == read_jsonl(out / "metrics.jsonl")[-1]["value"]
    assert "per label" in ranks[0].out
    assert "per label" not in ranks[1].out


def test_the_student_may_differ_except_in_its_latent(per_label, tmp_path):
    ended = run_cli("merge", per_label, "--out", tmp_path / "m", "--kimg=0.032", "--nets.width=8", "--strategy=gossip")
    assert ended.status == 0, ended
    with_latent = ("merge", per_label, "--out", tmp_path / "l")
    assert re.search(r"--nets.latent=16: .* have 8. Use 8", usage_error(*with_latent, "--nets.latent=16"))
    assert re.search(r"--data.resolution=16: .* have 8. Use 8", usage_error(*with_latent, "--data.resolution=16"))
    assert "Use --data.labels=true" in usage_error(*with_latent, "--data.labels=false")
    assert "has several" in usage_error(*with_latent, "--strategy=per-label")
    assert not (tmp_path / "l").exists()


def test_bad_merges_raise_usage_errors(finished, per_label, tmp_path):
    assert "does not exist" in usage_error("merge", tmp_path / "nowhere")
    assert "Use a run of --strategy per-label" in usage_error("merge", finished)
    assert "this is RUN_DIR" in usage_error("merge", per_label, f"--out={per_label}")
    assert "one generator for all labels" in usage_error("train", *TINY_RUN_ARGS, f"--distill_from={finished}")
    incomplete = shutil.copytree(per_label, tmp_path / "incomplete")
    for label in (3, 7):
        shutil.rmtree(incomplete / "model" / f"{label:04d}")
    assert "no generator yet for label 3 (3), 7 (7)" in usage_error("merge", incomplete)
    assert not (incomplete / "merged").exists()


def test_distill_from_is_an_absolute_path(per_label, tmp_path, monkeypatch):
    monkeypatch.chdir(per_label.parent)
    ended = run_cli("merge", per_label.name, "-n")
    assert ended.status == 0
    assert f"distill_from: {per_label}" in ended.out
    assert not (per_label / "merged").exists()
    assert to_dict(tiny_run.make_run())["distill_from"] == ""


def test_a_student_resumes_with_its_teacher_wherever_it_lies(per_label, tmp_path, check_advice):
    first = shutil.copytree(per_label, tmp_path / "first")
    command = [*TINY_RUN_ARGS, "--kimg=0.08", f"--run-dir={tmp_path / 'run'}"]
    train_interrupted(tmp_path / "run", 2, "--kimg=0.08", f"--distill_from={first}")
    second = first.rename(tmp_path / "second")
    original = (second / "model/0003").rename(second / "original")
    shutil.copytree(second / "model/0004", second / "model/0003")
    assert "distill_from was" in usage_error("train", *command, f"--distill_from={second}")
    second.rename(first)
    check_advice(
        Case(
            shlex.join(["train", *command, f"--distill_from={first}"]),
            f"distill_from={first}: not the generators that {tmp_path / 'run'} learned from. Use those, or another "
            "--run-dir",
            ("~run-dir --run-dir=NEW/new",),
        )
    )
    shutil.rmtree(first / "model/0003")
    (first / original.name).rename(first / "model/0003")
    first.rename(second)
    assert run_cli("train", *command, f"--distill_from={second}").status == 0
