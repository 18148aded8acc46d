import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import (
    METRICS,
    EvalProtocol,
    FeatureSpace,
    compute_feature_stats,
    evaluate,
    metric_names,
    module_features,
    num_fakes,
    pixels,
    protocol_differences,
)
from paragan.eval.accumulators import FeatureAcc
from paragan.eval.features import INCEPTION_SHA256, inception_path, inception_source, raw_values

PIXELS = pixels(8, 1)
INCEPTION = FeatureSpace("inception", INCEPTION_SHA256[:16], 2048, nn.Identity, num_logits=1008)
EVERYTHING = ["fd", "kid", "is", "prdc"]


class Classifier(nn.Module):
    """Mean rows as features; logits that tell some digits apart."""

    def forward(self, images):
        return images.float().mean(3).flatten(1) / 255

    def logits(self, features):
        return 9 * features


CLASSIFIER = module_features("rows", Classifier(), 8, num_logits=8)


def test_every_metric_yields_its_scores(digits, blurred):
    protocol = EvalProtocol(data="digits-8", split="train", ema=True, seed=4)
    result = evaluate(blurred, digits, space=CLASSIFIER, metrics=EVERYTHING, protocol=protocol, count=300, batch=50)
    names = [
        "fd_rows",
        "kid_rows",
        "is_rows",
        "precision_rows",
        "recall_rows",
        "density_rows",
        "coverage_rows",
    ]
    assert [score.name for score in result] == names
    assert all(np.isfinite(score.value) and score.seconds > 0 for score in result)
    fd, distance, inception_score, precision, *_ = result
    assert fd.protocol == {
        "space": "rows",
        "space_hash": CLASSIFIER.hash,
        "resizer": "none",
        "image": "1x8x8",
        "reals": 1797,
        "fakes": 300,
        "data": "digits-8",
        "split": "train",
        "labels": None,
        "batch_norm": None,
        "ema": True,
        "truncation": None,
        "seed": 4,
    }
    assert distance.protocol == {**fd.protocol, "subsets": 100, "subset_size": 1000}
    assert inception_score.protocol == {**fd.protocol, "splits": 10, "reals": None}
    assert precision.protocol == {**fd.protocol, "k": 5}


@pytest.mark.parametrize("size", [2, 3, 8])
def test_scores_do_not_depend_on_the_number_of_ranks(on_ranks, digits, blurred, size):
    def scores(group=None):
        more = {} if group is None else {"group": group}
        return evaluate(blurred, digits, space=CLASSIFIER, metrics=EVERYTHING, count=333, batch=50, **more)

    single = {score.name: score.value for score in scores()}
    ranks = [{score.name: score.value for score in result} for result in on_ranks(size, scores)]
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == pytest.approx(single, rel=1e-8)


@pytest.mark.parametrize("batch", [1, 64, 333])
def test_scores_do_not_depend_on_the_batch(digits, blurred, batch):
    def scores(batch):
        result = evaluate(blurred, digits, space=CLASSIFIER, metrics=EVERYTHING, count=333, batch=batch)
        return {score.name: score.value for score in result}

    result, usual = scores(batch), scores(50)
    assert result == pytest.approx(usual, rel=1e-9)
    counts = [name for name in usual if name.startswith(("precision", "recall", "density", "coverage"))]
    assert [result[name] for name in counts] == [usual[name] for name in counts]


def test_scores_are_equal_on_processes(pool, digits):
    def job(world):
        import torch

        from paragan.eval import evaluate, pixels

        fakes = torch.from_numpy(digits).permute(0, 3, 1, 2).roll(1, 3)
        options = {"space": pixels(8, 1), "metrics": ["fd", "kid", "prdc"], "count": 250, "group": world.all_ranks}
        return [s.value for s in evaluate(lambda rows: fakes[rows.start : rows.stop], digits, **options)]

    (single,), two, four = (pool(size, job) for size in (1, 2, 4))
    assert len({tuple(values) for values in two}) == len({tuple(values) for values in four}) == 1
    assert two[0] == pytest.approx(single, rel=1e-9)
    assert four[0] == pytest.approx(single, rel=1e-9)
    assert single[2:] == two[0][2:] == four[0][2:]  # counts


def test_features_stay_on_their_rank(on_ranks, digits):
    def local_features(group):
        stats = compute_feature_stats(digits, space=PIXELS, metrics=["fd", "kid", "prdc"], group=group)
        return stats.get(FeatureAcc()).local

    shares = on_ranks(3, local_features)
    assert sorted(map(len, shares)) == [576, 581, 640]
    assert sum(map(len, shares)) == len(digits)


def test_pixel_distance_does_not_depend_on_the_number_of_ranks(on_ranks, digits, blurred):
    def distance(group):
        return evaluate(blurred, digits, space=PIXELS, metrics=["fd"], count=40, batch=16, group=group)[0]

    single = evaluate(blurred, digits, space=PIXELS, metrics=["fd"], count=40, batch=16)[0]
    for score in on_ranks(2, distance):
        assert score.value == pytest.approx(single.value, rel=1e-8)
        assert not protocol_differences(score, single)


def test_each_rank_samples_only_its_blocks(on_ranks, digits, blurred):
    def samples(group):
        request = []
        fakes = lambda rows: request.append(rows) or blurred(rows)  # noqa: E731
        evaluate(fakes, digits, space=PIXELS, metrics=["fd"], count=100, batch=30, group=group)
        return request

    one, two = on_ranks(2, samples)
    assert one == [range(30), range(60, 90)]
    assert two == [range(30, 60), range(90, 100)]


class LostPeerGroup:
    """A group whose other rank is gone."""

    rank, size = 0, 2

    def all_reduce_sum(self, x):
        raise ConnectionError("rank 1 is gone")


def test_lost_rank_is_detected_early(digits):
    samples = []

    def sample(rows):
        samples.append(rows)
        return torch.zeros(len(rows), 1, 8, 8, dtype=torch.uint8)

    reals = compute_feature_stats(digits, space=PIXELS, metrics=["fd"])
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        evaluate(sample, reals, space=PIXELS, metrics=["fd"], count=50_000, group=LostPeerGroup())
    assert sum(map(len, samples)) < 5_000


def test_feature_stats_of_reals_can_be_reused(digits, blurred):
    reals = compute_feature_stats(digits, space=PIXELS, metrics=["fd", "prdc"])
    query = {"space": PIXELS, "metrics": ["fd", "prdc"], "count": 100}
    repeated, fresh = evaluate(blurred, reals, **query), evaluate(blurred, digits, **query)
    assert [(s.name, s.value, s.protocol) for s in repeated] == [(s.name, s.value, s.protocol) for s in fresh]
    with pytest.raises(UsageError, match="stats are of the space pixels, not rows"):
        evaluate(blurred, reals, space=CLASSIFIER, metrics=["fd"], count=100)
    with pytest.raises(UsageError, match="Compute them with metrics=kid or prdc"):
        evaluate(blurred, compute_feature_stats(digits, space=PIXELS, metrics=["fd"]), **query)
    with pytest.raises(UsageError, match="Compute them with metrics=fd or fid"):
        evaluate(blurred, compute_feature_stats(digits, space=PIXELS, metrics=["kid"]), **query)


def test_scores_of_too_few_images_have_notes(digits, blurred):
    few, many = (evaluate(blurred, digits, space=PIXELS, metrics=["fd"], count=count)[0] for count in (64, 65))
    assert few.notes == ("64 fakes for 64 features: biased upwards",)
    assert many.notes == ()
    assert evaluate(blurred, None, space=CLASSIFIER, metrics=["is"], count=20)[0].notes


def test_a_line_of_metrics_jsonl_reads_back(digits, blurred):
    score = evaluate(blurred, digits, space=PIXELS, metrics=["fd"], count=20)[0]
    line = json.loads(json.dumps(score.to_json(kimg=1.5), allow_nan=False))
    assert list(line) == ["name", "value", "kimg", "protocol", "fingerprint", "seconds", "notes", "error"]
    assert "kimg" not in score.to_json()
    assert len(line["fingerprint"]) == 12
    assert protocol_differences(line, score) == []


def test_scores_of_other_protocols_are_not_comparable(digits, blurred):
    query = {"space": PIXELS, "metrics": ["fd", "kid"]}
    one, kid = evaluate(blurred, digits, count=100, protocol=EvalProtocol(split="train"), **query)
    two, _ = evaluate(blurred, digits, count=200, protocol=EvalProtocol(split="test"), **query)
    assert protocol_differences(one, two) == ["fakes", "split"]
    assert one.fingerprint != two.fingerprint
    assert protocol_differences(one, kid) == ["name", "subset_size", "subsets"]
    assert protocol_differences(one, dataclasses.replace(one, value=7.0, seconds=9.0)) == []
    swept = dataclasses.replace(one, protocol={**one.protocol, "truncation": 0.5, "seed": 9})
    assert protocol_differences(one, swept) == []
    assert one.fingerprint == swept.fingerprint != two.fingerprint


# names


@pytest.mark.parametrize(
    ("requested", "in_inception", "in_pixels"),
    [
        ("fd", ("fd_inception",), ("fd_pixels",)),
        ("fid", ("fid",), None),
        ("fid50k_full", ("fid50k_full",), None),
        ("kid", ("kid",), ("kid_pixels",)),
        ("kid50k_full", ("kid50k_full",), ("kid50k_full_pixels",)),
        ("is", ("is",), None),
        ("is50k", ("is50k",), None),
        (
            "pr50k3_full",
            ("pr50k3_full_precision_inception", "pr50k3_full_recall_inception"),
            ("pr50k3_full_precision_pixels", "pr50k3_full_recall_pixels"),
        ),
        (
            "prdc",
            ("precision_inception", "recall_inception", "density_inception", "coverage_inception"),
            ("precision_pixels", "recall_pixels", "density_pixels", "coverage_pixels"),
        ),
    ],
)
def test_names_of_scores_contain_the_space(requested, in_inception, in_pixels):
    assert metric_names(requested, INCEPTION) == in_inception
    if in_pixels is None:
        with pytest.raises(UsageError, match="fd"):
            metric_names(requested, PIXELS)
    else:
        assert metric_names(requested, PIXELS) == in_pixels


def test_all_metrics_have_a_named_row():
    of_classes = dataclasses.replace(CLASSIFIER, classes=("a", "b"))
    spaces = {"accuracy": of_classes, "cas": of_classes} | dict.fromkeys(("log_mel", "stft"), raw_values((1, 512)))
    for name in METRICS:
        assert metric_names(name, spaces.get(name, INCEPTION))


@pytest.mark.parametrize("space", [PIXELS, CLASSIFIER, dataclasses.replace(INCEPTION, hash="0" * 16)])
def test_nothing_is_called_fid_but_fid(space):
    file = inception_source(inception_path())
    refusal = f"is defined in the space inception only, not in {space.name}"
    for name, other in (("fid", "fd"), ("fid50k_full", "fd"), ("intra_fid", "intra_fd")):
        with advises(f"metrics={name}: {refusal}. Use {other}, or --features inception with the file {file}"):
            metric_names(name, space)
        assert metric_names(other, space) == (f"{other}_{space.name}",)
        assert metric_names(name, INCEPTION) == (name,)


def test_the_scores_of_prdc_are_computed_together():
    for name in ("precision", "recall", "density", "coverage"):
        with advises(f"metrics={name}: is one of the scores of prdc. Use prdc"):
            metric_names(name, INCEPTION)
    assert metric_names("prdc", INCEPTION)[0].startswith("precision_")


def test_unknown_metric_suggests_the_nearest():
    for expected, meant in (("fid50k", "fid50k_full"), ("FD", "fd"), ("iss", "is"), ("", "fd")):
        with advises(f"metrics={expected}: is none of {', '.join(METRICS)}; did you mean {meant}?"):
            metric_names(expected, INCEPTION)
        assert metric_names(meant, INCEPTION)


def test_too_many_features_for_a_covariance_raise():
    with advises("pixels has 12288. Use kid or prdc, or --features inception"):
        metric_names("fd", pixels(64, 3))
    for name, space in (("kid", pixels(64, 3)), ("prdc", pixels(64, 3)), ("fd", INCEPTION)):
        assert metric_names(name, space)


def test_names_with_a_count_require_it():
    assert num_fakes(["fd"], 7) == 7
    assert num_fakes(["fd", "fid50k_full"]) == num_fakes(["is50k"], 50_000) == 50_000
    others = {"fid50k_full": "fid", "kid50k_full": "kid", "is50k": "is", "pr50k3_full": "prdc"}
    for count, few in ((20, {}), (10, {"is50k": "is1"}), (5, {"is50k": "is1", "pr50k3_full": "fd"})):
        for name, other in (others | few).items():
            with advises(f"count={count}: {name} is of 50000 fakes. Use {other}, or count=50000"):
                num_fakes([name], count)
            assert num_fakes([other], count) == count >= METRICS[other].min_images
            assert num_fakes([name], 50_000) == 50_000


def test_splits_have_two_fakes_at_least():
    with advises("count=19: is is of 10 splits of at least 2 fakes. Use count=20 or more, or is1"):
        num_fakes(["is"], 19)
    assert num_fakes(["is"], 20) == 20
    assert num_fakes(["is1"], 19) == 19


# what is refused


def test_bad_metrics_raise_before_sampling(digits):
    def never(rows):
        raise AssertionError

    for metrics, count in ((["fd", "fids"], 10), (["is"], 30), (["kid50k_full"], 10)):
        with pytest.raises(UsageError, match=r"metrics|count"):
            evaluate(never, digits, space=PIXELS, metrics=metrics, count=count)


@pytest.mark.parametrize(
    ("fakes", "message"),
    [
        (torch.zeros(10, 1, 8, 8), r"expected uint8 images \[10, C, H, W\] in \[0, 255\], got torch.float32"),
        (torch.zeros(9, 1, 8, 8, dtype=torch.uint8), r"got torch.uint8 \[9, 1, 8, 8\]"),
    ],
)
def test_fakes_that_are_no_images_raise(digits, fakes, message):
    with pytest.raises(UsageError, match=message):
        evaluate(lambda rows: fakes, digits, space=PIXELS, metrics=["fd"], count=10)


def test_fakes_of_another_shape_raise(digits):
    def tall(rows):
        return torch.zeros(len(rows), 1, 16, 8, dtype=torch.uint8)

    corner = {"space": module_features("flat", Corner(), 4), "metrics": ["kid"], "count": 10}
    with advises("reals: images are 1x8x8 (CxHxW), but fakes are 1x16x8. Use equal shapes"):
        evaluate(tall, digits, **corner)
    assert evaluate(tall, digits.repeat(2, 1), **corner)


class Corner(nn.Module):
    def forward(self, images):
        return images[:, 0, 0, :4].float() / (1 - images[:, :1, 0, 0].float())


def test_reals_that_are_no_images_raise(blurred):
    for reals in (np.zeros((10, 8, 8), np.uint8), np.zeros((10, 8, 8, 1), np.float32)):
        with advises(f"reals: {reals.dtype} {list(reals.shape)} are no images. Use uint8 [N, H, W, C]"):
            evaluate(blurred, reals, space=PIXELS, metrics=["fd"], count=10)
    with advises("reals=None: fd compares with real images. Use uint8 images [N, H, W, C]"):
        evaluate(blurred, None, space=PIXELS, metrics=["fd"], count=10)
    assert evaluate(blurred, np.zeros((10, 8, 8, 1), np.uint8), space=PIXELS, metrics=["fd"], count=10)


def test_nonfinite_features_raise(digits):
    def images_of(value):
        return lambda rows: torch.full((len(rows), 1, 8, 8), value, dtype=torch.uint8)

    corner = {"space": module_features("corner", Corner(), 4), "metrics": ["kid"], "count": 10}
    with advises("space=corner: returned features that are not finite. Use finite images and weights"):
        evaluate(images_of(1), digits, **corner)
    assert evaluate(images_of(2), digits, **corner)


def test_one_image_raises(digits, blurred):
    for reals, count in ((digits, 1), (digits[:1], 10)):
        with advises("count=1: a score needs at least 2 images. Use 2 or more"):
            evaluate(blurred, reals, space=PIXELS, metrics=["fd"], count=count)
    assert evaluate(blurred, digits[:2], space=PIXELS, metrics=["fd"], count=2)
