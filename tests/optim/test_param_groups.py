"""Groups of parameters are trained as torch's optimizers train groups, and frozen ones do not change by a bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny_run
from advice import advises
from paragan.comm.exchange import NoExchange
from paragan.config.resolve import resolve
from paragan.config.run import Run
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, from_yaml, to_yaml
from paragan.game.ema import EMAConfig
from paragan.game.player import Player
from paragan.optim.compatibility import ALTERNATIVES, check_groups
from paragan.optim.optimistic import extragradient, optimistic
from paragan.optim.optimizers import SGD, Adam, Lookahead, PlayerOptim, RMSprop, build_optimizer
from paragan.optim.param_groups import ParamGroup
from paragan.optim.third_party import third_party_config
from paragan.recipes import build_run
from paragan.train.loop import play_round
from processes import TINY_RUN_ARGS, run_cli, usage_error

GROUPS = (ParamGroup("1.*", lr_factor=0.1), ParamGroup("*.bias", lr_factor=3.0, weight_decay=0.0))
WRAPPERS = {"plain": lambda optimizer: optimizer, "optimistic": optimistic, "extragradient": extragradient}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def loss(model, step):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().sum()


def make_player(model, player_optim, wrapper=lambda optimizer: optimizer, elementwise=True):
    return Player(
        "P",
        model,
        lambda parameters: build_optimizer(player_optim.optimizer, parameters, wrapper),
        elementwise=elementwise,
        groups=player_optim.select_parameters("g", dict(model.named_parameters())),
        ema=EMAConfig(half_life_kimg=0.003, rampup=0),
    )


def take_steps(player, steps, start=0):
    for step in range(start, start + steps):
        with player.flat.exchanging(NoExchange(), step), player.requiring_grad():
            loss(player.net, step).backward()
        player.step(step + 1, 1)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(lr=0.1, weight_decay=0.1, fused=False),
        SGD(lr=0.01, fused=False),
        Lookahead(inner=Adam(lr=0.1, fused=False)),
    ],
)
@pytest.mark.parametrize("elementwise", [True, False])
def test_groups_are_those_of_plain_torch(optimizer, wrapper, elementwise):
    groups = GROUPS if optimizer.name == "adam" else (GROUPS[0], ParamGroup("*.bias", lr_factor=3.0))
    plain, flat = net(), net()
    first, second, _, last = plain
    reference = build_optimizer(
        optimizer,
        [
            {"params": [first.weight, last.weight]},
            {"params": [second.weight, second.bias], "lr": 0.1 * optimizer.lr},
            {"params": [first.bias, last.bias], "lr": 3 * optimizer.lr}
            | ({"weight_decay": 0.0} if optimizer.name == "adam" else {}),
        ],
        WRAPPERS[wrapper],
    )
    for step in range(10):
        reference.zero_grad()
        loss(plain, step).backward()
        reference.step()
    player = make_player(flat, PlayerOptim(optimizer, groups=groups), WRAPPERS[wrapper], elementwise)
    take_steps(player, 10)
    assert [len(group["params"]) for group in player.optimizer.param_groups] == [2, 1 if elementwise else 2, 2]
    for p, q in zip(plain.parameters(), flat.parameters(), strict=True):
        assert torch.equal(p, q)


def test_norms_and_biases_without_weight_decay_are_adam_without_it():
    optimizer = Adam(lr=0.1, weight_decay=0.1, fused=False)
    plain, flat = net(), net()
    weights = [layer.weight for layer in plain if isinstance(layer, nn.Linear)]
    biases = [layer.bias for layer in plain if isinstance(layer, nn.Linear)]
    options = {"lr": 0.1, "betas": optimizer.betas, "foreach": False}
    references = (torch.optim.AdamW(weights, weight_decay=0.1, **options), torch.optim.Adam(biases, **options))
    for step in range(10):
        plain.zero_grad()
        loss(plain, step).backward()
        for reference in references:
            reference.step()
    take_steps(make_player(flat, PlayerOptim(optimizer, decay_norms_and_biases=False)), 10)
    for p, q in zip(plain.parameters(), flat.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_group_may_be_the_only_one_that_decays():
    optimizer = Adam(lr=0.1, fused=False)
    alone = make_player(net(), PlayerOptim(optimizer, groups=(ParamGroup("0.weight", weight_decay=0.5),)))
    plain = make_player(net(), PlayerOptim(optimizer))
    take_steps(alone, 1)
    take_steps(plain, 1)
    before = net()[0].weight
    torch.testing.assert_close(alone.net[0].weight, plain.net[0].weight - 0.1 * 0.5 * before)
    assert torch.equal(alone.net[1].weight, plain.net[1].weight)


def test_without_groups_the_optimizer_has_one_vector():
    player = make_player(net(), PlayerOptim())
    ((vector,),) = [group["params"] for group in player.optimizer.param_groups]
    assert vector.data_ptr() == player.flat.params.data_ptr()


def test_a_factor_stays_under_a_schedule():
    player = make_player(net(), PlayerOptim(Adam(lr=0.1), groups=GROUPS))
    player.lr_factor = lambda images: 0.5
    player.prepare_step(1)
    assert [group["lr"] for group in player.optimizer.param_groups] == pytest.approx([0.05, 0.005, 0.15])


# Freezing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "optimizer", [Adam(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1), Lookahead(inner=RMSprop(lr=0.1), k=4)]
)
def test_a_frozen_group_does_not_change_by_a_bit_and_its_average_follows(optimizer, wrapper):
    groups = (ParamGroup("1.*", freeze_from_kimg=0.005), ParamGroup("3.*", freeze_from_kimg=0))
    model = net()
    last = [p.clone() for p in model[3].parameters()]
    player = make_player(model, PlayerOptim(optimizer, groups=groups), WRAPPERS[wrapper])
    take_steps(player, 4)
    fourth = [p.clone() for p in model[1].parameters()]
    take_steps(player, 1, start=4)
    frozen = [p.clone() for p in model[1].parameters()]
    first = model[0].weight.clone()
    assert not torch.equal(frozen[0], fourth[0])
    take_steps(player, 60, start=5)
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), frozen, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model[3].parameters(), last, strict=True))
    assert not torch.equal(model[0].weight, first)
    with player.using_ema():
        for p, q in zip(model[1].parameters(), frozen, strict=True):
            torch.testing.assert_close(p, q)


def test_the_norm_that_is_clipped_is_of_what_is_not_frozen():
    groups = (ParamGroup("3.*", freeze_from_kimg=0),)
    player = Player(
        "P",
        net(),
        SGD(lr=1.0, fused=False).build,
        max_norm=0.5,
        groups=PlayerOptim(SGD(lr=1.0), groups=groups).select_parameters("g", dict(net().named_parameters())),
    )
    before = net()
    take_steps(player, 1)
    moved = [(p - q).detach().flatten() for p, q in zip(player.net.parameters(), before.parameters(), strict=True)]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.5, rel=1e-5)
    assert all(not part.any() for part in moved[-2:])


FROZEN = ("g.groups=[{pattern: 'start.*', freeze_from_kimg: 0.064}, {pattern: '*.bias', lr_factor: 0.5}]",)


def test_ranks_freeze_in_the_same_round(pool):
    def start_weights(world):
        s = tiny_run.make_session(tiny_run.make_run(*FROZEN), world)
        weights = []
        for _ in range(6):  # of 16 images
            play_round(s)
            weights.append(s.game.g.net.start.weight.clone())
        return weights

    one = start_weights(tiny_run.World.solo())
    assert not torch.equal(one[2], one[3])
    assert torch.equal(one[3], one[4])
    assert torch.equal(one[3], one[5])
    first, second = pool(2, start_weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first[5], one[5], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [("strategy=gossip",), ("strategy=sync", "strategy.sync_period=2")])
def test_nothing_is_frozen_where_ranks_differ(settings):
    name = settings[0].removeprefix("strategy=")
    with advises(
        f"g.groups.0.freeze_from_kimg=0.064: ranks hold different weights under --strategy {name} as it is set, and "
        "frozen ones would never agree. Use --strategy sync, or leave freeze_from_kimg out"
    ):
        validate(tiny_run.make_run(*FROZEN, *settings), 2)
    validate(tiny_run.make_run(*FROZEN, *settings), 1)
    validate(tiny_run.make_run(*FROZEN, "strategy=sync"), 2)
    validate(tiny_run.make_run("g.groups=[{pattern: 'start.*', lr_factor: 0.5}]", *settings), 2)


# How groups are given ---------------------------------------------------------------------------------


def test_groups_on_the_command_line_are_those_of_yaml_and_python():
    value = '[{pattern: "start.*", lr_factor: 0.1}, {pattern: "*.bias", weight_decay: 0, freeze_from_kimg: 3}]'
    run, _ = build_run({}, [("g.groups", value)], "none")
    groups = (ParamGroup("start.*", 0.1), ParamGroup("*.bias", weight_decay=0.0, freeze_from_kimg=3.0))
    assert run.g == PlayerOptim(groups=groups)
    assert from_dict(Run, from_yaml(to_yaml(run), "run.yaml")) == run


WRONG = {
    "g.groups.0.lr_factor=0: input should be greater than 0": "[{pattern: a, lr_factor: 0}]",
    "g.groups.1.pattern is missing": "[{pattern: a}, {lr_factor: 2}]",
    "there is no field g.groups.0.lr_facto; did you mean lr_factor?": "[{pattern: a, lr_facto: 2}]",
    "g.groups.0.weight_decay=-1: input should be greater than or equal to 0": "[{pattern: a, weight_decay: -1}]",
}


@pytest.mark.parametrize(("message", "value"), WRONG.items(), ids=WRONG)
def test_a_wrong_field_of_a_group_is_named(message, value):
    with pytest.raises(UsageError) as raised:
        tiny_run.make_run(f"g.groups={value}")
    assert str(raised.value) == message


def test_a_word_in_place_of_a_group_is_its_pattern():
    with advises("g.groups.0=encoder: is a record of several fields. Use {pattern: 'encoder'}"):
        tiny_run.make_run("g.groups=[encoder]")
    tiny_run.make_run("g.groups=[{pattern: 'encoder'}]")


def test_a_pattern_that_matches_nothing_is_refused_before_a_folder_is_made(tmp_path):
    line = usage_error("train", *TINY_RUN_ARGS, "--g.groups=[{pattern: strat.*}]", "--run-dir", tmp_path / "run")
    assert "g.groups.0.pattern=strat.*: matches no trained parameter of G. Use start.*" in line
    assert not (tmp_path / "run").exists()
    follow = ("--g.groups=[{pattern: start.*}]", "--kimg=0.016", "--run-dir", tmp_path / "run")
    assert run_cli("train", *TINY_RUN_ARGS, *follow).status == 0


def test_the_nearest_pattern_is_advised():
    parameters = dict(net().named_parameters())
    with advises("d.groups.0.pattern=1.wieght: matches no trained parameter of D. Use 1.weight"):
        PlayerOptim(groups=(ParamGroup("1.wieght"),)).select_parameters("d", parameters)
    PlayerOptim(groups=(ParamGroup("1.weight"),)).select_parameters("d", parameters)


def test_the_first_pattern_that_matches_wins_and_none_is_left_empty():
    parameters = dict(net().named_parameters())
    biases, first = ParamGroup("*.bias", lr_factor=2.0), ParamGroup("0.bias", lr_factor=3.0)
    with advises(
        "g.groups.1.pattern=0.bias: all that it matches belongs to the group *.bias before it. Put 0.bias first"
    ):
        PlayerOptim(groups=(biases, first)).select_parameters("g", parameters)
    selected = PlayerOptim(Adam(lr=1.0), groups=(first, biases)).select_parameters("g", parameters)
    assert [(sorted(part.names), part.options["lr"]) for part in selected] == [
        (["0.weight", "1.weight", "3.weight"], 1.0),
        (["0.bias"], 3.0),
        (["1.bias", "3.bias"], 2.0),
    ]


@pytest.mark.parametrize("strategy", ["DQGAN", "DPOSG"])
def test_steps_of_a_paper_have_no_groups(strategy):
    data = tiny_run.make_dataset()
    with advises(
        "g.groups.0.pattern=start.*: strategy.paper_update=true moves all parameters alike. Use --g.groups=[], or "
        "--strategy.paper_update=false."
    ):
        resolve(tiny_run.make_run("g.groups=[{pattern: start.*}]", f"strategy={strategy}"), data)
    resolve(tiny_run.make_run("g.groups=[]", f"strategy={strategy}"), data)
    with advises(
        "g.decay_norms_and_biases=false: strategy.paper_update=true has no weight decay. Use "
        "--g.decay_norms_and_biases=true, or --strategy.paper_update=false."
    ):
        resolve(tiny_run.make_run("g.decay_norms_and_biases=false", f"strategy={strategy}"), data)
    resolve(tiny_run.make_run("g.decay_norms_and_biases=true", f"strategy={strategy}"), data)


def test_weight_decay_needs_an_optimizer_that_has_it():
    with advises(
        "g.groups: a group has weight_decay=0.1, and g.optimizer=sgd has no weight decay. Use --g.optimizer=adam, or "
        "leave it out"
    ):
        validate(tiny_run.make_run("g.groups=[{pattern: start.*, weight_decay: 0.1}]", "g.optimizer=sgd"))
    validate(tiny_run.make_run("g.groups=[{pattern: start.*, weight_decay: 0.1}]", "g.optimizer=adam"))
    validate(tiny_run.make_run("g.groups=[{pattern: start.*}]", "g.optimizer=sgd"))


def test_norms_are_exempted_from_weight_decay_that_there_is():
    exempt = "g.decay_norms_and_biases=false"
    with advises(
        "g.decay_norms_and_biases=false: g.optimizer=sgd has no weight decay. Use --g.optimizer=adam, or leave it out"
    ):
        validate(tiny_run.make_run(exempt, "g.optimizer=sgd"))
    with advises(f"{exempt}: nothing has weight decay. Use --g.optimizer.weight_decay=0.01, or leave it out"):
        validate(tiny_run.make_run(exempt, "g.optimizer=adam"))
    validate(tiny_run.make_run(exempt, "g.optimizer=adam", "g.optimizer.weight_decay=0.01"))
    inner = ("g.optimizer.inner=adam", "g.optimizer.inner.weight_decay=0.01")
    with advises(f"nothing has weight decay. Use --{inner[0]} --{inner[1]}, or leave it out"):
        validate(tiny_run.make_run(exempt, "g.optimizer=lookahead"))
    validate(tiny_run.make_run(exempt, "g.optimizer=lookahead", *inner))


class Ungrouped:
    """An optimizer that knows no groups."""

    name = "ungrouped"
    lr = 0.1

    def build(self, parameters):
        return torch.optim.SGD([p for p in parameters if isinstance(p, nn.Parameter)], lr=0.1)


def test_an_optimizer_without_groups_is_refused():
    with pytest.raises(UsageError, match=r"g\.optimizer=ungrouped: cannot train groups of parameters \(") as raised:
        check_groups("g", Ungrouped())
    assert ALTERNATIVES in str(raised.value)
    for name in ("adabelief", "radam", "lion", "lamb"):
        check_groups("g", third_party_config(name)())
    validate(tiny_run.make_run("g.groups=[{pattern: start.*}]", "g.optimizer=lamb"))
