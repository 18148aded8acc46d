"""Layouts of real networks: they change nothing but speed, are kept, and are told."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch

import tiny_run
from paragan.cli.main import main
from paragan.comm.world import World
from paragan.config.resolve import resolve
from paragan.core.schema import get_field, replace_fields
from paragan.plan.tune import layout_tuner as layouts
from paragan.plan.tune.greedy_search import TuneResult, is_faster
from paragan.plan.tune.layout_tuner import TrialWorker, options_for, tune_run
from paragan.plan.tune.op_profile import Tile, profile_ops, tile_for
from paragan.train.loop import play_round

CPU = torch.device("cpu")
NETS = {
    "dcgan": ("nets.batch_norm=true",),
    "sngan": ("nets=sngan", "nets.width=8"),
    "r1": ("objective.r1=1", "objective.loss=nonsaturating"),
}


def played(run):
    """Both players' parameters, gradients and buffers by name, after two rounds; and the average of G."""
    session = tiny_run.make_session(run)
    for _ in range(2):
        play_round(session)
    result = {}
    for player in session.game.players:
        for name, p in player.net.named_parameters():
            result |= {f"{player.name}/{name}": p.detach(), f"{player.name}/{name}/gradient": p.grad}
        result |= {f"{player.name}/{name}": buffer for name, buffer in player.net.named_buffers()}
    g = session.game.g
    with g.using_ema():
        return result | {f"average/{name}": p.detach().clone() for name, p in g.net.named_parameters()}


@pytest.mark.slow(after=6)
@pytest.mark.parametrize(
    "layout",
    [
        {"device.channels_last": False},
        {"device.channels_last": "G"},
        {"device.channels_last": "D"},
        {"device.pad_channels": 16},
        {"device.concat_real_fake": True, "device.lanes_per_pass": 2},
        {"device.huge_pages": False, "g.optimizer.fused": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", NETS.values(), ids=NETS)
def test_a_layout_changes_rounding_only(settings, layout):
    run = tiny_run.make_run(
        *settings, "g.optimizer=sgd", "d.optimizer=sgd"
    )  # Adam's first steps are signs of what rounds to 0
    a, b = played(run), played(replace_fields(run, layout))
    assert list(a) == list(b)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_switches_begin_with_what_stands():
    run = resolve(
        tiny_run.make_run("device.channels_last=D", "nets=sngan", "nets.width=8", "device.threads=1"),
        tiny_run.make_dataset(),
    )
    result = {switch.name: switch for switch in options_for(run, CPU)}
    assert {"channels_last", "fused_resampling", "concat_real_fake", "fused", "lanes_per_pass", "pad_channels"} <= set(
        result
    )
    for switch in result.values():
        assert switch.choices[0] == {field: get_field(run, field) for field in switch.choices[0]}
        assert len({json.dumps(choice) for choice in switch.choices}) == len(switch.choices) > 1
    dcgan = resolve(tiny_run.make_run("g.optimizer=rmsprop", "d.optimizer=rmsprop"), tiny_run.make_dataset())
    assert {"fused_resampling", "fused"}.isdisjoint(switch.name for switch in options_for(dcgan, CPU))


def test_a_worker_times_layouts_in_turns_and_leaves_the_process_as_it_was():
    images, threads = tiny_run.make_dataset(), torch.get_num_threads()
    worker = TrialWorker(resolve(tiny_run.make_run(), images), images, World.solo(), rounds=2)
    timed = worker([{}, {"device.channels_last": False, "device.huge_pages": False, "device.threads": 1}])
    assert [len(t.round_s) for t in timed] == [2, 2]
    assert all(0 < s < 5 for t in timed for s in t.round_s)
    assert torch.get_num_threads() == threads
    few = TrialWorker(resolve(tiny_run.make_run(), images), images, World.solo(), max_round_s=0.0)
    assert (few.run.lanes, few.run.batch) == (1, 2)  # a lane is the least


def test_layouts_that_fail_are_not_chosen(monkeypatch):
    """As torch has it where there is no compiler, or too little memory."""
    player = TrialWorker.make_trial

    def weak(worker, layout):
        if layout:
            raise RuntimeError("no compiler")
        return player(worker, layout)

    monkeypatch.setattr(TrialWorker, "make_trial", weak)
    monkeypatch.setattr(layouts, "BLOCK_S", 0.0)
    images = tiny_run.make_dataset()
    worker = TrialWorker(resolve(tiny_run.make_run("nets.width=4"), images), images, World.solo(), rounds=1)
    as_it_is, compiled = worker([{}, {"device.lanes_per_pass": 2}])
    assert 0 < as_it_is.round_s[0] < 5
    assert list(compiled.round_s) == [math.inf]
    assert not is_faster(compiled, as_it_is)
    with pytest.raises(RuntimeError):  # what stands has to be
        worker([{"device.lanes_per_pass": 2}, {}])


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A cache of its own, and a search that takes no time; how often it was asked."""
    requested = []

    def result(switches, trial, rounds):
        requested.append([switch.name for switch in switches])
        return TuneResult({"device.channels_last": "G", "device.lanes_per_pass": 4}, {"lanes_per_pass": 1.5}, 2.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layouts, "tune_greedily", result)
    monkeypatch.setattr(layouts, "MIN_RUN_FOR_BUILD_S", 1e9)
    return requested


@pytest.mark.slow
def test_layouts_are_cached_by_network_and_damaged_files_ignored(stored, tmp_path):
    images = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run(), images)
    first = tune_run(run, images, World.solo())
    assert tune_run(dataclasses.replace(run, seed=5, recipe="other"), images, World.solo()) == first
    assert len(stored) == 1
    assert "compile" not in stored[0]  # a run that takes less than BUILD_S
    tune_run(resolve(tiny_run.make_run("nets.width=8"), images), images, World.solo())
    assert len(stored) == 2
    tune_run(run, images, World.solo(), remeasure=True)
    full = dataclasses.asdict(first)
    damaged: list[object] = [
        [],
        full | {"overrides": "G"},
        full | {"speedup": "fast"},
        full | {"slowdown_without": {"fused": "x"}},
    ]
    damaged += [
        full | {"overrides": {name: value}}
        for name, value in (("batch", 7), ("foo.bar", 1), ("device.lanes_per_pass", -3))
    ]
    for i, text in enumerate(["{", "[" * 100_000, *map(json.dumps, damaged)]):
        for file in (tmp_path / "cache").rglob("*.json"):
            file.write_text(text)
        assert tune_run(run, images, World.solo()) == first
        assert len(stored) == 4 + i


def test_a_layout_is_of_the_code_and_not_of_the_place_of_the_data(stored, monkeypatch):
    images = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run(), images)
    tune_run(run, images, World.solo())
    shifted = dataclasses.replace(run, data=dataclasses.replace(run.data, path="elsewhere"))
    tune_run(shifted, images, World.solo())
    assert len(stored) == 1
    monkeypatch.setattr(layouts, "user_code_digest", lambda *_: "changed")
    tune_run(run, images, World.solo())
    assert len(stored) == 2


def test_train_takes_what_is_measured_and_goes_on_with_it(stored, tmp_path, capsys):
    line = ["train", "digits", "--run-dir", str(tmp_path / "run"), "--kimg=0.256", "--device.tune=measured"]
    line += ["--nets.width=4", "--evaluation.metrics=[]"]
    assert main(line) == 0
    record = (tmp_path / "run" / "run.yaml").read_text()
    for word in ("channels_last: G", "lanes_per_pass: 4", "tune: rules"):
        assert word in record
    assert "layout: 2.00 times faster" in capsys.readouterr().out
    assert main([*line[:4], "--kimg=0.512", *line[5:]]) == 0  # another command, the same run: nothing is tried again
    assert len(stored) == 1
    assert "resumed" in capsys.readouterr().out


def test_a_damaged_record_does_not_stop_tuning(stored, tmp_path, capsys):
    (tmp_path / "runs" / "00000-digits").mkdir(parents=True)
    (tmp_path / "runs" / "00000-digits" / "run.yaml").write_text("{")
    line = ["train", "digits", f"--outdir={tmp_path}/runs", "--kimg=0.128", "--device.tune=measured"]
    assert main([*line, "--nets.width=4", "--evaluation.metrics=[]"]) == 0
    assert "layout: 2.00 times faster" in capsys.readouterr().out


REFUSED = """
from paragan.core.errors import UsageError
from paragan.plan.tune import layout_tuner
def tune_run(*_):
    raise UsageError("there is no layout")
layout_tuner.tune_run = tune_run
"""


def test_all_ranks_get_the_reason_why_tuning_failed(tmp_path, processes):
    line = ["train", "digits", "--device.tune=measured", f"--run-dir={tmp_path}/run"]
    ranks = processes.start_ranks(2, *line, start=functools.partial(processes.start_forked, patch=REFUSED))
    assert [rank.wait(20) for rank in ranks] == [2, 2]
    assert "rank 0: there is no layout" in ranks[0].err
    assert not (tmp_path / "run").exists()


def test_plan_tune_prints_operations_decisions_and_total(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layouts, "NUM_TIMED_ROUNDS", 1)
    monkeypatch.setattr(layouts, "BLOCK_S", 0.0)
    few = [
        switch
        for switch in layouts.options_for(resolve(tiny_run.make_run(), tiny_run.make_dataset()), CPU)
        if switch.name == "concat_real_fake"
    ]
    monkeypatch.setattr(layouts, "options_for", lambda run, device: few)
    assert main(["plan", "digits", "--tune", "--nets.width=4", "--batch=16", "--lanes=4"]) == 0
    reported = capsys.readouterr().out
    assert "16 images a round in 4 lanes" in reported
    for word in (
        "operation",
        "padding",
        "convolution",
        "convolution backward",
        "concat_real_fake",
        "GFLOP/s",
        "% before",
    ):
        assert word in reported


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["plan", "nothing", "--tune"], "nothing"),
        (["plan", "fashion", "--tune"], "--data"),
        (["plan", "digits", "--tune", "--strategy=per-label"], "is for one game"),
        (["plan", "digits", "--tune", "--batch=7"], "--batch 7"),
        (["plan", "digits", "--tune", "--device.channels_last=maybe"], "device.channels_last"),
        (["plan", "digits", "--tune", "--device.pad_channels=-1"], "device.pad_channels"),
        (["train", "digits", "--device.tune=guessed"], "device.tune"),
        (["train", "digits", "--device.pad_channels=1000000"], "device.pad_channels=1000000"),
        (["train", "digits", "--device.tune=measured", "--strategy=per-label"], "plan --tune"),
        (["train", "digits", "--device.tune=measured", "--strategy=gossip"], "plan --tune"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_options_are_one_line(line, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_padding_is_what_fills_up_tiles():
    assert Tile(1, 16, 16).padding_share(100, 3, 16) == pytest.approx(1 - 3 / 16)
    assert Tile(8, 8, 8).padding_share(64, 64, 128) == 0
    assert Tile(16, 32, 16).padding_share(8, 32, 16) == 0.5
    assert tile_for(torch.device("cuda"), "bf16").columns == 8


@pytest.mark.parametrize(("groups", "padding"), [(2, 0.5), (8, 0.0)])
def test_grouped_convolutions_are_counted_per_group(groups, padding):
    conv = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups)
    up = torch.nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=groups)
    result = profile_ops(lambda: up(conv(torch.ones(4, 8, 8, 8))).sum().backward(), CPU, Tile(1, 8, 4))
    rows = {op.shape: op.padding_share for op in result if "convolution" in op.name}
    assert rows == {
        f"4 x 8 x 8x8 -> 8, 3x3 in {groups} groups": padding,
        f"4 x 8 x 8x8 -> 8, 4x4 up in {groups} groups": padding,
    }


def test_operations_are_grouped_by_shape_and_sum_to_the_round():
    conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)

    def play():
        conv(torch.ones(4, 3, 8, 8)).sum().backward()

    result = profile_ops(play, CPU, Tile(1, 4, 4))
    rows = {(op.name, op.shape): op.padding_share for op in result}
    assert rows["convolution", "4 x 3 x 8x8 -> 8, 3x3 down"] == 0.25
    assert ("convolution backward", "4 x 3 x 8x8 -> 8, 3x3 down") in rows
    assert all(seconds > 0 for seconds in result.values())
    assert list(result.values()) == sorted(result.values(), reverse=True)
