"""Runs as data: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import pytest

from paragan.config.run import Run
from paragan.core.errors import Unusable
from paragan.core.schema import build, differences, fields_help, from_yaml, nearest, override, plain, to_yaml
from paragan.nets import Nets
from paragan.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_survives_yaml(name):
    run = recipe(name)
    assert build(Run, from_yaml(to_yaml(run), "it")) == run


def test_a_setting_changes_its_field_and_nothing_else():
    before = plain(Run())
    after = override(before, [("g.optimizer.lr", "1e-3"), ("data.mirror", "true"), ("evaluation.metrics", "[fd]")])
    assert differences(plain(build(Run, before)), plain(build(Run, after))) == [
        ("data.mirror", False, True),
        ("g.optimizer.lr", 2e-4, 1e-3),
        ("evaluation.metrics", ["fd", "kid", "prdc"], ["fd"]),
    ]
    assert before == plain(Run())


def test_a_part_set_by_its_name_takes_that_parts_defaults():
    run = build(Run, override(plain(Run()), [("g.optimizer", "sgd"), ("g.optimizer.momentum", "0.5")]))
    assert plain(run.g.optimizer) == {"name": "sgd", "lr": 1e-2, "momentum": 0.5, "fused": True}
    short = build(Run, override({"g": {"optimizer": "sgd"}}, [("g.optimizer.momentum", "0.5")]))
    assert short.g == run.g


def test_the_last_setting_wins():
    assert override({}, [("batch", "8"), ("batch", "16")]) == {"batch": 16}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1.5", 1.5), ("true", True), ("sgd", "sgd"), ("[1, 2]", [1, 2]), ("", ""), ("null", None), ("{", "{")],
)
def test_values_are_read_as_yaml_or_else_as_text(text, value):
    assert override({}, [("field", text)]) == {"field": value}


def test_a_value_is_no_group():
    with pytest.raises(Unusable, match=r"--batch\.size: batch is a value"):
        override(plain(Run()), [("batch.size", "3")])


def test_differences_are_none_or_named_with_both_values():
    a = {"x": 1, "deep": {"y": [1, 2], "only a": 0}}
    b = {"x": 1, "deep": {"y": [1, 3]}, "only b": True}
    assert differences(a, a) == []
    assert differences(a, b) == [
        ("deep.y", [1, 2], [1, 3]),
        ("deep.only a", 0, None),
        ("only b", None, True),
    ]


def test_the_nearest_name_or_all_of_them():
    assert nearest("bach", ["batch", "seed"]) == "; did you mean batch?"
    assert nearest("xyzzy", ["batch", "seed"]) == "; there are: batch, seed"


def test_every_field_is_listed_and_takes_the_default_that_is_listed():
    rows = [(name, default) for name, what, default in fields_help(Run) if "(of " not in what]
    assert build(Run, override(plain(Run()), rows)) == Run()
    listed = {name for name, _, _ in fields_help(Run)}
    assert leaves(plain(Run())) <= listed


def leaves(data: dict, prefix: str = "") -> set[str]:
    """The dotted names of all values, but for the names of parts."""
    found: set[str] = set()
    for key, value in data.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{key}.")
        elif key != "name":
            found.add(prefix + key)
    return found


WRONG = {  # (field, value): how the refusal begins
    ("batch", "many"): "batch=many: input should be a valid integer",
    ("guard.lr_factor", ".nan"): "guard.lr_factor=nan: input should be a finite number",
    ("guard.lr_factor", ".inf"): "guard.lr_factor=inf: input should be a finite number",
    ("guard.lr_factor", "2"): "guard.lr_factor=2: input should be less than or equal to 1",
    ("health.collapse", ".nan"): "health.collapse=nan: input should be a finite number",
    ("average.half_life_kimg", ".nan"): "average.half_life_kimg=nan: input should be a finite number",
    ("average.half_life_kimg", "-5"): "average.half_life_kimg=-5: input should be greater than or equal to 0",
    ("timeout_s", "1e15"): "timeout_s=1e15: input should be less than or equal to 10000000",
    ("average.rampup", "-1"): "average.rampup=-1: input should be greater than or equal to 0",
    ("g.optimizer.weight_decay", ".inf"): "g.optimizer.weight_decay=inf: input should be a finite number",
    ("device.one_call", "perhaps"): "device.one_call=perhaps: input should be auto | true | false",
    ("device.channels_last", "X"): "device.channels_last=X: input should be true | false | G | D",
    ("batch", "0"): "batch=0: input should be greater than or equal to 1",
    ("bach", "1"): "there is no field bach; did you mean batch?",
    ("nets.width", "0"): "nets.width=0: input should be greater than or equal to 1",
    ("g.optimizer.lr", "-1"): "g.optimizer.lr=-1: input should be greater than 0",
    ("g.optimizer.betas", "[0, 1]"): "g.optimizer.betas.1=1: input should be less than 1",
    ("d.optimizer", "adamm"): "d.optimizer: there is no adamm; did you mean adam?",
    ("objective.loss", "hinged"): "objective.loss=hinged: input should be 'hinge'",
    ("g.optimizer.betas", "0.5"): "g.optimizer.betas=0.5: input should be a list: --g.optimizer.betas=[0.5]",
    ("data", "null"): "data=None: input should be",
    ("objective.augment.kimg", "3"): "there is no field objective.augment.kimg where objective.augment=none: it is of "
    "objective.augment=ada",
    ("nets.attention", "8"): "there is no field nets.attention where nets=dcgan: it is of nets=sagan, biggan",
}


def test_what_is_wrong_as_a_whole_is_told_without_a_field():
    for kind, data, what in (
        (Run, 3, "3: input should be a dictionary or an instance of Run"),
        (Run, {"g": {"optimizer": {}}}, "g.optimizer has no name: --g.optimizer=NAME says which one it is"),
        (Nets, {}, "it has no name"),
        (Nets, "vgg", "there is no vgg; there are: dcgan"),
        (Nets, {"name": "dcgan", "widht": 8}, "there is no field widht; did you mean width?"),
        (Nets, {"name": "dcgan", "width": "a"}, "width=a: input should be a valid integer"),
    ):
        with pytest.raises(Unusable) as refused:
            build(kind, data)
        assert str(refused.value).startswith(what)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_is_wrong_is_named_as_a_user_would_type_it(field, value):
    with pytest.raises(Unusable) as refused:
        build(Run, override(plain(Run()), [(field, value)]))
    assert str(refused.value).startswith(WRONG[field, value])
