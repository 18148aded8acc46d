"""Players that rank 0 has not as they are evaluated: where every rank holds its own, their mean; where ranks move one
player only, the other one from those who move it. And how far ranks are from their mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paragan.comm.process_group import Group, of_one
from paragan.data.dataset import Images
from paragan.models.bn_recalibration import standing
from paragan.models.sampler import Inputs, Latents, Prior, Sampler, to_numbers, to_uint8
from paragan.train.checkpoint import buffers
from paragan.train.session import Session


@contextlib.contextmanager
def evaluated(session: Session) -> Iterator[None]:
    """Inside, every rank holds the averaged networks that one evaluates: the mean over ranks with the buffers of rank 0
    where each has its own, else those of the rank that speaks for a player. All ranks enter together, unless rank 0
    has all there is."""
    role = session.role
    if role.first_has_all:
        yield
        return
    group, kept = session.world.everyone, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()

    def sum_into(here: torch.Tensor, counts: bool, ranks: float = 1) -> None:
        total = here.clone() if counts else torch.zeros_like(here)  # a sum that fails leaves what it summed undefined
        group.sum(total).wait()
        kept.append((here, here.clone(), total / ranks if ranks > 1 else total))

    for player in session.game.players:
        speaks = group.rank == role.speaker(player)
        vector = player.average.params if player.average else player.flat.params
        counts = speaks or (not role.replicated and player in role.moves)
        sum_into(vector, counts, how_many(group, counts))
        for buffer in buffers(player).values():
            kept.append((buffer, buffer.clone(), of_one(group, buffer, speaks)))
    try:
        for tensor, _, mean in kept:
            tensor.copy_(mean)
        yield
    finally:
        for tensor, own, _ in kept:
            tensor.copy_(own)


def how_many(group: Group, counts: bool) -> float:
    """Ranks of which this is true."""
    number = torch.tensor([float(counts)])
    group.sum(number).wait()
    return float(number)


def consensus(session: Session) -> dict[str, float]:
    """The root mean square over ranks of each player's distance to the mean, relative to the mean's norm; nothing where
    ranks are replicas. All ranks call this together."""
    if session.role.replicated:
        return {}
    group, found = session.world.everyone, dict[str, float]()
    for player in session.game.players:
        counts = player in session.role.moves
        ranks = how_many(group, counts)
        mean = player.flat.params * counts
        group.sum(mean).wait()
        mean /= ranks
        apart = (player.flat.params - mean).double().square().sum().cpu()[None] * counts
        group.sum(apart).wait()
        found[f"Consensus/{player.name}"] = float((apart / ranks).sqrt() / mean.double().norm().cpu())
    return found


@contextlib.contextmanager
def averaged_sampler(session: Session, images: Images) -> Iterator[Sampler]:
    """The averaged generator of a session, with standing statistics, as a Sampler. Where ranks hold players of their
    own it is their mean, and all ranks enter together."""
    game = session.game
    classes = 0 if game.labels is None else int(game.labels.max()) + 1
    source = source_of(session, images)
    finish = to_numbers if images.numbers else to_uint8
    with evaluated(session), standing(game.g, source, game.labels, session.run.seed) as g:
        yield Sampler(g, source, Prior.of(game.labels, classes), session.world.device, finish=finish)


def source_of(session: Session, images: Images) -> Latents | Inputs:
    """What G makes its images from."""
    game = session.game
    return Inputs(images, game.given) if game.given else Latents(game.latent)
