"""Loading a model, exporting it with a model card, and the hub format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import paragan
from advice import Case, advises, case_id
from fake_records import RATE, write_recordings
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile
from paragan.models.model import make_model_config, save_model
from paragan.models.model_card import make_model_card
from paragan.models.sampler import LabelPrior
from paragan.nets import HiFiGAN, Spec
from processes import run_cli, usage_error


def test_samples_depend_on_seed_and_index(small):
    model = paragan.load(small)
    images = model.sample(5, labels=[2, "ant"], truncation=0.7, seed=3)
    assert (images.shape, images.dtype) == ((5, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(model.labels(5, [2, "ant"]), [2, 0, 2, 0, 2])
    np.testing.assert_array_equal(images[:2], model.sample(2, labels=["cat", "0"], truncation=0.7, seed=3))
    np.testing.assert_array_equal(
        model.sample(4), model.sampler.images(range(4), model.labels(4)).numpy().transpose(0, 2, 3, 1)
    )
    assert isinstance(model.g, torch.nn.Module)
    assert model.to("cpu").sampler.device == torch.device("cpu")
    with pytest.raises(UsageError, match="there is no class 'dog'"):
        model.sample(1, labels=["dog"])


@pytest.mark.parametrize("truncation", [0, 0.04, 1.5])
def test_truncation_is_in_the_range_advised(truncation, small):
    model = paragan.load(small)
    with advises(f"truncation={truncation}: out of range. Use a number between 0.05 and 1 (1: no truncation)"):
        model.sample(1, truncation=truncation)
    for advised in (0.05, 0.5, 1):
        assert model.sample(1, truncation=advised).shape == (1, 32, 32, 3)


def test_a_generator_is_of_a_label_as_advised(per_label):
    model = paragan.load(per_label)
    with advises("model.g: this model has a generator for each label. Use model.sampler.for_label(0).g"):
        _ = model.g
    assert isinstance(model.sampler.for_label(0).g, torch.nn.Module)


CASES = [
    Case(
        "sample NEW/nowhere --count=1 --out=NEW/a.png",
        "NEW/nowhere: does not exist. Use a run folder of `paragan train`",
        ("~NEW/nowhere RUN",),
    ),
    Case(
        "export RUN --out=DIR/folder",
        "--out DIR/folder: a file, or a folder with files in it. Use an empty or a new folder",
        ("--out=NEW/empty", "--out=NEW/new"),
    ),
    Case(
        "train digits -n --nets.width=4 --nets.latent=8 --lanes=2 --init-from=DIR",
        "--init-from DIR: no model.safetensors. Use a run folder or its model folder",
        ("--init-from=RUN", "--init-from=RUN/model"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_advice_on_folders_works(case, check_advice, tmp_path):
    (tmp_path / "empty").mkdir()
    check_advice(case)


def test_load_from_run_best_model_and_file(finished, tmp_path):
    shutil.copytree(finished / "model", tmp_path / "best")
    expected = paragan.load(finished).sample(3)
    assert repr(paragan.load(finished)).startswith("Model(1x8x8, 10 classes, 0.16 kimg, from ")
    for where in (finished / "model", finished / "model" / "model.safetensors", tmp_path / "best"):
        np.testing.assert_array_equal(paragan.load(where).sample(3), expected)


def test_an_export_describes_itself(finished, tmp_path):
    assert run_cli("export", finished, "--out", tmp_path / "out").status == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "README.md", "samples.png"}
    np.testing.assert_array_equal(paragan.load(tmp_path / "out").sample(3), paragan.load(finished).sample(3))
    _, head, text = (tmp_path / "out" / "README.md").read_text().split("---", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "paragan"
    assert "license" not in about  # whoever publishes it says
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == rows[-1]["value"]
    assert rows[-1]["fingerprint"] in text
    assert "paragan.load(" in text
    assert "with files in it" in usage_error("export", finished, "--out", tmp_path / "out")


def test_a_card_has_the_scores_of_its_model(small, tmp_path):
    shutil.copytree(small, tmp_path / "run" / "model")
    records = JsonlFile(tmp_path / "run" / "metrics.jsonl")
    for kimg, value in ((0.5, 9.0), (1.0, 8.0), (1.0, 7.0), (2.0, 6.0)):
        records.append(
            {"name": "fd_pixels", "value": value, "kimg": kimg, "protocol": {"count": 5}, "fingerprint": "f"}
        )
    text = make_model_card(paragan.load(tmp_path / "run"))
    assert "| `fd_pixels` | 7 | `f` | count=5 |" in text
    assert "| 9 |" not in text


def test_the_card_of_a_vocoder_says_how_to_run_it(tmp_path):
    data = write_recordings(tmp_path / "data")
    nets, spec = HiFiGAN(width=4, mels=8, n_fft=64, resolutions=((64, 16),)), Spec(0, 0, 0, (1, 512), sample_rate=RATE)
    config = make_model_config(nets, spec, LabelPrior(()), [], kimg=1.0)
    save_model(tmp_path / "model", nets.generator(spec), None, config)
    model = paragan.load(tmp_path / "model", dataset=paragan.DataOptions(str(data), segment=512))
    _, head, text = make_model_card(model).split("---", 2)
    assert yaml.safe_load(head)["pipeline_tag"] == "audio-to-audio"
    assert "A generator of waves [1, 512] at 8000 Hz, which is given data" in text
    code = text.split("```python")[1].split("```")[0].replace("PATH or user/name", str(tmp_path / "model"))
    variables: dict[str, Any] = {}
    exec(code.replace("DATA", str(data)), variables)
    assert variables["samples"].shape == (16, 1, 512)
    folder = str(tmp_path / "model")
    assert run_cli("sample", folder, "--data", data, "--count=2", "--out", tmp_path / "waves").status == 0
    assert len(list((tmp_path / "waves").glob("*.wav"))) == 2
    assert run_cli("eval", folder, "--data", data, "--metrics=stft", "--count=4").status == 0
    images = Path(paragan.__file__).parents[1] / "docs" / "figures"
    assert "and for audio, and" in usage_error(
        "sample", folder, "--data", images, "--count=2", "--out", tmp_path / "more"
    )
    with advises("hifigan: its input is data. Use --data PATH (in Python, dataset=paragan.DataOptions(PATH))"):
        paragan.load(tmp_path / "model")
    faster = write_recordings(tmp_path / "faster", rate=16000)
    with advises("--data: audio of 16000 Hz, and the model was trained on 8000 Hz. Use audio of 8000 Hz"):
        paragan.load(tmp_path / "model", dataset=paragan.DataOptions(str(faster), segment=512))
    with advises("--data: holds [3, 8, 8], and the model was trained on records [1, 512]. Use such data"):
        paragan.load(tmp_path / "model", dataset=paragan.from_arrays(np.zeros((4, 8, 8, 3), np.uint8)))


def test_export_of_a_per_label_model(per_label, tmp_path):
    assert "with 2 generators" in run_cli("export", per_label, "--out", tmp_path / "out").out
    np.testing.assert_array_equal(paragan.load(tmp_path / "out").sample(5), paragan.load(per_label).sample(5))


def test_hub_folders(small, tmp_path):
    model = paragan.load(small)
    paragan.HubModel(model).save_pretrained(tmp_path / "pretrained")
    paragan.HubModel(model).save_pretrained(tmp_path / "pretrained")  # as its other models, it replaces
    back = paragan.HubModel.from_pretrained(str(tmp_path / "pretrained")).model
    np.testing.assert_array_equal(back.sample(3), model.sample(3))
    assert "library_name: paragan" in (tmp_path / "pretrained" / "README.md").read_text()
    assert json.loads((tmp_path / "pretrained" / "config.json").read_text())["classes"] == ["ant", "bee", "cat"]


def test_invalid_models_are_rejected(small, tmp_path):
    (tmp_path / "model.pkl").write_bytes(b"")
    with pytest.raises(UsageError, match="Pickles are not loaded"):
        paragan.load(tmp_path / "model.pkl")
    config = json.loads((small / "config.json").read_text())
    config["net"]["width"] = 8
    shutil.copytree(small, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="of another width"):
        paragan.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": 3}, "3: input should be a dictionary or an instance of Spec"),
        ({"spec": {"resolution": "big"}}, "resolution=big: not a size"),
        ({"spec": {"resolution": 25, "channels": 3, "classes": 3}}, "data.resolution=25"),
        ({"spec": None}, "None: input should be"),
        ({"net": "vgg"}, "there is no vgg; there are: "),
        ({"net": {}}, "it has no name"),
        ({"net": [1]}, "input should be a"),
        ({"net": {"name": "dcgan", "widht": 8}}, "there is no field widht; did you mean width?"),
        ({"net": {"name": "dcgan", "width": 10**12}}, "memory"),
        ({"net": {"name": "dcgan", "width": 2000}}, "larger than the weights"),
        ({"net": {"name": "biggan", "width": 600}}, "larger than the weights"),
        ({"prior": 5}, "not iterable"),
        ({"prior": ["much"]}, "could not convert"),
        ({"prior": [1.0]}, "prior does not fit"),
        ({"classes": 9}, "not iterable"),
        ({"classes": [1, 2, 3]}, "classes are not names"),
        ({"classes": ["ant"]}, "there are 1 classes, and spec has 3"),
        ({"kimg": "long"}, "could not convert"),
        ({"crc32": {"model": "a"}}, "crc32 must hold integers"),
        ({"crc32": 7}, "not iterable"),
        ({"format": 99}, "model format 99"),
        ({"format": 1}, "model format 1; this version of paragan reads format 2"),
        ({"format": None}, "TypeError"),
    ],
)
def test_an_invalid_config_names_its_file(change, message, small, tmp_path):
    shutil.copytree(small, tmp_path / "other")
    config = json.loads((small / "config.json").read_text()) | change
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    line = usage_error("sample", tmp_path / "other", "--out", tmp_path / "a.png")
    assert message in line
    assert str(tmp_path / "other") in line


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"7"])
def test_an_unreadable_config_names_its_file(text, small, tmp_path):
    shutil.copytree(small, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_bytes(text)
    assert f"{tmp_path / 'other'}/config.json cannot be read" in usage_error(
        "sample", tmp_path / "other", "--out=a.png"
    )
