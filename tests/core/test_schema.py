"""Runs as data: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from advice import Case, advises, case_id
from paragan.config.run import Run
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.core.schema import apply_overrides, did_you_mean, diff, from_dict, from_yaml, list_fields, to_dict, to_yaml
from paragan.game.ema import EMAConfig
from paragan.nets import Nets
from paragan.recipes import RECIPES, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_survives_yaml(name):
    run = get_recipe(name)
    assert from_dict(Run, from_yaml(to_yaml(run), "it")) == run


def test_a_setting_changes_only_its_field():
    before = to_dict(Run())
    after = apply_overrides(
        before, [("g.optimizer.lr", "1e-3"), ("data.mirror", "true"), ("evaluation.metrics", "[fd]")]
    )
    assert diff(to_dict(from_dict(Run, before)), to_dict(from_dict(Run, after))) == [
        ("data.mirror", False, True),
        ("g.optimizer.lr", 2e-4, 1e-3),
        ("evaluation.metrics", ["fd", "kid", "prdc"], ["fd"]),
    ]
    assert before == to_dict(Run())


def test_a_part_set_by_its_name_takes_that_parts_defaults():
    run = from_dict(Run, apply_overrides(to_dict(Run()), [("g.optimizer", "sgd"), ("g.optimizer.momentum", "0.5")]))
    assert to_dict(run.g.optimizer) == {"name": "sgd", "lr": 1e-2, "momentum": 0.5, "fused": True}
    short = from_dict(Run, apply_overrides({"g": {"optimizer": "sgd"}}, [("g.optimizer.momentum", "0.5")]))
    assert short.g == run.g


def test_the_last_setting_wins():
    assert apply_overrides({}, [("batch", "8"), ("batch", "16")]) == {"batch": 16}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1.5", 1.5), ("true", True), ("sgd", "sgd"), ("[1, 2]", [1, 2]), ("", ""), ("null", None), ("{", "{")],
)
def test_values_are_read_as_yaml_or_else_as_text(text, value):
    assert apply_overrides({}, [("field", text)]) == {"field": value}


@pytest.mark.parametrize("text", ["1:3", "10:50", "-1:1", "0.5:20"])
def test_a_range_or_ratio_is_no_number_in_base_60(text):
    assert apply_overrides({}, [("field", text)]) == {"field": text}


def test_a_value_is_no_group():
    with pytest.raises(UsageError, match=r"--batch\.size: batch is a value"):
        apply_overrides(to_dict(Run()), [("batch.size", "3")])


def test_differences_are_none_or_named_with_both_values():
    a = {"x": 1, "deep": {"y": [1, 2], "only a": 0}}
    b = {"x": 1, "deep": {"y": [1, 3]}, "only b": True}
    assert diff(a, a) == []
    assert diff(a, b) == [
        ("deep.y", [1, 2], [1, 3]),
        ("deep.only a", 0, None),
        ("only b", None, True),
    ]


def test_did_you_mean_names_the_nearest_or_all():
    assert did_you_mean("bach", ["batch", "seed"]) == "; did you mean batch?"
    assert did_you_mean("a.lead", ["a.read", "a.max_lead_rounds"]) == "; did you mean a.max_lead_rounds?"
    assert did_you_mean("a.lead", ["a.wire", "a.order"]) == "; there are: a.wire, a.order"  # not for their equal "a."
    assert did_you_mean("xyzzy", ["batch", "seed"]) == "; there are: batch, seed"


def test_every_field_is_listed_and_takes_the_default_that_is_listed():
    rows = [(field.name, field.default) for field in list_fields(Run) if "(of " not in field.values]
    assert from_dict(Run, apply_overrides(to_dict(Run()), rows)) == Run()
    listed = {field.name for field in list_fields(Run)}
    assert leaves(to_dict(Run())) <= listed


def leaves(data: dict, prefix: str = "") -> set[str]:
    """The dotted names of all values, but for the names of parts."""
    names: set[str] = set()
    for key, value in data.items():
        if isinstance(value, dict):
            names |= leaves(value, f"{prefix}{key}.")
        elif key != "name":
            names.add(prefix + key)
    return names


WRONG = {  # (field, value): how the refusal begins
    ("batch", "many"): "batch=many: input should be a valid integer",
    ("on_divergence.lr_factor", ".nan"): "on_divergence.lr_factor=nan: input should be a finite number",
    ("on_divergence.lr_factor", ".inf"): "on_divergence.lr_factor=inf: input should be a finite number",
    ("on_divergence.lr_factor", "2"): "on_divergence.lr_factor=2: input should be less than or equal to 1",
    ("health.collapse_factor", ".nan"): "health.collapse_factor=nan: input should be a finite number",
    ("ema.half_life_kimg", ".nan"): "ema.half_life_kimg=nan: input should be a finite number",
    ("ema.half_life_kimg", "-5"): "ema.half_life_kimg=-5: input should be greater than or equal to 0",
    ("timeout_s", "1e15"): "timeout_s=1e15: input should be less than or equal to 10000000",
    ("ema.rampup", "-1"): "ema.rampup=-1: input should be greater than or equal to 0",
    ("g.optimizer.weight_decay", ".inf"): "g.optimizer.weight_decay=inf: input should be a finite number",
    ("device.concat_real_fake", "perhaps"): "device.concat_real_fake=perhaps: input should be auto | true | false",
    ("device.channels_last", "X"): "device.channels_last=X: input should be true | false | G | D",
    ("batch", "0"): "batch=0: input should be greater than or equal to 1",
    ("bach", "1"): "there is no field bach; did you mean batch?",
    ("optimizer", "sgd"): "there is no field optimizer; did you mean g.optimizer or d.optimizer?",
    ("workers", "2"): "there is no field workers; did you mean data.prefetch.workers?",
    ("nets.width", "0"): "nets.width=0: input should be greater than or equal to 1",
    ("g.optimizer.lr", "-1"): "g.optimizer.lr=-1: input should be greater than 0",
    ("g.optimizer.betas", "[0, 1]"): "g.optimizer.betas.1=1: input should be less than 1",
    ("strategy", "7"): "strategy: there is no 7; there are: sync, quantized, ",
    ("d.optimizer", "adamm"): "d.optimizer: there is no adamm; did you mean adam?",
    ("objective.loss", "hinged"): "objective.loss=hinged: input should be 'hinge'",
    ("g.optimizer.betas", "0.5"): "g.optimizer.betas=0.5: input should be a list: g.optimizer.betas=[0.5]",
    ("data", "null"): "data=None: is a section of several fields. Set one of data.path, ",
    ("objective.augment.kimg", "3"): "there is no field objective.augment.kimg where objective.augment=none: it is of "
    "objective.augment=ada",
    ("nets.attention", "8"): "there is no field nets.attention where nets=dcgan: it is of nets=sagan, biggan",
}


def test_data_may_be_named_by_their_path_alone():
    assert from_dict(Run, {"data": "points.npz"}) == from_dict(Run, {"data": {"path": "points.npz"}})


def test_errors_of_a_record_name_no_field():
    for kind, data, what in (
        (Run, 3, "3: input should be a dictionary or an instance of Run"),
        (Run, {"g": {"optimizer": {}}}, "g.optimizer has no name: g.optimizer=NAME selects one"),
        (Nets, {}, "it has no name"),
        (Nets, "vgg", "there is no vgg; there are: dcgan"),
        (Nets, {"name": "dcgan", "widht": 8}, "there is no field widht; did you mean width?"),
        (Nets, {"name": "dcgan", "width": "a"}, "width=a: input should be a valid integer"),
    ):
        with pytest.raises(UsageError) as raised:
            from_dict(kind, data)
        assert str(raised.value).startswith(what)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_is_wrong_is_named_as_a_user_would_type_it(field, value):
    with pytest.raises(UsageError) as raised:
        from_dict(Run, apply_overrides(to_dict(Run()), [(field, value)]))
    assert str(raised.value).startswith(WRONG[field, value])


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_constructor_names_what_is_wrong_as_a_file_does(field, value):
    with pytest.raises(UsageError) as raised:
        Run(**apply_overrides(to_dict(Run()), [(field, value)]))
    assert str(raised.value).startswith(WRONG[field, value])


def test_a_wrong_value_by_position_is_named_by_its_field():
    with pytest.raises(UsageError, match=r"^path=3: input should be a valid string$"):
        DataOptions(3)  # pyright: ignore
    with pytest.raises(UsageError, match=r"^rampup=-1: input should be greater than or equal to 0$"):
        EMAConfig(1.0, -1)
    with pytest.raises(UsageError, match=r"^rampup=-1: input should be greater"):
        dataclasses.replace(EMAConfig(), rampup=-1)


SPELLING_CASES = [
    Case("--nets.widht=8", "there is no field nets.widht; did you mean nets.width?", ("~nets.widht --nets.width=8",)),
    Case("--d.optimizer=adamm", "d.optimizer: there is no adamm; did you mean adam?", ("--d.optimizer=adam",)),
    Case(
        "--optimizer=sgd",
        "there is no field optimizer; did you mean g.optimizer or d.optimizer?",
        ("~optimizer --g.optimizer=sgd", "~optimizer --d.optimizer=sgd"),
    ),
]


@pytest.mark.parametrize("case", SPELLING_CASES, ids=case_id)
def test_what_was_meant_is_accepted(case, check_advice):
    check_advice(case, ["train", "digits", "-n"])


def test_a_class_is_found_in_the_folder_of_its_module_as_advised(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from paragan.core.schema import config_class\n"
        "@config_class\nclass Objective:\n"
        "    name: str = 'mine'\n    second_order: bool = False\n"
        "    discriminator = generator = lambda *arguments: None\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_losses:Objective", "my_losses:"):
        with advises("Use module:Class, and start in the folder of the module"):
            from_dict(Run, {"objective": {"name": name}})
    monkeypatch.chdir(tmp_path)
    assert from_dict(Run, {"objective": {"name": "my_losses:Objective"}}).objective.second_order is False


def test_every_field_has_a_meaning():
    """`paragan train --fields` shows it; see paragan/core/field_docs.py for where it is written."""
    is_choice = {field.name.rpartition(".")[0] for field in list_fields(Run)}  # sections have a text of their own
    assert [f.name for f in list_fields(Run) if not f.meaning and f.name not in is_choice] == []
