import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paragan.comm.bucket import TURN_STARTED
from paragan.comm.exchange import Chain, NoExchange
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.traffic import Traffic
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, Loss
from paragan.game.player import Player
from paragan.game.turn import Turn, alternating, play_turns, start_exchanges
from paragan.nets.lane_batch_norm import convert_batch_norm


class Repeated(nn.Module):
    """Recomputes its forward pass in backward, to save memory."""

    def __init__(self, repeats: bool):
        super().__init__()
        self.repeats, self.body = repeats, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.repeats else self.body(x)


def test_recomputed_forward_is_counted_once():
    def moments(repeats):
        torch.manual_seed(0)
        net = Repeated(repeats)
        convert_batch_norm(net)
        player = Player("D", net, lambda p: torch.optim.SGD(p, lr=0.1), lane_batch=4)
        reductions = []
        player.all_reduce_moments = lambda team: reductions.append(player.moments.clone())
        turn = Turn(player, lambda batch, step: Loss(net(batch.images).square().sum()), NoExchange(), SingleRankGroup())
        batches = [Batch(torch.randn(8, 3), None, LaneRng(0, 0, lanes, 4)) for lanes in ((0, 1), (2, 3))]
        before = player.moments
        play_turns((turn,), batches, 0, 16, 16)
        assert not before.any()  # applied
        assert len(reductions) == 1
        return reductions[0], net.body[1].running_mean

    for plain, repeated in zip(moments(False), moments(True), strict=True):
        assert torch.equal(plain, repeated)
    assert moments(True)[0][-1] == 4  # lanes


class Diary:
    """Records when it starts, when its player's turn starts, and when it ends."""

    def __init__(self, name, lines):
        self.name, self.lines = name, lines

    def __call__(self, bucket, step):
        self.lines.append(f"{self.name} leaves in {step}")
        yield TURN_STARTED
        self.lines.append(f"{self.name} takes its turn in {step}")

    def traffic(self, n, itemsize):
        return Traffic()


def table_of_two(lines, d_steps):
    def turn(name, exchange):
        player = Player(name, nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        return Turn(player, lambda batch, step: Loss(player.net(batch.images).sum()), exchange, SingleRankGroup())

    d, g = turn("D", Diary("D", lines)), turn("G", Chain(Diary("G", lines), Diary("then G", lines)))
    return alternating(d, g, d_steps)


BATCHES = [Batch(torch.ones(4, 3), None, LaneRng(0, 0, (0,), 4))]


def test_exchanges_start_with_the_round():
    """G's parameters are sent during D's turn. D's are sent again after each of its steps."""
    lines = []
    turn_groups = table_of_two(lines, d_steps=2)
    start_exchanges(turn_groups, 7)
    assert lines == ["D leaves in 7", "G leaves in 7"]
    for group in turn_groups:
        play_turns(group, BATCHES, 7, 16, 16)
    assert lines[2:] == [
        "D takes its turn in 7",
        "D leaves in 7",
        "D takes its turn in 7",
        "G takes its turn in 7",
        "then G leaves in 7",
        "then G takes its turn in 7",
    ]


def test_exchanges_of_a_failed_round_are_dropped():
    lines = []
    turn_groups = table_of_two(lines, d_steps=1)
    start_exchanges(turn_groups, 0)
    play_turns(turn_groups[0], BATCHES, 0, 16, 16)  # G's turn is not played
    start_exchanges(turn_groups, 1)
    for group in turn_groups:
        play_turns(group, BATCHES, 1, 16, 16)
    assert [line for line in lines if line.endswith("in 1")] == [
        "D leaves in 1",
        "G leaves in 1",
        "D takes its turn in 1",
        "G takes its turn in 1",
        "then G leaves in 1",
        "then G takes its turn in 1",
    ]
