"""What could not be scored or shown is refused, or shown as it is, before anything is trained."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest

import paragan
from advice import Case, advises
from paragan.config.sections import EvaluationOptions
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, read_jsonl
from paragan.eval import classifier
from paragan.eval.metrics import METRICS
from paragan.models.model import load_model
from paragan.train.callbacks import scoring
from processes import (
    TINY_RUN_ARGS,
    final_tensors,
    list_checkpoints,
    run_cli,
    train_args,
    train_tiny,
    usage_error,
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("extra", [["--evaluation.count=3", "--evaluation.metrics=[prdc]"], ["--evaluation.count=6"]])
def test_too_few_fakes_raise_before_training(tmp_path, extra):
    line = usage_error("train", *TINY_RUN_ARGS, "--evaluation.metrics=[fd,prdc]", *extra, "--run-dir", tmp_path / "run")
    assert "at least 7 images" in line
    assert not (tmp_path / "run").exists()


def test_too_few_reals_raise_before_training(tmp_path):
    data = npz(tmp_path / "one.npz", images=np.zeros((1, 8, 8, 1), np.uint8))
    line = usage_error("train", *TINY_RUN_ARGS, "--data", data, "--run-dir", tmp_path / "run")
    assert "1 reals" in line


def one_image_a_class(folder):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    return npz(folder / "one.npz", images=images, labels=np.arange(40))


def test_classes_of_one_image_raise_before_training(tmp_path):
    command = ["train", *TINY_RUN_ARGS, "--kimg=0.032", "--data", one_image_a_class(tmp_path), "--run-dir=run"]
    assert "no class has two reals" in usage_error(*command, "--evaluation.metrics=[fd,intra_fd]", "-n")
    assert "Use fd, kid or prdc" in usage_error(*command, "--evaluation.metrics=[fd,intra_fd]")
    assert not (tmp_path / "run").exists()
    assert run_cli(*command, "--evaluation.metrics=[fd,kid,prdc]").status == 0  # as it says


def test_splits_of_one_fake_raise_before_training(tmp_path):
    command = ["train", *TINY_RUN_ARGS, "--evaluation.features=resnet20", "--run-dir=run"]
    line = usage_error(*command, "--evaluation.metrics=[is]", "--evaluation.count=19")
    assert "is is of 10 splits of at least 2 fakes. Use count=20 or more, or is1" in line
    for advice in (["--evaluation.metrics=[is]", "--evaluation.count=20"], ["--evaluation.metrics=[is1]"]):
        assert run_cli(*command, *advice, "-n").status == 0


def test_a_reference_of_other_images_raises_before_training(tmp_path):
    stats = tmp_path / "stats.npz"
    np.savez(stats, mu=np.zeros(64), sigma=np.eye(64), count=100, image=np.array([4, 4, 4]))
    command = ["train", *TINY_RUN_ARGS, f"--evaluation.reference={stats}", "--run-dir=run", "-n"]
    line = usage_error(*command)
    assert f"evaluation.reference={stats}: is of images [4, 4, 4], and the others are [1, 8, 8]. Use `paragan" in line
    advised = line.split("`")[1]
    assert run_cli(*advised.replace("PATH", "digits").split()[1:]).status == 0
    assert run_cli(*command).status == 0


def test_one_failed_score_leaves_the_others_and_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "check_class_counts", lambda *_: None)
    run = tmp_path / "run"
    command = ["train", *TINY_RUN_ARGS, "--kimg=0.032", "--data", one_image_a_class(tmp_path), f"--run-dir={run}"]
    ended = run_cli(*command, "--evaluation.metrics=[intra_fd,fd]", "--evaluation.count=16")
    assert ended.status == 0, ended.err
    assert "intra_fd_pixels could not be computed: no class has two reals" in ended.out
    intra, fd = read_jsonl(run / "metrics.jsonl")
    assert (intra["value"], fd["name"]) == (None, "fd_pixels")
    assert "could not be computed: no class has two reals" in (run / "report.html").read_text()
    ended = run_cli("eval", run, "--metrics=kid,intra_fd", "--count=16")
    assert ended.status == 1
    assert "intra_fd_pixels could not be computed" in ended.err
    assert read_jsonl(run / "metrics.jsonl")[2]["name"] == "kid_pixels"
    assert "no class has two reals" in usage_error("eval", run, "--metrics=intra_fd", "--count=16")


def test_fakes_that_cannot_be_scored_leave_the_report(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise UsageError("space=pixels: returned features that are not finite")

    monkeypatch.setattr(scoring, "score", fail)
    ended = run_cli("train", *TINY_RUN_ARGS, "--kimg=0.032", "--run-dir=run")
    assert ended.status == 0
    assert "could not be scored: space=pixels" in ended.out
    assert (tmp_path / "run/report.html").exists()


def test_a_class_without_images_is_not_sampled(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    data = npz(tmp_path / "e.npz", images=images, labels=np.arange(40) % 2, classes=np.array(["a", "b", "c"]))
    ended = run_cli("train", *TINY_RUN_ARGS, "--data", data, "--kimg=0.032", "--run-dir", tmp_path / "run")
    assert ended.status == 0, ended.err
    assert (tmp_path / "run" / "reals.png").exists()


def test_a_finished_run_is_scored_by_metrics_added_later(tmp_path):
    arguments = ["train", *TINY_RUN_ARGS, "--kimg=0.032", "--run-dir", tmp_path / "run"]
    assert run_cli(*arguments).status == 0
    assert run_cli(*arguments, "--evaluation.metrics=[fd,kid]").status == 0
    names = [row["name"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert names == ["fd_pixels", "kid_pixels"]


@pytest.fixture
def digits(finished, tmp_path):
    """A copy of a finished run, to be scored."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_a_truncation_sweep_prints_a_table(digits):
    ended = run_cli("eval", digits, "--truncation=1,0.5", "--metrics=fd", "--count=32")
    assert ended.status == 0, ended.err
    *_, heading, low, high = ended.out.splitlines()
    assert heading.split() == ["truncation", "fd_pixels"]
    assert [line.split()[0] for line in (low, high)] == ["0.5", "1"]
    rows = read_jsonl(digits / "metrics.jsonl")[-2:]
    assert [row["protocol"]["truncation"] for row in rows] == [0.5, 1.0]
    assert rows[0]["fingerprint"] == rows[1]["fingerprint"]
    assert rows[0]["value"] != rows[1]["value"]
    assert all(0 < row["error"] < 1e-6 for row in rows)
    ended = run_cli("eval", digits, "--truncation=0.7", "--metrics=fd", "--count=32", "--seed=5")
    assert "not comparable" not in ended.out
    run_cli("report", digits)
    page = (digits / "report.html").read_text()
    assert ">truncation 0.7, seed 5<" in page
    assert "Not comparable with the first fd_pixels: fakes 32, not 16." in page
    assert "not a number" in usage_error("eval", digits, "--truncation=a")
    assert "between 0.05 and 1" in usage_error("eval", digits, "--truncation=1,2")


def test_a_truncated_score_does_not_replace_the_score_of_the_run(digits):
    original = (digits / "metrics.jsonl").read_text()
    assert run_cli("eval", digits, "--truncation=0.5", "--metrics=kid").status == 0
    command = ["train", *TINY_RUN_ARGS, "--kimg=0.16", "--run-dir", digits, "--evaluation.metrics=[fd,kid]"]
    assert run_cli(*command).status == 0
    assert (digits / "metrics.jsonl").read_text().startswith(original)
    rows = [row for row in read_jsonl(digits / "metrics.jsonl") if row["name"] == "kid_pixels"]
    assert [row["protocol"]["truncation"] for row in rows] == [0.5, 1.0]


@pytest.mark.parametrize(
    "more",
    [
        {"value": 1.0},
        {"value": 1.0, "protocol": None},
        {"value": 1.0, "protocol": "mine"},
        {"value": None, "protocol": {}},
    ],
    ids=str,
)
def test_lines_of_other_programs_are_ignored(digits, tmp_path, more):
    JsonlFile(digits / "metrics.jsonl").append({"name": "fd_pixels", "kimg": paragan.load(digits).kimg, **more})
    assert run_cli("export", digits, "--out", tmp_path / "model").status == 0
    assert run_cli("eval", digits, "--metrics=fd", "--count=16", "--follow").status == 0
    ended = run_cli("eval", digits, "--metrics=fd", "--count=32")
    assert ended.status == 0, ended.err
    assert "fd_pixels" in ended.out


def test_a_reference_file_replaces_the_data(digits, tmp_path):
    stats = tmp_path / "stats.npz"
    assert run_cli("data", "stats", "digits", "--out", stats).status == 0
    ended = run_cli("eval", digits, "--metrics=fd", "--reference", stats)
    assert ended.status == 0, ended.err
    first, row = read_jsonl(digits / "metrics.jsonl")
    assert row["value"] == pytest.approx(first["value"], rel=1e-6)
    assert row["protocol"]["data"].startswith("stats.npz ")
    assert "Use fd, or fid if" in usage_error("eval", digits, "--metrics=fd,kid", "--reference", stats)
    wrong = npz(tmp_path / "wrong.npz", mu=np.zeros(3), sigma=np.eye(3))
    assert "pixels has 64 features" in usage_error("eval", digits, "--metrics=fd", "--reference", wrong)
    line = usage_error("train", *TINY_RUN_ARGS, f"--evaluation.reference={wrong}", "--run-dir", tmp_path / "new")
    assert "pixels has 64 features" in line
    assert not (tmp_path / "new").exists()


def test_a_classifier_of_the_data_scores_class_by_class(digits, monkeypatch):
    monkeypatch.setattr(classifier, "DEFAULT_TRAINING", classifier.ClassifierTraining(max_samples=640))
    ended = run_cli("eval", digits, "--metrics=accuracy,intra_fd,is", "--features=resnet20", "--count=200")
    assert ended.status == 0, ended.err
    accuracy, intra, inception_score = read_jsonl(digits / "metrics.jsonl")[-3:]
    names = ["accuracy_resnet20", "intra_fd_resnet20", "is_resnet20"]
    assert [row["name"] for row in (accuracy, intra, inception_score)] == names
    assert set(accuracy["per_class"]) == set(map(str, range(10)))
    assert "held-out reals" in accuracy["notes"][-1]
    assert accuracy["protocol"]["labels"] == "as in the data"


def test_fakes_are_scored_by_a_classifier(digits, monkeypatch):
    monkeypatch.setattr(classifier, "DEFAULT_TRAINING", classifier.ClassifierTraining(max_samples=640))
    quick = dataclasses.replace(METRICS["cas"], settings={"train_samples": 640, "test_images": 100})
    monkeypatch.setitem(METRICS, "cas", quick)
    ended = run_cli("eval", digits, "--metrics=cas,accuracy", "--count=200")
    assert ended.status == 0, ended.err
    cas, accuracy = read_jsonl(digits / "metrics.jsonl")[-2:]
    assert (cas["name"], accuracy["name"]) == ("cas_resnet20", "accuracy_resnet20")
    protocol = cas["protocol"]
    assert (protocol["train_samples"], protocol["test_images"], protocol["fakes"]) == (640, 100, 200)
    assert 0 <= cas["value"] <= 1
    assert set(cas["per_class"]) <= set(map(str, range(10)))
    assert run_cli("report", digits).status == 0
    page = (digits / "report.html").read_text()
    assert "cas_resnet20, higher is better" in page
    assert "not finite" not in page.split('id="scores"')[0]


def test_per_class_scores_need_classes(tmp_path):
    data = npz(tmp_path / "plain.npz", images=np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8))
    plain = ["train", *TINY_RUN_ARGS, "--data", data, "--run-dir", tmp_path / "run"]
    assert "no labels" in usage_error(*plain, "--evaluation.metrics=[intra_fd]")
    assert "Use pixels" in usage_error(*plain, "--evaluation.features=resnet20")


@pytest.mark.parametrize("names", ["abc", "abcdefghijkl", "a"])
@pytest.mark.parametrize("metric", ["intra_fd", "accuracy"])
def test_per_class_scores_need_the_classes_of_the_model(digits, tmp_path, metric, names):
    count = len(names)
    images, labels = np.random.default_rng(0).integers(0, 255, (8 * count, 8, 8, 1), np.uint8), np.arange(8 * count)
    data = npz(tmp_path / "d.npz", images=images, labels=labels % count, classes=np.array([*names]))
    command = ("eval", digits, "--data", data, "--count", "32", "--metrics")
    if count > 1 or metric == "intra_fd":
        line = usage_error(*command, metric)
        assert f"other classes ({count}: a" in line
        assert "(10: 0, 1, 2, 3, 4, ...)" in line
    assert run_cli(*command, "fd").status == 0


def test_data_of_other_classes_are_scored_as_advised(check_advice, tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (32, 8, 8, 1), np.uint8)
    data = npz(tmp_path / "d.npz", images=images, labels=np.arange(32) % 2, classes=["a", "b"])
    check_advice(
        Case(
            f"eval COPY --data={data} --count=32 --metrics=intra_fd",
            "evaluation.metrics=intra_fd: goes class by class, and the data have other classes (2: a, b) than the "
            "model (10: 0, 1, 2, 3, 4, ...). Use fd, kid or prdc",
            ("--metrics=fd", "--metrics=kid", "--metrics=prdc"),
        )
    )


def test_arrays_are_scored_by_their_values_as_advised():
    dataset = paragan.from_arrays(np.zeros((8, 2), np.float32))
    with advises("evaluation.features=inception: needs images, and the data are arrays. Use values"):
        scoring.make_feature_space(EvaluationOptions(features="inception"), dataset)
    assert scoring.make_feature_space(EvaluationOptions(features="values"), dataset).num_features == 2


def test_ranks_read_the_same_model_as_advised(finished):
    def load_with(other_config):
        world = SimpleNamespace(all_gather_str=lambda config: [config, other_config or config])
        return scoring.load_same_model(world, lambda: load_model(finished))

    with advises(f"{finished / 'model'}: ranks read different models. Use storage that all ranks share"):
        load_with(other_config="{}")
    assert load_with(other_config=None).kimg == 0.16


def test_a_model_whose_classes_are_numbers_goes_with_any_names(digits, tmp_path):
    images, labels = np.random.default_rng(0).integers(0, 255, (80, 8, 8, 1), np.uint8), np.arange(80) % 10
    data = npz(tmp_path / "d.npz", images=images, labels=labels, classes=np.array([*"abcdefghij"]))
    assert run_cli("eval", digits, "--data", data, "--count", "32", "--metrics", "intra_fd").status == 0


@pytest.mark.slow
def test_fd50k_needs_no_count(digits):
    ended = run_cli("eval", digits, "--features", "pixels", "--metrics", "kid50k_full")
    assert ended.status == 0, ended.err
    assert read_jsonl(digits / "metrics.jsonl")[-1]["protocol"]["fakes"] == 50_000
    line = usage_error("eval", digits, "--features", "pixels", "--metrics", "kid50k_full", "--count", "16")
    assert "Use kid, or count=50000" in line


def test_a_user_s_feature_space_is_reloaded_by_name(digits, tmp_path, monkeypatch):
    code = "class Rows(nn.Module):\n    def forward(self, x):\n        return x.float().mean(3).flatten(1)\n"
    (tmp_path / "own_space_of_a_run.py").write_text(f"from torch import nn\n\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    name = "own_space_of_a_run:Rows"
    run = [*TINY_RUN_ARGS, f"--evaluation.features={name}", "--kimg=0.032", "--run-dir", tmp_path / "own"]
    assert run_cli("train", *run).status == 0
    assert read_jsonl(tmp_path / "own" / "metrics.jsonl")[0]["name"] == "fd_Rows"
    assert f"--features {name}" in usage_error("eval", tmp_path / "own")
    assert run_cli("eval", tmp_path / "own", f"--features={name}").status == 0


# A stop while scores are taken ----------------------------------------------------------------------

SCORED = ("--kimg=0.16", "--evaluation.count=640", "--evaluation.every_kimg=0.08")


def scores(run):
    return [(row["name"], row["kimg"], row["value"]) for row in read_jsonl(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("scored") / "run", *SCORED)


@pytest.mark.parametrize(("moment", "kimg", "message"), [(0, 0.08, "(step 5)"), (1, 0.16, "before its")])
def test_a_stop_does_not_wait_for_scores(moment, kimg, message, tmp_path, monkeypatch, scored):
    """The run that resumes measures them, with the results of an uninterrupted run."""
    samplers, scored_moments = [], []

    def prefetch(*arguments, make_sampler=scoring.prefetch):
        samplers.append(make_sampler(*arguments))
        return functools.partial(sample_block, samplers[-1], len(samplers) - 1)

    def sample_block(sample, number, rows):
        scored_moments.append(number)
        if number == moment and rows.start == 128:
            signal.raise_signal(signal.SIGTERM)
        return sample(rows)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "prefetch", prefetch)
        ended = run_cli(*train_args(run, *SCORED))
    assert (ended.status, scored_moments.count(moment)) == (3, 3)
    assert message in ended.err
    assert [row[1] for row in scores(run)] == [0.08] * moment
    assert list_checkpoints(run)[-1].name == f"{round(1000 * kimg / 16):08d}"
    assert run_cli(*train_args(run, *SCORED)).status == 0
    assert scores(run) == scores(scored)
    assert final_tensors(run) == final_tensors(scored)
