"""Where every rank holds players of its own: their mean, which is what one evaluates, and how far they are from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .checkpoint import buffers
from .loop import Session


@contextlib.contextmanager
def network_mean(session: Session) -> Iterator[None]:
    """Inside, every rank holds the mean over ranks of the averaged networks, with the buffers of rank 0. All ranks
    enter together; nothing happens where they are replicas."""
    if session.role.replicated:
        yield
        return
    group, kept = session.world.everyone, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
    for player in session.game.players:
        vector = player.average.params if player.average else player.flat.params
        total = vector.clone()  # a sum that fails leaves what it summed undefined
        group.sum(total).wait()
        kept.append((vector, vector.clone(), total / group.size))
        for buffer in buffers(player).values():
            total = buffer.clone() if group.rank == 0 else torch.zeros_like(buffer)
            group.sum(total).wait()
            kept.append((buffer, buffer.clone(), total))
    try:
        for tensor, _, mean in kept:
            tensor.copy_(mean)
        yield
    finally:
        for tensor, own, _ in kept:
            tensor.copy_(own)


def consensus(session: Session) -> dict[str, float]:
    """The root mean square over ranks of each player's distance to the mean, relative to the mean's norm; nothing where
    ranks are replicas. All ranks call this together."""
    if session.role.replicated:
        return {}
    group, found = session.world.everyone, dict[str, float]()
    for player in session.game.players:
        mean = player.flat.params.clone()
        group.sum(mean).wait()
        mean /= group.size
        apart = (player.flat.params - mean).double().square().sum().cpu()[None]
        group.sum(apart).wait()
        found[f"Consensus/{player.name}"] = float((apart / group.size).sqrt() / mean.double().norm().cpu())
    return found
