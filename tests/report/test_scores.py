import math

import pytest

from paragan.report.scores import group_scores, shared_protocol, unique_protocols

PROTOCOL = {"features": "inception", "generated": 50_000, "real": {"split": "train"}}


def row(value, kimg=1, name="fid50k_full", protocol=PROTOCOL, **more):
    return {"name": name, "value": value, "kimg": kimg, "protocol": protocol, "fingerprint": "f", **more}


def test_last_is_by_kimg_and_best_by_direction():
    (fid,) = group_scores([row(9, 3), row(12, 1), row(7, 2)])
    assert (fid.last.value, fid.best.value) == (9, 7)
    (score,) = group_scores([row(2, 1, "is50k"), row(8, 2, "is50k"), row(5, 3, "is50k")])
    assert (score.last.value, score.best.value) == (5, 8)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        *((name, "lower") for name in ("fd_pixels", "fid", "fid50k_full", "kid", "kid50k_full_pixels", "fd_is-net")),
        *((name, "higher") for name in ("precision_pixels", "recall_inception", "is", "is1", "is50k", "is50k_my-net")),
        *((name, "higher") for name in ("coverage_values", "density_pixels", "pr50k3_full_precision_inception")),
        *((name, "lower") for name in ("log_mel", "stft")),
        ("psnr", "higher"),
        *((name, "higher") for name in ("accuracy_resnet20", "cas_resnet20")),
        *((name, None) for name in ("this", "")),
    ],
)
def test_an_unknown_score_has_no_best(name, direction):
    (one,) = group_scores([row(1, name=name)])
    assert one.direction == direction
    assert (one.best is None) == (direction is None)


def test_a_nonfinite_score_is_never_best():
    (fid,) = group_scores([row(9, 1), row(None, 2, nonfinite=["value"])])
    assert math.isnan(fid.last.value)
    assert fid.best.value == 9


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"protocol": {**PROTOCOL, "generated": 10_000}}, "generated 10,000, not 50,000"),
        ({"protocol": {**PROTOCOL, "real": {"split": "test"}}}, "real split test, not train"),
        ({"protocol": {**PROTOCOL, "crop": True}}, "crop yes, not recorded"),
        ({"protocol": None}, "features not recorded, not inception"),
        ({"fingerprint": "g"}, "fingerprint"),
    ],
)
def test_different_protocols_are_separate_series(change, difference):
    first, second = group_scores([row(9, 1), row(8, 2), row(7, 3) | change])
    assert (len(first.scores), len(second.scores)) == (2, 1)
    assert (first.differences, second.differences[0]) == ((), difference)
    assert (first.is_current, second.is_current) == (False, True)
    assert [protocol.label for protocol in unique_protocols([second, first])] == ["P1", "P2"]


def test_scores_of_a_sweep_are_separate_and_comparable():
    samples = {**PROTOCOL, "truncation": 1.0, "seed": 0}
    rows = [row(9, protocol=samples | more) for more in ({}, {"truncation": 0.5}, {"seed": 3, "truncation": 0.7})]
    rows[1]["fingerprint"] = "as older ones had"
    assert [(one.differences, one.sweep_label) for one in group_scores(rows)] == [
        ((), ""),
        ((), "truncation 0.5"),
        ((), "truncation 0.7, seed 3"),
    ]
    _, other = group_scores([rows[0], row(9, protocol=samples | {"truncation": 0.5, "generated": 10})])
    assert other.differences == ("generated 10, not 50,000",)


def test_different_scores_may_share_a_protocol():
    fid, score = group_scores([row(9), row(8, name="is50k")])
    assert fid.protocol is score.protocol
    assert not score.differences


def test_shared_protocol_entries_are_described_once():
    fid, kid = group_scores([row(9), row(8, name="kid50k", protocol={**PROTOCOL, "subsets": 100, "space_hash": "5d"})])
    both = shared_protocol([fid.protocol, kid.protocol])
    assert both.describe() == "features inception, generated 50,000, real split train"
    assert fid.protocol.describe(both) == ""
    assert kid.protocol.describe(both) == "subsets 100"
    assert shared_protocol([]).describe() == ""
