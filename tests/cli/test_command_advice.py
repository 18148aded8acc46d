"""Advice of commands whose inputs have to be made first: followed, it leads to a command that is accepted."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

from advice import Case
from models import reference_models
from models.reference_models import ReferenceConfig
from paragan.core.schema import read_yaml, to_yaml
from paragan.data import decode
from paragan.models import hub, server
from processes import TINY_RUN_ARGS


@pytest.fixture
def evaluated(finished, tmp_path, monkeypatch):
    """A function that returns a copy of the run `finished` with other fields of `evaluation` in its record."""
    monkeypatch.chdir(tmp_path)

    def copy(**fields):
        folder = shutil.copytree(finished, tmp_path / "run")
        record = read_yaml(folder / "run.yaml")
        record["evaluation"] |= fields
        (folder / "run.yaml").write_text(to_yaml(record))
        return folder

    return copy


def test_a_run_without_scores_is_followed_with_some(evaluated, check_advice):
    evaluated(metrics=[])
    case = Case(
        "eval run --follow", "--metrics: this run computes no scores. Use --metrics fd,kid", ("--metrics=fd,kid",)
    )
    check_advice(case)


def test_features_of_user_code_are_named(evaluated, check_advice, tmp_path, monkeypatch):
    (tmp_path / "own_features.py").write_text("import torch\n\n\ndef flat():\n    return torch.nn.Flatten()\n")
    monkeypatch.syspath_prepend(tmp_path)
    evaluated(features="own_features:flat")
    case = Case(
        "eval run --metrics=fd",
        "this run is scored with your own code, which files never run. Use --features own_features:flat",
        ("--features=own_features:flat",),
    )
    check_advice(case)
    sys.modules.pop("own_features")


def test_a_model_is_pushed_in_one_format(check_advice, monkeypatch):
    monkeypatch.setattr(hub, "push_model", lambda model, name: f"https://hub.example/{name}")
    case = Case(
        "export RUN --push=user/name --format=onnx",
        "--format onnx: --push writes safetensors. Leave --format out",
        ("~format",),
    )
    check_advice(case)


def test_the_epsilon_of_an_import_is_in_range(check_advice, tmp_path):
    config = ReferenceConfig("biggan-pytorch", 32, 4, 3, 9, spectral=False, attention=(-1, -1))
    torch.save(reference_models.make_generator_state(config), tmp_path / "g.pth")
    case = Case(
        "import NEW/g.pth --from=biggan-pytorch --out=NEW/model --bn-eps=1",
        "Use 0 to 0.1; 1e-5 and 1e-4 are usual",
        ("--bn-eps=0", "--bn-eps=0.1 --out=NEW/other", "--bn-eps=1e-4 --out=NEW/third"),
    )
    check_advice(case)


def test_a_page_is_served_on_a_port(check_advice, monkeypatch):
    ports = []
    monkeypatch.setattr(server, "serve", lambda model, host, port, out: ports.append(port))
    check_advice(Case("serve RUN --port=70000", "Use 0 to 65535 (0: any free port)", ("--port=0", "--port=65535")))
    assert ports == [0, 65535]


def test_as_many_samples_as_memory_holds(check_advice, monkeypatch):
    monkeypatch.setattr(decode, "ram_bytes", lambda: 4 * 10 * 64 * 64)
    case = Case(
        "sample RUN --count=11 --out=NEW/a.png",
        "--count 11: more than the memory of this machine holds. Use at most 10 samples; another --seed makes more",
        ("--count=10", "--count=10 --seed=1"),
    )
    check_advice(case)


def test_a_launcher_says_how_many_ranks_there_are(check_advice, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    case = Case("--ranks=2", "--ranks 2: the launcher started 1. Leave --ranks out", ("~ranks",))
    check_advice(case, ["train", *TINY_RUN_ARGS, "-n"])


def test_a_name_is_as_long_as_a_file_system_takes(check_advice, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "r" * 200)
    name = "r" * 300
    case = Case(
        f"report {name} --out report.html",
        "too long for the name of a file. Use at most 200 characters",
        (f"~{name} {'r' * 200}",),
    )
    check_advice(case)
