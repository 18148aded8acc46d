"""A label number means one thing: an int is the index of a class, from the data to the samples and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paragan
from advice import Case, advises
from paragan.data.dataset import load_data
from paragan.models.model import make_model_config, parse_label, save_model
from paragan.models.sampler import LabelPrior
from paragan.nets import DCGAN, Spec
from processes import TINY_RUN_ARGS, run_cli

NAMES = tuple(str(number) for number in range(1, 13))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of classes called 1 to 12. The brightness of an image says its class."""
    folder = tmp_path_factory.mktemp("numbered") / "data"
    for number in range(1, 13):
        (folder / str(number)).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / str(number) / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def run(numbered: Path) -> Path:
    folder = numbered.parent / "run"
    arguments = ["train", "folder", *TINY_RUN_ARGS[1:], f"--data={numbered}", f"--run-dir={folder}", "--kimg=0.016"]
    result = run_cli(*arguments, "--evaluation.metrics=[]")
    assert result.status == 0, result
    return folder


def test_numeric_class_names_are_sorted_by_value(numbered):
    data = load_data(str(numbered), resolution=None)
    assert data.classes == NAMES
    assert data.labels is not None
    for label in range(12):
        assert data.images[np.flatnonzero(data.labels == label)[0], 0, 0, 0] == 20 * (label + 1)


def test_an_int_is_an_index(run):
    model = paragan.load(run)
    assert model.classes == NAMES
    indices = model.labels(12, labels=range(12))
    assert indices is not None
    assert indices.tolist() == list(range(12))
    drawn = model.labels(20, seed=3)
    assert drawn is not None
    assert (model.labels(20, labels=drawn) == drawn).all()
    assert (model.sample(12, labels=indices) == model.sample(12, labels=list(range(12)))).all()


@pytest.mark.parametrize(
    ("label", "index"), [("12", 11), ("0", 0), ("name:3", 2), ("index:3", 3), (3, 3), (np.int64(3), 3)]
)
def test_labels_of_one_reading(label, index):
    assert parse_label(label, NAMES) == index


def test_a_str_of_two_readings_is_refused_with_both(run, check_advice):
    case = Case(
        f"sample {run} --labels 3 --count=1 --out=NEW/a.png",
        "labels=3: could be the class named 3 (index 2) or the class of index 3 (named 4). Use name:3 or index:3",
        ("--labels=name:3", "--labels=index:3"),
    )
    check_advice(case)


@pytest.mark.parametrize("label", [12, -1, "13", "index:12", "name:13", "name:x", "cat", 10**30])
def test_instead_of_missing_classes_others_are_used_as_advised(label):
    text = str(label)[:40]
    names = ", ".join(f"name:{name}" for name in NAMES)
    with advises(f"labels: there is no class '{text}'. Use index:0 to index:11, or a name: {names}"):
        parse_label(label, NAMES)
    assert [parse_label(advised, NAMES) for advised in ("index:0", "index:11", *names.split(", "))] == [
        0,
        11,
        *range(12),
    ]
    with advises(f"labels: there is no class '{text}'. Use 0 to 1, or a name: ant, bee"):
        parse_label(label, ("ant", "bee"))
    assert [parse_label(advised, ("ant", "bee")) for advised in (0, "1", "ant", "bee")] == [0, 1, 0, 1]


@pytest.mark.parametrize("out", ["samples.npz", "samples"])
def test_samples_keep_the_names_of_their_classes(out, run, tmp_path):
    labels = ",".join(f"name:{name}" for name in NAMES)
    result = run_cli("sample", run, "--labels", labels, "--count=24", "--out", tmp_path / out)
    assert result.status == 0, result
    data = load_data(str(tmp_path / out), resolution=None)
    assert data.classes == NAMES
    expected = paragan.load(run).sample(12, labels=range(12))
    for label in range(12):
        assert data.labels is not None
        assert (data.images[np.flatnonzero(data.labels == label)[0]] == expected[label]).all()


@pytest.mark.parametrize("label", [1.0, None, b"cat", np.float32(1)])
def test_other_values_than_indices_and_names_are_refused(label):
    with advises(f"labels: {label!r} is not a class. Use an index (int) or a name (str)"):
        parse_label(label, ("cat", "dog"))
    assert parse_label(1, ("cat", "dog")) == parse_label("dog", ("cat", "dog")) == 1


def test_labels_are_left_out_as_advised(run, tmp_path):
    model = paragan.load(run)
    with advises("labels=[]: none are given. Use labels=None to draw them as often as in the data"):
        model.labels(3, labels=[])
    drawn = model.labels(3, labels=None)
    assert drawn is not None
    nets, spec = DCGAN(width=4, latent=6), Spec(8, 1)
    save_model(tmp_path, nets.generator(spec), None, make_model_config(nets, spec, LabelPrior(()), (), kimg=1.0))
    unconditional = paragan.load(tmp_path)
    with advises("labels: this model was trained without classes. Leave labels out"):
        unconditional.sample(2, labels=[0])
    assert unconditional.sample(2).shape == (2, 8, 8, 1)
