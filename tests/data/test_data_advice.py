"""Advice on the data of commands: followed, it leads to a command that is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from advice import Case, advises, case_id
from paragan.data.dataset import load_data
from processes import run_cli

SMALL = ["train", "folder", "-n", "--nets.width=8", "--batch=16", "--lanes=2", "--evaluation.metrics=[]"]
CASES = [
    Case(
        "--data=DIR/plain.npz --data.only=1",
        "data.only=1: these images have no classes. Leave data.only out",
        ("~data.only",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_advice_on_the_data_of_a_run_works(case, check_advice):
    check_advice(case, SMALL)


@pytest.mark.parametrize("options", [{"resolution": 8}, {"channels": 1}, {"cache": "stream"}, {"value_range": "full"}])
def test_numbers_are_loaded_as_advised(options, advice_inputs):
    path = str(advice_inputs / "numbers.npz")
    with advises(
        f"data: {path} holds numbers, not images. Leave data.resolution, data.channels, data.range and "
        "data.cache=stream out"
    ):
        load_data(path, **({"resolution": None} | options))
    assert load_data(path, resolution=None).is_array


def test_the_samples_of_a_run_are_data_as_advised(finished, tmp_path, monkeypatch):
    with advises(
        f"data: {finished} is a run. Use its samples: `paragan sample {finished} --count 5000 --out fakes.npz`"
    ):
        load_data(str(finished), resolution=None)
    monkeypatch.chdir(tmp_path)
    assert run_cli("sample", finished, "--count", "5000", "--out", "fakes.npz").status == 0
    assert load_data("fakes.npz", resolution=None).shape == (1, 8, 8)
    assert np.load("fakes.npz")["images"].shape == (5000, 8, 8, 1)
