import dataclasses

import numpy as np
import pytest
import torch

from advice import advises
from paragan.eval import classifier
from paragan.eval.classifier import (
    SPACE_NAME,
    ClassifierTraining,
    ResNet20,
    classifier_space,
    downscale,
    train_classifier,
    untrained_space,
)
from paragan.eval.features import named_space

QUICK = ClassifierTraining(max_samples=1024, batch=32, lr=0.05)


def halves(count=300, seed=0):
    """Noise, brighter on the left (class 0) or on the right (1), uint8 [N, 8, 8, 1], sorted by class."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 128, (count, 8, 8, 1), np.uint8)
    labels = np.sort(np.arange(count) % 2)
    for image, label in zip(images, labels, strict=True):
        image[:, 4 * label : 4 * label + 4] += 80
    return images, labels


@pytest.fixture
def isolated_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paragan" / SPACE_NAME


def make_space(data_digest="halves", **more):
    images, labels = halves()
    return classifier_space(images, labels, ("left", "right"), data_digest=data_digest, training=QUICK, **more)


def test_number_of_parameters_equals_the_paper():
    net = ResNet20(3, 10)
    assert sum(p.numel() for p in net.parameters()) == 269_722  # 0.27 million, their table 6
    assert net.eval()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 64)


def test_classifier_is_trained_once_and_then_read_from_the_cache(isolated_cache, monkeypatch):
    first = make_space()
    (note,) = first.notes
    assert float(note.split()[1]) > 95  # % of held-out reals
    assert (first.name, first.num_features, first.num_logits, first.classes) == (SPACE_NAME, 64, 2, ("left", "right"))
    images = torch.from_numpy(halves()[0]).permute(0, 3, 1, 2)
    assert (first.logits(first(images)).argmax(1).numpy() == halves()[1]).mean() > 0.95
    monkeypatch.setattr(classifier, "train_classifier", None)
    repeated = make_space()
    assert (repeated, repeated.notes) == (first, first.notes)
    assert torch.equal(repeated(images), first(images))
    with pytest.raises(TypeError):  # other data, other training
        make_space("others")


def test_damaged_cache_file_is_replaced(isolated_cache):
    first = make_space()
    (file,) = isolated_cache.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert make_space() == first


def test_concurrent_trainings_use_the_first_result(isolated_cache, monkeypatch):
    """On other hardware they would be two, and their scores not comparable."""
    fit, faster = classifier.train_classifier, []

    def other(x, y, classes, options, *more):
        return fit(x, y, classes, dataclasses.replace(options, seed=9), *more)

    def overtaken(*provided):
        monkeypatch.setattr(classifier, "train_classifier", other)
        faster.append(make_space())
        return fit(*provided)

    monkeypatch.setattr(classifier, "train_classifier", overtaken)
    slower = make_space()
    assert (slower, slower.notes) == (faster[0], faster[0].notes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(isolated_cache / "elsewhere"))
    monkeypatch.setattr(classifier, "train_classifier", fit)
    assert make_space() != slower  # what it trained itself was another


def test_training_without_a_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert make_space().num_logits == 2


def test_all_ranks_have_the_weights_of_rank_0(isolated_cache, on_ranks):
    spaces = on_ranks(3, lambda group: make_space(group=group))
    assert spaces[0] == spaces[1] == spaces[2]
    assert spaces[0].notes == spaces[2].notes


def test_training_depends_on_data_and_seed_only():
    images, labels = halves(100)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)
    options = ClassifierTraining(max_samples=128, batch=32)
    one, two = (train_classifier(x, y, 2, options).linear.weight for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(
        one, train_classifier(x, y, 2, ClassifierTraining(max_samples=128, batch=32, seed=1)).linear.weight
    )


def test_only_large_images_are_downscaled():
    large = torch.full((2, 3, 64, 64), 7, dtype=torch.uint8)
    assert torch.equal(downscale(large), large[:, :, :32, :32])
    small = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    assert downscale(small) is small
    assert downscale(torch.zeros(2, 3, 32, 128, dtype=torch.uint8)).shape == (2, 3, 8, 32)


def test_images_that_are_not_square_are_classified():
    images = torch.from_numpy(np.pad(halves()[0], ((0, 0), (2, 2), (0, 0), (0, 0)))).permute(0, 3, 1, 2)  # 12 x 8
    net = train_classifier(images, torch.from_numpy(halves()[1]), 2, ClassifierTraining(max_samples=64, batch=32))
    assert net(images[:2]).shape == (2, 64)


@pytest.mark.parametrize(("labels", "names"), [(None, ()), (np.zeros(300, int), ("one",))])
def test_classifier_needs_two_classes(labels, names):
    with advises("space=resnet20: is a classifier of the data's classes, and the data has fewer than two. Use pixels"):
        classifier_space(halves()[0], labels, names, data_digest="x")
    assert named_space("pixels", 8, 1)


def test_a_classifier_that_is_not_trained_has_no_network(isolated_cache):
    images, labels = halves()
    names = ("left", "right")
    with advises("space=resnet20: its classifier is not trained. Use classifier_space"):
        _ = untrained_space(labels, names).module
    training = ClassifierTraining(max_samples=32, batch=32)
    assert classifier_space(images, labels, names, data_digest="x", training=training).module
