"""The papers' own updates, DPOSG and DQGAN, with several steps of D in a round, and in alternating order."""

from __future__ import annotations

import pytest
import torch
from players import RATE_D, RATE_G, SGD, JointGame, check, split
from torch import Tensor

N = 3
AVERAGE = torch.full((N, N), 1 / N, dtype=torch.double)  # DPOSG: W of the ring of 3; DQGAN: the server's mean
STRATEGIES = {
    "DPOSG": (("strategy=DPOSG", "strategy.topology=ring"), AVERAGE, torch.eye(N).double()),
    "DQGAN": (
        ("strategy=quantized", "strategy.paper_update=true", "strategy.wire=exact"),
        torch.eye(N).double(),
        AVERAGE,
    ),
}


class Player:
    """x of every rank; its turn: half step to z with the former gradient, then a step with the gradient at z."""

    def __init__(self, x: Tensor, rate: float, mix_players: Tensor, mix_gradients: Tensor):
        self.x, self.rate, self.before = torch.stack([x] * N), rate, None
        self.mix_players, self.mix_gradients = mix_players, mix_gradients

    def half_step(self) -> Tensor:
        return self.x if self.before is None else self.mix_players @ self.x - self.rate * self.before

    def step(self, gradients: list[Tensor]) -> None:
        is_first, self.before = self.before is None, torch.stack(gradients)
        if not is_first:  # the first turn only measures the gradient at the start
            self.x = self.mix_players @ self.x - self.rate * self.mix_gradients @ self.before


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("order", "d_steps"), [("alternating", 1), ("alternating", 2), ("simultaneous", 2)])
def test_turns(pool, strategy, order, d_steps):
    """Alternating: G at its half step against the new D. Simultaneous: with D's last turn, both at their half steps."""
    fields, *mixes = STRATEGIES[strategy]
    settings = (*fields, f"strategy.order={order}", f"d_steps={d_steps}", *SGD)
    game, every = JointGame(settings, N), range(N)
    g, d = (Player(x, rate, *mixes) for x, rate in zip(split(game.start), (RATE_G, RATE_D)))
    for k in range(6):
        for j in range(k * d_steps, (k + 1) * d_steps):
            together = order == "simultaneous" and j + 1 == (k + 1) * d_steps
            at_g, at_d = g.half_step() if together else g.x, d.half_step()
            d.step([game.d(at_g[i], at_d[i], i, j) for i in every])
        at_g, at_d = g.half_step(), at_d if together else d.x
        g.step([game.g(at_g[i], at_d[i], i, j) for i in every])
    check(pool, settings, 6, [torch.cat(x) for x in zip(g.x, d.x)])
