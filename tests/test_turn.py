import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paragan.batch import Batch, Loss
from paragan.comm.exchange import Local
from paragan.comm.world import Solo
from paragan.game.player import Player
from paragan.game.turn import Turn, play
from paragan.nets.norm import convert
from paragan.rng import Draw


class Repeated(nn.Module):
    """Goes forward once more in backward, to save memory."""

    def __init__(self, repeats: bool):
        super().__init__()
        self.repeats, self.body = repeats, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.repeats else self.body(x)


def test_a_forward_that_backward_repeats_is_counted_once():
    def moments(repeats):
        torch.manual_seed(0)
        net = Repeated(repeats)
        convert(net)
        player = Player("D", net, lambda p: torch.optim.SGD(p, lr=0.1), lane_batch=4)
        seen = []
        player.share_moments = lambda team: seen.append(player.moments.clone())
        turn = Turn(player, lambda hand, step: Loss(net(hand.images).square().sum()), Local(), Solo())
        hands = [Batch(torch.randn(8, 3), None, Draw(0, 0, lanes, 4)) for lanes in ((0, 1), (2, 3))]
        before = player.moments
        play((turn,), hands, 0, 16, 16)
        assert not before.any()  # settled
        assert len(seen) == 1
        return seen[0], net.body[1].running_mean

    for plain, repeated in zip(moments(False), moments(True), strict=True):
        assert torch.equal(plain, repeated)
    assert moments(True)[0][-1] == 4  # lanes
