import json
import math

import numpy as np
import pytest

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, kimg_and_values, newest_values, read_jsonl


def tick(step, **more):
    return {"Progress/kimg": step / 10, "Progress/step": step, "Loss/G/loss": 1 / step, **more}


def written(path, steps):
    records = JsonlFile(path)
    for step in steps:
        records.append(tick(step))
    return records


def strict(line):
    def fail(name):
        raise AssertionError(name)

    return json.loads(line, parse_constant=fail)


def test_what_is_appended_is_read(tmp_path):
    written(tmp_path / "stats.jsonl", range(1, 11))
    assert read_jsonl(tmp_path / "stats.jsonl") == [tick(step) for step in range(1, 11)]


def test_no_file_is_no_rows(tmp_path):
    assert read_jsonl(tmp_path / "stats.jsonl") == []
    JsonlFile(tmp_path / "stats.jsonl").truncate_after(3)
    assert list(tmp_path.iterdir()) == []


def test_appended_lines_are_complete_at_once(tmp_path):
    records = JsonlFile(tmp_path / "stats.jsonl")
    for step in range(1, 4):
        records.append(tick(step, name="ü\n"))
        lines = records.path.read_bytes().split(b"\n")
        assert lines[-1] == b""
        assert [strict(line)["Progress/step"] for line in lines[:-1]] == list(range(1, step + 1))


def test_numbers_that_json_lacks_are_null_and_named(tmp_path):
    records = JsonlFile(tmp_path / "metrics.jsonl")
    records.append({"value": math.nan, "kimg": np.float32(0.5), "n": np.int64(3), "protocol": {"a": [1, -math.inf]}})
    row = strict(records.path.read_bytes())
    assert row == {
        "value": None,
        "kimg": 0.5,
        "n": 3,
        "protocol": {"a": [1, None]},
        "nonfinite": ["value", "protocol.a.1"],
    }
    copied = JsonlFile(tmp_path / "again.jsonl")
    copied.append(row)
    assert copied.path.read_bytes() == records.path.read_bytes()


def test_values_that_are_not_json_raise_by_name(tmp_path):
    records = JsonlFile(tmp_path / "stats.jsonl")
    with pytest.raises(TypeError, match=r"Loss/parts\.r1: a ndarray"):
        records.append({"Loss/parts": {"r1": np.zeros(2)}})
    assert not records.path.exists()


@pytest.mark.parametrize("step", [0, 1, 6, 9, 99])
def test_a_resumed_file_equals_the_uninterrupted_one(tmp_path, step):
    reference = written(tmp_path / "uninterrupted.jsonl", range(1, 11))
    resumed = written(tmp_path / "resumed.jsonl", range(1, 10))
    resumed.truncate_after(step)
    for later in range(min(step, 9) + 1, 11):
        resumed.append(tick(later))
    assert resumed.path.read_bytes() == reference.path.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_truncation_by_another_key_retains_rows_without_it(tmp_path):
    scores = JsonlFile(tmp_path / "metrics.jsonl")
    for row in ({"kimg": 1}, {"name": "note"}, {"kimg": 2.5}):
        scores.append(row)
    scores.truncate_after(2, key="kimg")
    assert read_jsonl(scores.path) == [{"kimg": 1}, {"name": "note"}]


def test_the_latest_scores_are_those_of_all_that_g_makes_and_of_most_images():
    def row(value, kimg=2, name="fd", **protocol):
        return {"name": name, "value": value, "kimg": kimg, "protocol": protocol}

    rows = [row(9.0, kimg=1, fakes=10), row(1.0, fakes=10), row(2.0, fakes=5), row(3.0, fakes=50, truncation=0.5)]
    assert newest_values(rows) == {"fd": 1.0}
    assert newest_values([*rows, row(4.0, fakes=10, truncation=1.0), row(5.0, name="kid"), row(6.0, name="kid")]) == {
        "fd": 4.0,
        "kid": 6.0,
    }
    assert newest_values([{**row(1.0), "protocol": "mine"}, row(2.0, fakes="many")]) == {"fd": 2.0}


def test_a_partial_last_line_does_not_break_reading_or_appending(tmp_path):
    reference = written(tmp_path / "whole.jsonl", [1, 2]).path.read_bytes()
    first = reference.index(b"\n") + 1
    for cut in range(first, len(reference)):
        records = JsonlFile(tmp_path / "cut.jsonl")
        records.path.write_bytes(reference[:cut])
        remaining = read_jsonl(records.path)
        assert remaining == [tick(1), tick(2)][: 1 + (cut == len(reference) - 1)]
        records.append(tick(3))
        assert read_jsonl(records.path) == [*remaining, tick(3)]
        records.path.write_bytes(reference[:cut])
        records.truncate_after(2)
        assert records.path.read_bytes() == reference[: len(reference) if len(remaining) == 2 else first]


@pytest.mark.parametrize("line", [b'{"a": 1', b"[1, 2]", b"\xff\xfe{}", b"[" * 100_000, b"\0\0\0"])
def test_a_corrupt_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "stats.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(UsageError, match=r"stats\.jsonl, line 2: not a JSON object") as error:
        read_jsonl(path)
    assert "\n" not in str(error.value)


def test_columns_include_non_finite_and_skip_missing_values():
    rows = [
        {"Progress/kimg": 1, "x": 2},
        {"Progress/kimg": 2, "x": None, "nonfinite": ["x"]},
        {"Progress/kimg": 3, "x": None},
        {"Progress/kimg": 4},
        {"Progress/kimg": 5, "x": "text"},
        {"x": 6},
        {"kimg": 7, "x": True},
        {"kimg": 8, "x": 0.5},
    ]
    kimg, values = kimg_and_values(rows, "x")
    assert kimg == [1, 2, 8]
    np.testing.assert_equal(values, [2, math.nan, 0.5])


def test_file_replacement_is_atomic(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        atomic_write_bytes(tmp_path / "taken", b"new")
    atomic_write_bytes(tmp_path / "free", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "taken"]
