"""A model is read consistently while a run replaces it."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest
import torch

import paragan
from paragan.core.errors import UsageError
from paragan.models import model_files
from paragan.models.model import make_model_config, save_model
from paragan.models.model_files import read_consistent, try_read_consistent
from paragan.models.sampler import LabelPrior
from paragan.nets import DCGAN, Spec
from paragan.train.callbacks import scoring
from processes import usage_error

NETS, SPEC = DCGAN(width=4, latent=6), Spec(8, 1)


def write(folder, seed):
    """Write a model into a folder, as a checkpoint does."""
    torch.manual_seed(seed)
    pair = NETS.generator(SPEC), NETS.discriminator(SPEC)
    save_model(folder, *pair, make_model_config(NETS, SPEC, LabelPrior(()), (), kimg=float(seed), batch_norm="none"))


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model", 1)
    return tmp_path / "model"


def test_a_reader_waits_while_the_model_is_replaced(model, tmp_path):
    write(tmp_path / "next", 2)
    for name in ("model", "discriminator"):
        shutil.copy(tmp_path / "next" / f"{name}.safetensors", model)
    later = threading.Timer(0.3, lambda: (tmp_path / "next" / "config.json").replace(model / "config.json"))
    later.start()
    try:
        loaded = paragan.load(model)
    finally:
        later.join()
    assert loaded.kimg == 2
    write(tmp_path / "next", 2)
    weights = paragan.load(tmp_path / "next").g.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.g.state_dict().items())


def test_a_reader_never_mixes_two_models(model):
    stop = threading.Event()

    def write_models():
        while not stop.is_set():
            for seed in (2, 1):
                write(model, seed)

    weights = {}
    for seed in (2, 1):
        write(model, seed)
        weights[float(seed)] = read_consistent(model).weights
    writer = threading.Thread(target=write_models)
    writer.start()
    try:
        for _ in range(200):
            snapshot = try_read_consistent(model)  # None while the files are being replaced, however long that takes
            assert snapshot is None or snapshot.weights == weights[snapshot.config["kimg"]]
    finally:
        stop.set()
        writer.join()
    assert read_consistent(model).weights == weights[1.0]


def test_weights_of_another_model_are_rejected(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "REPLACE_TIMEOUT_S", 0.0)
    write(tmp_path / "other", 2)
    shutil.copy(tmp_path / "other" / "model.safetensors", model)
    start = time.monotonic()
    for words in (
        ("sample", model, "--out", tmp_path / "a.png"),
        ("eval", model, "--data", "digits", "--metrics=fd", "--count=16"),
        ("export", model, "--out", tmp_path / "out"),
        ("train", "digits", "--init-from", model, "--kimg=0.01", "--run-dir", tmp_path / "run"),
    ):
        line = usage_error(*words)
        assert f"{model}: the weights do not match config.json" in line, line
    assert time.monotonic() - start < 30
    assert not (tmp_path / "out").exists()


def test_parts_of_another_model_are_ignored(model, tmp_path):
    """An export over a folder that had a discriminator, say."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"crc32": {"model": config["crc32"]["model"]}}))
    assert set(read_consistent(model).weights) == {"model"}
    del config["crc32"]  # of older ones, and of those who changed their weights by hand
    (model / "config.json").write_text(json.dumps(config))
    assert set(read_consistent(model).weights) == {"model", "discriminator"}


class TwoRanks:
    """A world of two ranks. The other one reads the models of `words`, one after the other."""

    def __init__(self, *words):
        self.words = list(words)

    def all_gather_str(self, word):
        return [word, self.words.pop(0) or word]


def test_ranks_score_the_same_model(model):
    loads = []

    def load():
        loads.append(1)
        return paragan.load(model)

    assert scoring.load_same_model(TwoRanks("another", ""), load).kimg == 1
    assert len(loads) == 2
    with pytest.raises(UsageError, match="ranks read different models"):
        scoring.load_same_model(TwoRanks(*["another"] * scoring.MAX_READ_ATTEMPTS), load)


def test_a_model_is_loaded_in_one_line(finished):
    model = paragan.load(str(finished))
    images = model.sampler.images(range(4), model.sampler.labels(range(4), 0))
    assert images.shape == (4, 1, 8, 8)
    assert images.dtype == torch.uint8
