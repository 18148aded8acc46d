"""Players that rank 0 has not as they are evaluated: where every rank holds its own, their mean; where ranks move one
player only, the other one from those who move it. And how far ranks are from their mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paragan.comm.process_group import Group, broadcast_bits
from paragan.data.dataset import Dataset
from paragan.models.bn_recalibration import recalibrated_bn
from paragan.models.sampler import DataSource, LabelPrior, LatentSource, Sampler, to_float32, to_uint8
from paragan.train.checkpoint import untrained_tensors
from paragan.train.session import Session


@contextlib.contextmanager
def averaged_networks(session: Session) -> Iterator[None]:
    """Inside, every rank holds the averaged networks that one evaluates: the mean over ranks with the buffers of rank 0
    where each has its own, else those of the rank that speaks for a player. All ranks enter together, unless rank 0
    has all there is."""
    role = session.role
    if role.main_has_all_players:
        yield
        return
    group, kept = session.world.all_ranks, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()

    def average_over_ranks(tensor: torch.Tensor, is_included: bool, num_included: float = 1) -> None:
        total = (
            tensor.clone() if is_included else torch.zeros_like(tensor)
        )  # a sum that fails leaves what it summed undefined
        group.all_reduce_sum(total).wait()
        kept.append((tensor, tensor.clone(), total / num_included if num_included > 1 else total))

    for player in session.game.players:
        speaks = group.rank == role.owner_rank(player)
        vector = player.ema.params if player.ema else player.flat.params
        counts = speaks or (not role.replicated and player in role.trained_players)
        average_over_ranks(vector, counts, count_ranks(group, counts))
        for buffer in untrained_tensors(player).values():
            kept.append((buffer, buffer.clone(), broadcast_bits(group, buffer, speaks)))
    try:
        for tensor, _, mean in kept:
            tensor.copy_(mean)
        yield
    finally:
        for tensor, own, _ in kept:
            tensor.copy_(own)


def count_ranks(group: Group, is_included: bool) -> float:
    """Ranks of which this is true."""
    number = torch.tensor([float(is_included)])
    group.all_reduce_sum(number).wait()
    return float(number)


def consensus_distance(session: Session) -> dict[str, float]:
    """The root mean square over ranks of each player's distance to the mean, relative to the mean's norm; nothing where
    ranks are replicas. All ranks call this together."""
    if session.role.replicated:
        return {}
    group, found = session.world.all_ranks, dict[str, float]()
    for player in session.game.players:
        counts = player in session.role.trained_players
        ranks = count_ranks(group, counts)
        mean = player.flat.params * counts
        group.all_reduce_sum(mean).wait()
        mean /= ranks
        apart = (player.flat.params - mean).double().square().sum().cpu()[None] * counts
        group.all_reduce_sum(apart).wait()
        found[f"Consensus/{player.name}"] = float((apart / ranks).sqrt() / mean.double().norm().cpu())
    return found


@contextlib.contextmanager
def averaged_sampler(session: Session, dataset: Dataset) -> Iterator[Sampler]:
    """The averaged generator of a session, with standing statistics, as a Sampler. Where ranks hold players of their
    own it is their mean, and all ranks enter together."""
    game = session.game
    classes = 0 if game.labels is None else int(game.labels.max()) + 1
    source = make_source(session, dataset)
    finish = to_float32 if dataset.is_array else to_uint8
    with averaged_networks(session), recalibrated_bn(game.g, source, game.labels, session.run.seed) as g:
        yield Sampler(g, source, LabelPrior.from_labels(game.labels, classes), session.world.device, to_output=finish)


def make_source(session: Session, dataset: Dataset) -> LatentSource | DataSource:
    """What G makes its images from."""
    game = session.game
    return DataSource(dataset, game.conditioning_input) if game.conditioning_input else LatentSource(game.latent)
