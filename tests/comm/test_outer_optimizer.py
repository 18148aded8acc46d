"""The outer optimizer, compared with plain PyTorch that steps all ranks in one process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from advice import advises
from paragan.comm.checkpoint_files import merge_ranks
from paragan.comm.compressed_allreduce import CompressedAllReduce
from paragan.comm.compression.compressors import Int8
from paragan.comm.exchange import AllReduce
from paragan.comm.flat_params import FlatParams
from paragan.comm.outer_optimizer import OuterNesterov, OuterOptimizer, OuterSteps
from paragan.comm.traffic import Meter
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.plan.select.candidates import parse_strategy
from processes import usage_error

SIZES = (48, 16, 64, 32, 32)  # of the parameters: multiples of what vectors are aligned to
LR = 0.125


class Point(nn.Module):
    """Parameters whose loss on a rank is half their squared distance to that rank's target, which moves."""

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(size, generator=rng)) for size in SIZES])

    def loss(self, target):
        return 0.5 * (torch.cat(list(reversed(self.layers))) - target).square().sum()


def target_of(rank, step):
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1000 * rank + step))


class LocalTraining:
    """A rank's player, trained by plain gradient descent."""

    def __init__(self, world, weight, steps, wire=None):
        self.net = Point()
        self.flat = FlatParams.from_network(self.net, 256, fragments=steps.fragments)
        group = world.all_ranks
        inner = CompressedAllReduce(wire, group) if wire else AllReduce(group)
        self.exchange = OuterOptimizer(inner, weight, steps, hops=2 if wire else 1)
        self.rank, self.weight = world.rank, weight

    def play(self, rounds, failing=contextlib.nullcontext):
        for step in rounds:
            with self.flat.exchanging(self.exchange, step), failing():
                (self.weight * self.net.loss(target_of(self.rank, step))).backward()
            self.flat.finish()
            with torch.no_grad():
                self.flat.params.sub_(self.flat.grads, alpha=LR)
        return self.flat.params.clone()

    def state(self):
        self.exchange.drain()
        return {"params": self.flat.params.clone(), **{k: v.clone() for k, v in self.flat.states().items()}}

    def load(self, state):
        self.flat.params.copy_(state["params"])
        self.flat.load_states({name: value for name, value in state.items() if name != "params"})


# The same in plain PyTorch ------------------------------------------------------------------------------------------


def plain_pytorch(steps, weights, rounds):
    """Step all ranks, and the outer optimizer of each fragment, in one process."""
    ranks = [Point().layers for _ in weights]
    ranks = [torch.cat([p.detach() for p in reversed(layers)]) for layers in ranks]
    flat = FlatParams.from_network(Point(), 256, fragments=steps.fragments)
    sizes = [sum(len(b.grads) for b in flat.buckets if b.fragment == f) for f in range(steps.fragments)]
    parts = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    anchors = [nn.Parameter(ranks[0][part].clone()) for part in parts]
    outer = [torch.optim.SGD([a], steps.lr, steps.momentum, nesterov=steps.momentum > 0) for a in anchors]
    in_flight = {}
    for step in range(rounds):
        for f, (part, anchor) in enumerate(zip(parts, anchors, strict=True)):
            if (step - steps.phase(f)) % steps.period == 0:
                sent = [params[part].clone() for params in ranks]
                delta = sum(weight * (anchor.detach() - params) for weight, params in zip(weights, sent, strict=True))
                in_flight[f, step + steps.delay] = delta, sent
            if (f, step) in in_flight:
                anchor.grad, sent = in_flight.pop((f, step))
                outer[f].step()
                for params, before in zip(ranks, sent, strict=True):
                    moved = anchor.detach() if steps.delay == 0 else params[part] + (anchor.detach() - before)
                    params[part] = moved
        for rank, (params, weight) in enumerate(zip(ranks, weights, strict=True)):
            params -= LR * (weight * (params - target_of(rank, step)) / weight)
    return ranks


WAYS = {
    "mean": OuterSteps(3),
    "Nesterov": OuterSteps(3, lr=0.7, momentum=0.9),
    "plain steps": OuterSteps(3, lr=0.5),
    "streaming": OuterSteps(6, lr=0.7, momentum=0.9, fragments=3, player=1),
    "delayed": OuterSteps(4, delay=3),
    "streaming, delayed": OuterSteps(5, lr=0.7, momentum=0.9, fragments=2, delay=4),
}
every_way = pytest.mark.parametrize("steps", WAYS.values(), ids=WAYS)


@every_way
def test_two_ranks_equal_plain_pytorch_bit_for_bit(pool, steps):
    weights = (0.25, 0.75)

    def job(world):
        return LocalTraining(world, weights[world.rank], steps).play(range(17))

    for params, expected in zip(pool(2, job), plain_pytorch(steps, weights, 17), strict=True):
        assert torch.equal(params, expected)


@every_way
def test_three_ranks_with_unequal_lanes_equal_plain_pytorch_up_to_rounding(pool, steps):
    weights = (3 / 8, 2 / 8, 3 / 8)

    def job(world):
        return LocalTraining(world, weights[world.rank], steps).play(range(17))

    for params, expected in zip(pool(3, job), plain_pytorch(steps, weights, 17), strict=True):
        torch.testing.assert_close(params, expected)


# Messages in flight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [None, Int8()], ids=["exact", "int8"])
def test_a_run_resumed_at_any_step_is_the_undisturbed_one(pool, wire):
    steps = WAYS["streaming, delayed"]

    def job(world):
        def new():
            return LocalTraining(world, 0.5, steps, wire)

        whole = new().play(range(16))
        different = []
        for step in range(3, 12):
            first = new()
            first.play(range(step))
            saved = first.state()
            second = new()
            second.load(saved)
            for each in (first, second):  # the one that was saved goes on, too
                if not torch.equal(each.play(range(step, 16)), whole):
                    different.append(step)
        return different

    assert pool(2, job) == [[], []]


def test_what_is_in_flight_moves_the_mean_of_another_number_of_ranks(pool):
    """Two ranks go on from the means over four. With plain steps the rounds are linear, so their mean does too."""
    steps = OuterSteps(4, lr=0.7, momentum=0.9, delay=3)
    end = 10

    def rounds_without_gradient(training, rounds):
        for step in rounds:
            with training.flat.exchanging(training.exchange, step):
                pass
            training.flat.finish()
        return training.flat.params.clone()

    def four(world):
        training = LocalTraining(world, 1 / 4, steps)
        training.play(range(6))  # sent in round 4, applied in round 7
        return training.state(), rounds_without_gradient(training, range(6, end))

    saved, ends = zip(*pool(4, four), strict=True)
    assert saved[0]["outer_gradient"].any()
    assert torch.equal(saved[0]["outer_gradient"], saved[3]["outer_gradient"])
    merged = merge_ranks(saved)

    def two(world):
        training = LocalTraining(world, 1 / 2, steps)
        training.load(merged)
        return rounds_without_gradient(training, range(6, end))

    for params in pool(2, two):
        torch.testing.assert_close(params, torch.stack(ends).mean(0))


def test_messages_leave_in_fixed_rounds(pool):
    """The second message of int8 leaves halfway, the answer is waited for at the end, and nothing in between."""

    def job(world):
        meter = Meter()
        world.all_ranks = world.all_ranks.with_meter(meter)
        training = LocalTraining(world, 0.5, OuterSteps(8, delay=5), Int8())
        sent = [0]
        for step in range(8):
            training.play([step])
            sent.append(meter.messages)
        return [b - a for a, b in itertools.pairwise(sent)]

    for messages in pool(2, job):
        assert [step for step, count in enumerate(messages) if count] == [0, 3]


def test_an_aborted_step_leaves_no_generator_open(pool):
    def job(world):
        @contextlib.contextmanager
        def failing():
            yield
            raise KeyboardInterrupt

        training = LocalTraining(world, 0.5, OuterSteps(8, delay=6), Int8())
        training.play(range(2))
        in_flight = [weakref.ref(transfer._exchange) for transfer in training.exchange.transfers.values()]
        with pytest.raises(KeyboardInterrupt):
            training.play([2], failing)
        gc.collect()
        num_open = sum(generator() is not None for generator in in_flight)
        return len(in_flight), num_open, any(training.exchange.transfers.values()), list(training.flat.states())

    for count, num_open, has_transfer, states in pool(2, job):
        assert count > 1
        assert num_open == 0
        assert not has_transfer
        assert "sent" not in states


def test_what_an_aborted_step_gave_up_is_part_of_the_next_outer_gradient():
    """All ranks abort the same turn where none of them has a gradient (paragan.Replica)."""
    training = LocalTraining(World.solo(), 1.0, OuterSteps(4, lr=0.5, delay=2))
    training.play(range(5))
    anchor = training.flat.states()["anchor"].clone()
    with training.flat.exchanging(training.exchange, 5):
        pass
    training.flat.abort()
    before = training.flat.params.clone()
    training.play(range(6, 8))
    assert torch.equal(training.flat.states()["anchor"], anchor)
    sent = training.flat.params.clone()
    training.play(range(8, 11))
    assert not torch.equal(before, sent)
    torch.testing.assert_close(training.flat.states()["anchor"], (anchor + sent) / 2)


# When fragments are sent --------------------------------------------------------------------------------------------


def test_fragments_of_both_players_fill_the_period_evenly():
    for period, fragments in [(8, 2), (8, 4), (100, 3), (7, 3)]:
        g, d = (OuterSteps(period, fragments=fragments, player=player) for player in (0, 1))
        rounds = sorted(steps.phase(f) for steps in (g, d) for f in range(fragments))
        assert len(set(rounds)) == 2 * fragments
        gaps = [b - a for a, b in itertools.pairwise([*rounds, rounds[0] + period])]
        assert max(gaps) - min(gaps) <= 1
    for player in (0, 1):  # a period of as many rounds as fragments
        steps = OuterSteps(5, fragments=5, player=player)
        assert sorted(steps.phase(f) for f in range(5)) == list(range(5))
    assert parse_strategy("sync+sync_period=8+fragments=2").sends_in == (0, 2, 4, 6)


def test_fragments_are_contiguous_and_of_about_equal_size():
    for fragments in range(1, len(SIZES) + 1):
        flat = FlatParams.from_network(Point(), 1 << 20, fragments=fragments)
        assert [bucket.fragment for bucket in flat.buckets] == list(range(fragments))
    flat = FlatParams.from_network(Point(), 1 << 20, fragments=2)
    assert [len(bucket.grads) for bucket in flat.buckets] == [64, 128]  # of 192, between parameters
    small = FlatParams.from_network(Point(), 64, fragments=2)
    assert [bucket.fragment for bucket in small.buckets] == [0, 0, 1, 1, 1]


def test_d_may_have_an_outer_optimizer_of_its_own():
    strategy = parse_strategy("sync+sync_period=4+outer_d=nesterov+outer_d.lr=0.5")
    g, d = strategy.outer_steps(0), strategy.outer_steps(1)
    assert (g.lr, g.momentum, d.lr, d.momentum) == (1.0, 0.0, 0.5, 0.9)
    assert g.is_mean
    assert not d.is_mean


# What does not fit --------------------------------------------------------------------------------------------------


def test_more_fragments_than_parameters_are_refused():
    with advises("and the player of G layers.0 has 5. Use strategy.fragments=5 or less"):
        FlatParams.from_network(Point(), 256, "G", fragments=6)
    FlatParams.from_network(Point(), 256, "G", fragments=5)


def test_a_run_with_more_fragments_than_parameters_is_refused_before_it_has_a_folder(tmp_path):
    settings = "--strategy.sync_period=64", "--strategy.fragments=9"
    for more in (["-n", "--ranks=2"], [f"--run-dir={tmp_path / 'run'}"]):
        error = usage_error("train", "digits", "--data.resolution=8", *settings, *more)
        assert "strategy.fragments=9: a fragment holds whole parameters, and D has 7" in error
    assert not (tmp_path / "run").exists()


def test_more_fragments_than_rounds_are_refused():
    with advises(
        "strategy.fragments=8: each is sent in a round of its own, and strategy.sync_period=4. Use "
        "strategy.fragments=4 or less, or strategy.sync_period=8 or more"
    ):
        parse_strategy("sync+sync_period=4+fragments=8").check(2)
    for fields in ("sync_period=4+fragments=4", "sync_period=8+fragments=8"):
        parse_strategy(f"sync+{fields}").check(2)


def test_a_delay_beyond_the_period_is_refused():
    with advises(
        "strategy.delay=4: must be below strategy.sync_period=4, after which the next step is sent. Use "
        "strategy.delay=3 or less, or strategy.sync_period=5 or more"
    ):
        parse_strategy("quantized+sync_period=4+delay=4").check(2)
    for fields in ("sync_period=4+delay=3", "sync_period=5+delay=4"):
        parse_strategy(f"quantized+{fields}").check(2)


OUTER_FIELDS = (("outer=nesterov", "outer=mean"), ("outer_d=mean", "outer_d=null"), ("fragments=2", "fragments=1"))


@pytest.mark.parametrize(("field", "default"), [*OUTER_FIELDS, ("delay=20", "delay=0")])
def test_outer_fields_need_parameters_that_are_averaged_after_a_period(field, default):
    period = 21 if field == "delay=20" else 16
    for name in ("sync", "quantized"):
        with advises(
            f"strategy.{field}: has no effect with strategy.sync_period=1. Use strategy.sync_period={period}, or "
            f"strategy.{default}"
        ):
            parse_strategy(f"{name}+{field}").check(2)
        parse_strategy(f"{name}+{field}+sync_period={period}").check(2)
        parse_strategy(name).check(2)
    with advises(
        f"strategy.{field}: steps on the mean of parameters, and strategy.sync_mode=gradients. Use "
        f"strategy.sync_mode=parameters, or strategy.{default}"
    ):
        parse_strategy(f"sync+sync_period=21+sync_mode=gradients+{field}").check(2)
    parse_strategy(f"sync+sync_period=21+sync_mode=parameters+{field}").check(2)
    with advises(
        f"strategy.{field}: the paper's update averages gradients in every step. Use strategy.paper_update=false with "
        f"strategy.sync_period={period}, or strategy.{default}"
    ):
        parse_strategy(f"DQGAN+{field}").check(2)
    parse_strategy(f"DQGAN+{field}+paper_update=false+sync_period={period}").check(2)


@pytest.mark.parametrize("fields", [{"lr": 0}, {"lr": -1}, {"momentum": 1}, {"momentum": -0.1}, {"lr": float("nan")}])
def test_numbers_of_an_outer_optimizer_that_cannot_work_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        OuterNesterov(**fields)
