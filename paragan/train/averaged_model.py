"""The networks that are evaluated, drawn and saved, where rank 0 does not have them; and how far ranks are apart.

Under gossip, and with `sync_period` above 1, every rank has players of its own (`Role.replicated` is false): their mean
is evaluated, with the buffers of rank 0. Under async some ranks train G and others D: each player comes from its owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from paragan.comm.process_group import Group, broadcast_tensors
from paragan.data.dataset import Dataset
from paragan.models.autoencoder import output_converter
from paragan.models.bn_recalibration import recalibrated_bn
from paragan.models.sampler import DataSource, LabelPrior, LatentSource, Sampler
from paragan.train.checkpoint import untrained_tensors
from paragan.train.session import Session


@contextlib.contextmanager
def averaged_networks(session: Session) -> Iterator[None]:
    """Replace the networks that are evaluated by their averages over ranks while inside.

    All ranks enter together, unless rank 0 has both players as they are evaluated.
    """
    role = session.role
    if role.has_all_players:
        yield
        return
    group = session.world.all_ranks
    replaced: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # (tensor, its own value, value inside)

    def average_over_ranks(tensor: torch.Tensor, is_included: bool, num_included: float) -> None:
        # a copy: a reduction that fails leaves its argument undefined
        total = tensor.clone() if is_included else torch.zeros_like(tensor)
        group.all_reduce_sum(total).wait()
        mean = total / num_included if num_included > 1 else total
        replaced.append((tensor, tensor.clone(), mean))

    for player in session.game.players:
        is_owner = group.rank == role.owner_rank(player)
        params = player.ema.params if player.ema else player.flat.params
        is_included = is_owner or (not role.replicated and player in role.trained_players)
        average_over_ranks(params, is_included, count_ranks(group, is_included))
        buffers = [*untrained_tensors(player).values()]
        for buffer, value in zip(buffers, broadcast_tensors(group, buffers, is_owner)):
            replaced.append((buffer, buffer.clone(), value))
    try:
        for tensor, _, mean in replaced:
            tensor.copy_(mean)
        yield
    finally:
        for tensor, original, _ in replaced:
            tensor.copy_(original)


def count_ranks(group: Group, is_included: bool) -> float:
    """Return the number of ranks for which `is_included` is true."""
    number = torch.tensor([float(is_included)])
    group.all_reduce_sum(number).wait()
    return float(number)


def consensus_terms(session: Session) -> dict[str, torch.Tensor]:
    """Return the terms of `consensus_distance`, on the device: `PLAYER/distance_sq` of this rank, `PLAYER/mean_norm`.

    Empty if ranks are replicas. All ranks call this together.
    """
    if session.role.replicated:
        return {}
    group = session.world.all_ranks
    terms: dict[str, torch.Tensor] = {}
    for player in session.game.players:
        is_trained = player in session.role.trained_players
        mean = player.flat.params * is_trained
        group.all_reduce_sum(mean).wait()
        mean /= count_ranks(group, is_trained)
        terms[f"{player.name}/distance_sq"] = (player.flat.params - mean).double().square().sum()[None] * is_trained
        terms[f"{player.name}/mean_norm"] = mean.double().norm()
    return terms


def consensus_distance(session: Session, terms: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return `Consensus/PLAYER`: the root mean square over ranks of the distance to the mean, relative to its norm.

    Empty if ranks are replicas. All ranks call this together.

    Args:
        terms: those of this rank, on the host.
    """
    if session.role.replicated:
        return {}
    group = session.world.all_ranks
    distances: dict[str, float] = {}
    for player in session.game.players:
        ranks = count_ranks(group, player in session.role.trained_players)
        squares = terms[f"{player.name}/distance_sq"].clone()
        group.all_reduce_sum(squares).wait()
        distances[f"Consensus/{player.name}"] = float((squares / ranks).sqrt() / terms[f"{player.name}/mean_norm"])
    return distances


@contextlib.contextmanager
def averaged_sampler(session: Session, dataset: Dataset) -> Iterator[Sampler]:
    """Yield the averaged generator of a session as a sampler, with batch norm statistics measured anew ("standing").

    All ranks enter together, unless rank 0 has both players as they are evaluated.
    """
    game = session.game
    classes = 0 if game.labels is None else int(game.labels.max()) + 1
    source = make_source(session, dataset)
    to_output = output_converter(dataset)
    with averaged_networks(session), recalibrated_bn(game.g, source, game.labels, session.run.seed) as g:
        prior = LabelPrior.from_labels(game.labels, classes)
        yield Sampler(g, source, prior, session.world.device, to_output=to_output, main_field=game.primary)


def make_source(session: Session, dataset: Dataset) -> LatentSource | DataSource:
    """Return the source of G's inputs: latents, or the data where G is given them."""
    game = session.game
    if game.conditioning_input:
        return DataSource(dataset, game.conditioning_input)
    return LatentSource(game.latent)
