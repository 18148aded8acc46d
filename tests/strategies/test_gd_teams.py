"""Ranks divided into teams of G and of D: messages between them, their staleness, and reproducible runs."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import threading
import time

import pytest
import torch

import tiny_run
from advice import advises
from paragan.comm.compression.compressors import BF16, Exact
from paragan.comm.mailbox import TensorPack
from paragan.comm.sockets import open_sockets
from paragan.config.resolve import fill_strategy_defaults
from paragan.config.validate import validate
from paragan.core.clock import Clock
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.game.remote_opponents import SnapshotCodec
from paragan.game.replay_policy import Latest, UniformReplay
from paragan.game.stale_opponents import FakeBatch, FakeReplayBuffer
from paragan.strategies.gd_teams import balance, validate_split
from paragan.train.build import build_player
from paragan.train.checkpoint import Checkpoints
from paragan.train.loop import play_round

TEAMS = ("strategy=async", "nets.batch_norm=true")


def delayed(run, rounds, delays):
    """Make a job that waits before every round. It returns the state, the statistics and the lags."""

    def job(world):
        waits = random.Random(world.rank)
        s = tiny_run.make_session(run, world)
        for _ in range(rounds):
            time.sleep(waits.random() * delays[world.rank % len(delays)])
            play_round(s)
        line = s.stats.tick(s.clock.images, s.clock.step)
        return tiny_run.gather_owner_state(s), line, s.stats.lags

    return job


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("settings", "delays"),
    [
        (("strategy.max_lead_rounds=4",), (0.03, 0.03)),
        (("strategy.max_lead_rounds=3", "strategy.snapshot_every=3", "d_steps=2"), (0.0, 0.03)),
        (("strategy.max_lead_rounds=4", "g_batch=32"), (0.0, 0.03)),
        (
            (
                "strategy.max_lead_rounds=3",
                "strategy.replay_policy=replay",
                "strategy.replay_policy.fraction=0.5",
                "g_batch=32",
            ),
            (0.03, 0.0),
        ),
    ],
)
def test_recorded_lags_reproduce_the_run_bit_for_bit(pool, settings, delays):
    run = tiny_run.make_run(*TEAMS, *settings)
    state, _, lags = pool(2, delayed(run, 12, delays))[0]
    assert len(lags["fakes"]) == len(lags["critic"]) == 12
    assert len(set(lags["fakes"])) + len(set(lags["critic"])) > 2, "the ranks did not lag, so nothing was shown"
    replay_settings = [s for s in settings if not s.startswith(("strategy.max_lead_rounds", "strategy.snapshot"))]
    replay = tiny_run.make_run(
        *TEAMS, *replay_settings, f"strategy.fake_lags={lags['fakes']}", f"strategy.critic_lags={lags['critic']}"
    )
    assert tiny_run.is_equal(pool(1, lambda world: tiny_run.play_rounds(replay, 12))[0], state)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("slow", "lead"), [(0, 3), (1, 3), (0, 1), (1, 5)])
def test_no_team_leads_by_more_than_the_maximum(pool, slow, lead):
    run = tiny_run.make_run(*TEAMS, f"strategy.max_lead_rounds={lead}", "strategy.split=1:1")
    _, line, lags = pool(2, delayed(run, 10, [0.25 * (rank == slow) for rank in (0, 1)]))[0]
    assert max(lags["fakes"]) < lead
    assert max(lags["critic"]) < lead
    assert max(lags["critic" if slow else "fakes"]) == lead - 1, "the fast one ran ahead as far as it may"
    ages = {name: count for name, count in line.items() if name.startswith("Async/critic_age")}
    assert sum(ages.values()) == 10
    assert {"Loss/G/loss", "Loss/D/loss", "Comm/G/sent_bytes", "Comm/D/sent_bytes"} <= line.keys()
    assert line["Comm/G/sent_bytes"] > 0 < line["Comm/D/sent_bytes"]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("split", "settings"),
    [
        ("1:2", ("strategy.snapshot_every=4", "strategy.snapshot_wire=int8")),
        ("1:2", ("strategy.replay_policy=uniform", "d_steps=2")),
        ("2:2", ("strategy.sync_period=2", "strategy.snapshot_every=3", "strategy.wire=int8")),
    ],
)
def test_teams_resume_from_a_checkpoint(pool, split, settings, tmp_path):
    run = tiny_run.make_run(*TEAMS, *settings, "strategy.max_lead_rounds=1", f"strategy.split='{split}'")
    ranks = int(split[0]) + 2

    def six_and_four(world):
        saved, _ = tiny_run.save_after(run, 6, world, tmp_path)
        s = tiny_run.make_session(run, world, saved)
        for _ in range(4):
            play_round(s)
        return tiny_run.gather_owner_state(s)

    assert tiny_run.is_equal(
        pool(ranks, six_and_four)[0], pool(ranks, lambda world: tiny_run.play_rounds(run, 10, world))[0]
    )


def test_another_split_resumes_from_the_checkpoint(pool, tmp_path):
    """Resume 3 ranks of G and 1 of D as 1 and 2; stored fakes go to the ranks that now own their lanes."""
    first = tiny_run.make_run(*TEAMS, "strategy.max_lead_rounds=1", "strategy.split=3:1")
    then = tiny_run.make_run(*TEAMS, "strategy.max_lead_rounds=1", "strategy.split=1:2")
    saved = pool(4, lambda world: tiny_run.save_after(first, 4, world, tmp_path)[0])[0]

    def resume(world):
        s = tiny_run.make_session(then, world, saved)
        for _ in range(4):
            play_round(s)
        return tiny_run.gather_owner_state(s)

    one = tiny_run.play_rounds(first, 8)
    state = pool(3, resume)[0]
    assert tiny_run.relative_distance(state, one, "G/") < 2e-4
    assert tiny_run.relative_distance(state, one, "D/") < 2e-4


@pytest.mark.parametrize(("g_per_lane", "d_per_lane"), [(4, 2), (2, 4), (3, 2), (2, 5), (1, 3)])
@pytest.mark.parametrize("policy", [Latest(), UniformReplay(window=3)])
def test_fakes_match_their_lanes_and_labels_at_any_batch_size(g_per_lane, d_per_lane, policy):
    """Every fake was generated for its lane and has its label; surplus fakes are used in the next step."""
    fakes = FakeReplayBuffer(policy, lambda step: 1, 1, g_per_lane / d_per_lane)
    lanes = (2, 5)
    for step in range(6):  # pixel: round, lane, row
        rows = [[step, lane, i] for lane in lanes for i in range(g_per_lane)]
        images = torch.tensor(rows, dtype=torch.float32)
        fakes.push(Batch(images, images[:, 2].long() + 10, LaneRng(0, step, lanes, g_per_lane)), step)
    batch = Batch(torch.zeros(2 * d_per_lane, 3), None, LaneRng(0, 96, lanes, d_per_lane))
    first, second = fakes(batch, 6), fakes(batch, 6)
    for sample in (first, second):
        assert len(sample.images) == 2 * d_per_lane
        assert sample.images[:, 1].tolist() == [2.0] * d_per_lane + [5.0] * d_per_lane
        assert (sample.images[:, 2] + 10 == sample.labels).all()
        assert (sample.images[:, 0] >= 6 - fakes.window).all()
    if policy.name == "latest":
        assert len({tuple(row) for row in first.images.tolist()}) == 2 * d_per_lane
        if g_per_lane >= 2 * d_per_lane:
            assert not set(map(tuple, first.images.tolist())) & set(map(tuple, second.images.tolist()))


def test_lanes_are_selected_from_merged_fakes():
    fakes = FakeReplayBuffer(Latest(), lambda step: 1, 1)
    fakes.insert(FakeBatch({"images": torch.arange(8.0)[:, None]}), (0, 1, 2, 3), 0)
    sample = fakes(Batch(torch.zeros(4, 1), None, LaneRng(0, 16, (1, 3), 2)), 1)
    assert sample.images.flatten().tolist() == [2, 3, 6, 7]


def test_tensor_pack_roundtrip():
    tensors = [torch.randn(3, 2).to(torch.bfloat16), torch.arange(5), torch.randn(2, 3, 4, 4), torch.empty(0)]
    pack = TensorPack.from_tensors(tensors)
    data = pack.pack(tensors)
    assert data.nbytes == pack.nbytes
    assert all(torch.equal(a, b) for a, b in zip(pack.unpack(data), tensors, strict=True))
    assert TensorPack((), ()).pack([]).nbytes == 1


def test_split_balances_the_step_times():
    assert balance(1.0, 1.0, 8) == (4, 4)
    assert balance(1.0, 3.0, 8) == (2, 6)
    assert balance(3.0, 1.0, 8) == (6, 2)
    assert balance(1.0, 1000.0, 4) == (1, 3)
    assert balance(1.0, 1.0, 2) == (1, 1)


def test_invalid_teams_are_rejected():
    with pytest.raises(UsageError, match=r"split=2:6: needs 8 ranks, and 4 were started. Use 2:2"):
        validate(tiny_run.make_run(*TEAMS, "strategy.split='2:6'"), 4)
    one_each = tiny_run.make_run(*TEAMS, "strategy.split='1:1'")
    with advises("split=1:1: needs 2 ranks, and 1 was started. Start 2 ranks, or leave it out."):
        validate(one_each, 1)
    validate(one_each, 2)
    validate(tiny_run.make_run(*TEAMS), 1)
    with advises("Leave it out, or strategy.fake_lags, strategy.critic_lags and strategy.lags_from_run."):
        validate(tiny_run.make_run(*TEAMS, "strategy.split='1:1'", "strategy.fake_lags=[2]"), 2)
    validate(tiny_run.make_run(*TEAMS, "strategy.fake_lags=[2]"), 2)
    for split in ("0:2", "1:0", "half", "1:2:3", "-1:3"):
        with pytest.raises(UsageError, match=r"strategy\.split=.*: it should be auto, none, or"):
            tiny_run.make_run(*TEAMS, f"strategy.split='{split}'")
    for field, value in (
        ("max_lead_rounds", 0),
        ("snapshot_every", 0),
        ("replay_policy.window", 0),
        ("max_lead_rounds", 5000),
    ):
        with pytest.raises(UsageError, match=rf"strategy\.{field}"):
            tiny_run.make_run(*TEAMS, "strategy.replay_policy=uniform", f"strategy.{field}={value}")
    with pytest.raises(UsageError, match=r"strategy\.snapshot_wire"):
        tiny_run.make_run(*TEAMS, "strategy.snapshot_wire=topk")
    with pytest.raises(UsageError, match=r"--g_batch 12: does not divide into --lanes 8\. Use --g_batch 8 or 16"):
        validate(tiny_run.make_run(*TEAMS, "g_batch=12"), 2)


def test_parameters_of_another_dtype_are_sent_as_advised():
    run = tiny_run.make_run()
    d = build_player(run, "D", torch.nn.Linear(4, 1).double(), run.d, run.batch)
    with advises("strategy.snapshot_wire=bf16: D has float64 parameters. Use --strategy.snapshot_wire=exact"):
        SnapshotCodec(d, 1, BF16())
    codec = SnapshotCodec(d, 1, Exact())
    sent = d.flat.params.clone()
    message = codec.encode(0)
    d.flat.params.zero_()
    codec.load(message)
    assert torch.equal(d.flat.params, sent)


def test_yaml_sexagesimal_split_is_parsed():
    assert tiny_run.make_run(*TEAMS, "strategy.split=2:6").strategy.split == "2:6"
    assert validate_split(126) == "2:6"
    assert validate_split("auto") == "auto"
    with pytest.raises(UsageError):
        tiny_run.make_run(*TEAMS, "strategy.split=7")


def test_lags_are_read_from_a_run(tmp_path):
    path = tmp_path / "lags.jsonl"
    settings = (*TEAMS, f"strategy.lags_from_run={tmp_path}")
    with advises(
        f"strategy.lags_from_run={tmp_path}: there is no {path}. "
        "Use the folder of a run with --strategy async on two ranks or more."
    ):
        fill_strategy_defaults(tiny_run.make_run(*settings))
    path.write_text('{"first": 0, "fakes": [1, 2], "critic": [0, 0]}\n{"first": 2, "fakes": [2], "critic": [1]}\n')
    strategy = fill_strategy_defaults(tiny_run.make_run(*settings)).strategy
    assert (strategy.fake_lags, strategy.critic_lags, strategy.lags_from_run) == ((1, 2, 2), (0, 0, 1), "")
    with advises("Leave it out, or leave out strategy.fake_lags and strategy.critic_lags."):
        fill_strategy_defaults(tiny_run.make_run(*settings, "strategy.fake_lags=[1]"))
    fill_strategy_defaults(tiny_run.make_run(*TEAMS, "strategy.fake_lags=[1]"))
    path.write_text('{"first": 0, "fakes": [1, 2], "critic": [0, 0]}\n{"first": 5, "fakes": [2], "critic": [1]}\n')
    with pytest.raises(UsageError, match="lacks rounds 2 to 4: that run was stopped and resumed"):
        fill_strategy_defaults(tiny_run.make_run(*settings))
    for broken in ('{"first": 0, "fakes": [-1], "critic": [0]}', '{"fakes": 3}', '{"first": 0, "fakes": ["a"]}'):
        path.write_text(broken + "\n")
        with pytest.raises(UsageError, match="not a valid record of lags"):
            fill_strategy_defaults(tiny_run.make_run(*settings))


def test_one_rank_resumes_from_teams_and_back(pool, tmp_path):
    """A run on one rank leaves no snapshots that a later run of teams would use."""
    run = tiny_run.make_run(*TEAMS, "strategy.max_lead_rounds=1")

    def on(saved, folder, rounds):
        def job(world):
            s = tiny_run.make_session(run, world, saved)
            for _ in range(rounds):
                play_round(s)
            clock = {"step": s.clock.step, "images": s.clock.images, "seconds": 0.0}
            if s.role.drain:
                s.role.drain()
            ages = max(
                (max(staleness.lags.values()) for staleness in s.role.staleness.values() if staleness.lags), default=0
            )
            return (
                Checkpoints(folder, world).save(s.game.players, clock, {}, s.role),
                tiny_run.gather_owner_state(s),
                ages,
            )

        return job

    first = pool(2, on(None, tmp_path / "a", 3))[0][0]
    second = pool(1, on(first, tmp_path / "b", 3))[0][0]
    rows = pool(2, on(second, tmp_path / "c", 3))
    assert max(ages for _, _, ages in rows) == 0
    assert tiny_run.relative_distance(rows[0][1], tiny_run.play_rounds(run, 9), "G/") < 2e-4


def test_fast_team_does_not_wait_within_the_lead(pool):
    run = tiny_run.make_run(*TEAMS, "strategy.max_lead_rounds=5", "strategy.split=1:1")
    slow = pool(2, delayed(run, 6, (0.2, 0.0)))[0][1]  # rank 0 sleeps, and does not wait
    assert slow["Timing/exchange_wait_s"] < 0.5 * slow["Timing/total_s"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_dropped_links_leave_no_state(pool):
    """No threads and sockets remain after 20 sessions, or PARAGAN_SOAK times 20."""
    run = tiny_run.make_run(*TEAMS, "strategy.split=1:1")

    def job(world):
        first = tiny_run.make_session(run, world)
        counts = []
        for i in range(20):
            s = dataclasses.replace(
                first, role=run.strategy.role(first.game, world, run.lanes), clock=Clock(run.total_images)
            )
            play_round(s)
            s.role.drain()
            del s
            gc.collect()
            if i in (4, 19):
                time.sleep(0.5)
                counts.append((threading.active_count(), len(open_sockets())))
        return counts

    results = [pool(2, job) for _ in range(int(os.environ.get("PARAGAN_SOAK", "1")))]
    early = results[:2][-1]  # leftovers of one job exist until the next one has started
    for rank in (0, 1):
        assert results[-1][rank][1] <= early[rank][0]
