"""Parameters that one optimizer moves: the exchange of their step, and their moving average.

A player of the trainer (player.py) and a replica in a loop of the user (replica/replica.py) both are of this kind, so
every step of every game takes the same way:

    start_exchange       optional: messages that can leave before the turn
    exchanging           around forward and backward; gradients leave while backward runs, and have arrived at its end
    finish_exchange      the step is certain: exchanges complete
    optimizer.step
    update_average
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from paragan.comm.traffic import Meter
from paragan.game.ema import EMA

if TYPE_CHECKING:
    from paragan.comm.bucket import Exchange
    from paragan.comm.flat_params import FlatParams

Optimizer = torch.optim.Optimizer


class TrainedParameters:
    """Parameters that one optimizer moves.

    flats     : their vectors, one for each dtype and device
    optimizer : moves them
    averages  : the moving average of each vector; empty: there is none
    meter     : counts what this rank sends of them
    """

    def __init__(self, flats: Sequence[FlatParams], optimizer: Optimizer, has_average: bool):
        self.flats = tuple(flats)
        self.optimizer = optimizer
        self.averages = tuple(EMA(flat.params) for flat in self.flats) if has_average else ()
        self.meter = Meter()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current step."""
        return self.optimizer.param_groups[0]["lr"]

    def start_exchange(self, exchange: Exchange, step: int) -> None:
        """Start the exchange of a step before its turn, after dropping what a failed step left."""
        self.abort_exchange()
        for flat in self.flats:
            flat.start_exchange(exchange, step)

    @contextlib.contextmanager
    def exchanging(self, exchange: Exchange, step: int, passes: int) -> Generator[None]:
        """Exchange around the backward passes inside this context; at its end all messages have arrived.

        Args:
            exchange: what to run.
            step: the number of the step.
            passes: how many backward passes there will be.
        """
        with contextlib.ExitStack() as stack:
            for flat in self.flats:
                stack.enter_context(flat.exchanging(exchange, step, passes))
            yield

    def mark_backward_done(self) -> None:
        """Send all gradients that were not sent yet. Called before anything else is sent."""
        for flat in self.flats:
            flat.mark_backward_done()

    def finish_exchange(self) -> None:
        """Complete the exchange, after the messages of all that step together have arrived."""
        for flat in self.flats:
            flat.finish()

    def abort_exchange(self) -> None:
        """Close an exchange that has not ended; the parameters are as before it."""
        for flat in self.flats:
            flat.abort()

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Let the parameters get gradients, or freeze them."""
        for flat in self.flats:
            for p in flat.parameters:
                p.requires_grad_(requires_grad)

    def update_average(self, decay: float) -> None:
        """Let the average follow the parameters.

        Args:
            decay: the weight of the old average.
        """
        for flat, average in zip(self.flats, self.averages):
            average.update(flat.params, decay)

    @contextlib.contextmanager
    def using_ema(self) -> Generator[None]:
        """Put the average in place of the parameters inside this context. A sharded one is gathered by all ranks."""
        saved = [flat.params.clone() for flat in self.flats]
        try:
            for flat, average in zip(self.flats, self.averages):
                average.copy_to(flat.params)
            yield
        finally:
            for flat, params in zip(self.flats, saved):
                flat.params.copy_(params)
