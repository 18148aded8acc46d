import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import ClassLabels, evaluate, module_features, pixels
from paragan.eval import metrics as table
from paragan.eval.classifier import ClassifierTraining, untrained_space

NAMES = ("dark", "bright")


class Brightness(nn.Module):
    def forward(self, images):
        return images.float().flatten(1)[:, :4] / 255

    def logits(self, features):
        return torch.stack([0.5 - features.mean(1), features.mean(1) - 0.5], 1)


SPACE = dataclasses.replace(module_features("four", Brightness(), 4, num_logits=2), classes=NAMES)


def make_images(count, seed, wrong=0):
    """uint8 [N, 8, 8, 1], dark (0) and bright (1) ones; the first `wrong` bright ones are dark."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    images = rng.integers(0, 100, (count, 8, 8, 1), np.uint8)
    images[labels == 1] += 150
    images[1 : 2 * wrong : 2] -= 150
    return images, labels


def score(metrics, group=None, count=200, wrong=10, space=SPACE, batch=16, labels=True):
    (reals, real_labels), (fakes, fake_labels) = make_images(300, 0), make_images(count, 1, wrong)
    x = torch.from_numpy(fakes).permute(0, 3, 1, 2)
    return evaluate(
        lambda rows: x[rows.start : rows.stop],
        reals,
        space=space,
        metrics=metrics,
        count=count,
        batch=batch,
        labels=ClassLabels(NAMES, real_labels, lambda rows: fake_labels[rows.start : rows.stop])
        if labels
        else ClassLabels(()),
        **({} if group is None else {"group": group}),
    )


def test_intra_class_distance_is_the_mean_of_each_class_by_itself():
    (result,) = score(["intra_fd"])
    each = {}
    for label, name in enumerate(NAMES):
        (reals, of_reals), (fakes, of_fakes) = make_images(300, 0), make_images(200, 1, 10)
        x = torch.from_numpy(fakes[of_fakes == label]).permute(0, 3, 1, 2)
        options = {"space": SPACE, "metrics": ["fd"], "count": len(x)}
        (single,) = evaluate(lambda rows, x=x: x[rows.start : rows.stop], reals[of_reals == label], **options)
        each[name] = single.value
    assert result.name == "intra_fd_four"
    assert result.per_class == pytest.approx(each, rel=1e-9)
    assert result.value == pytest.approx(sum(each.values()) / 2, rel=1e-9)
    assert result.per_class["bright"] > 2 * result.per_class["dark"]
    assert result.to_json()["per_class"] == result.per_class
    assert result.error < 1e-6


def test_accuracy_counts_correctly_classified_fakes():
    (result,) = score(["accuracy"])
    assert (result.name, result.value) == ("accuracy_four", 0.95)
    assert result.per_class == {"dark": 1.0, "bright": 0.9}
    assert result.protocol["reals"] is None


def test_scores_of_classes_do_not_depend_on_ranks_or_batch(on_ranks):
    (single, right) = score(["intra_fd", "accuracy"])
    for size, batch in ((2, 16), (4, 9), (1, 200)):
        for result, accuracy in on_ranks(size, lambda group, b=batch: score(["intra_fd", "accuracy"], group, batch=b)):
            assert result.per_class == pytest.approx(single.per_class, rel=1e-9)
            assert accuracy.per_class == right.per_class


def test_class_with_too_few_images_is_left_out_with_a_note():
    (result,) = score(["intra_fd"], count=3, wrong=0)  # dark, bright, dark
    assert list(result.per_class) == ["dark"]
    assert "too few images of 1 of 2 classes (bright)" in result.notes
    assert any("2 fakes for 4 features: biased upwards" in note for note in result.notes)
    with advises(
        "no class with two reals has two fakes, which a distance needs: 2 fakes for 2 classes. Use a larger count"
    ):
        score(["intra_fd"], count=2, wrong=0)


def test_classifier_trained_on_good_fakes_classifies_reals(monkeypatch, on_ranks):
    monkeypatch.setattr(table, "DEFAULT_TRAINING", ClassifierTraining(batch=16, lr=0.05))
    cas = dataclasses.replace(table.METRICS["cas"], settings={"train_samples": 800, "test_images": 100})
    monkeypatch.setitem(table.METRICS, "cas", cas)
    space = dataclasses.replace(untrained_space(np.arange(2), NAMES), build=Brightness, num_features=4)
    (good,) = score(["cas"], wrong=0, space=space)
    assert good.name == "cas_resnet20"
    assert good.value > 0.95
    assert set(good.per_class) == set(NAMES)
    assert (good.protocol["train_samples"], good.protocol["test_images"]) == (800, 100)
    (one,), (two,) = on_ranks(2, lambda group: score(["cas"], group, wrong=0, space=space))
    assert one.per_class == two.per_class
    assert one.value > 0.95


@pytest.mark.parametrize("metric", ["intra_fd", "accuracy"])
def test_missing_labels_raise(metric):
    with advises(
        f"metrics={metric}: needs classes, and the reals have no labels or G is unconditional. Use fd, kid or prdc"
    ):
        score([metric], labels=False)
    assert len(score(["fd", "kid", "prdc"], labels=False)) == 6


class NonFinite(Brightness):
    """Some features are no numbers."""

    def forward(self, images):
        features = super().forward(images)
        return features.masked_fill(features[:, :1] == features[:, :1].max(), torch.nan)


@pytest.mark.parametrize("metric", ["intra_fd", "is", "accuracy"])
def test_nonfinite_features_raise_on_all_ranks(metric, on_ranks):
    space = dataclasses.replace(module_features("once", NonFinite(), 4, num_logits=2), classes=NAMES)

    def message_of(group):
        with pytest.raises(UsageError, match="features that are not finite"):
            score([metric], space=space, group=group)
        return True

    assert on_ranks(2, message_of) == [True, True]


@pytest.mark.parametrize("fakes", [np.full(200, 2), np.full(200, -1), np.zeros(3, int)])
def test_labels_of_no_class_raise(fakes):
    (reals, real_labels), (images, _) = make_images(300, 0), make_images(200, 1)
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    labels = ClassLabels(NAMES, real_labels, lambda rows: fakes[rows.start : rows.stop])
    options = {"space": SPACE, "count": 200, "labels": labels}
    with pytest.raises(UsageError, match="expected one of 0 to 1 for each image"):
        evaluate(lambda rows: x[rows.start : rows.stop], reals, metrics=["intra_fd"], **options)
    assert evaluate(
        lambda rows: x[rows.start : rows.stop], reals, metrics=["fd"], **options
    )  # which asks for no labels


def test_classifier_of_other_classes_raises():
    refusal = "metrics=accuracy: needs a classifier of the data's own classes, and the space four is none"
    with advises(f"{refusal}. Use --features resnet20"):
        score(["accuracy"], space=dataclasses.replace(SPACE, classes=()))
    assert table.metric_names("accuracy", untrained_space(np.arange(2), NAMES)) == ("accuracy_resnet20",)


def test_too_many_class_covariances_raise():
    with advises("1000 covariances of 3072 features. Use --features resnet20, which has 64 features"):
        table.check_labels(["intra_fd"], pixels(32, 3), 1000)
    names = tuple(map(str, range(1000)))
    table.check_labels(["intra_fd"], untrained_space(np.arange(1000), names), 1000)


def test_one_failed_metric_leaves_the_others(on_ranks):
    for size in (1, 3):
        for intra, accuracy in on_ranks(size, lambda group: score(["intra_fd", "accuracy"], group, count=2, wrong=0)):
            assert "no class with two reals has two fakes" in intra.failure
            assert math.isnan(intra.value)
            line = json.loads(json.dumps(intra.to_json(), allow_nan=False))
            assert (line["value"], line["nonfinite"]) == (None, ["value"])
            assert line["notes"] == [f"could not be computed: {intra.failure}"]
            assert accuracy.value == 1


def test_a_metric_that_fails_on_rank_0_fails_on_all(on_ranks, monkeypatch):
    def fail(a, b):
        raise ArithmeticError("no root")

    monkeypatch.setattr(table, "frechet_distance", fail)
    results = on_ranks(2, lambda group: score(["fd", "accuracy"], group))
    assert [fd.failure for fd, _ in results] == ["ArithmeticError: no root", "it failed on rank 0"]
    assert len({accuracy.value for _, accuracy in results}) == 1


def test_classes_of_one_image_raise():
    table.check_class_counts(["intra_fd"], np.array([0, 1, 1]))
    table.check_class_counts(["fd"], np.arange(9))
    with advises(
        "metrics=intra_fd: no class has two reals, which a distance within classes needs. Use fd, kid or prdc"
    ):
        table.check_class_counts(["fd", "intra_fd"], np.arange(9))
    table.check_class_counts(["fd", "kid", "prdc"], np.arange(9))
