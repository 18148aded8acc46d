"""Measure the health of a game at a tick: reductions on the device, one sum over ranks.

Health/G/gradient, Health/D/gradient            norm of the last step's gradient (root mean square over ranks)
Health/G/update_norm, Health/D/update_norm      distance of the weights from those at the last tick, relative
Health/G/step, Health/D/step                    longest step since the last tick, relative to the norm before it
Health/G/replica_drift, Health/D/replica_drift  distance of replicas from their mean, relative to its norm
Health/D/real, Health/D/fake                    mean logits of reals, and of fakes as G now makes them
Health/D/accuracy                               how often a real has a higher logit than a fake (0.5: guessing)
Health/G/diversity                              standard deviation of fakes within a label, relative to that of reals
Health/label/roughness, Health/label/number     of the label that looks most like noise (1: it is), and its number
Health/label/others                             median roughness of the other labels

All but `update_norm`, `step` and those of labels are functions of the state of the game: a resumed run measures what an
undisturbed one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.core.host_copies import copy_to_host
from paragan.core.types import Batch, primary_array, run_discriminator
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.update_norm import strided_sample
from paragan.train.session import Session

PROBE_IMAGES = 64  # reals, and fakes, that a rank probes
FAKES_PER_LABEL = 4
COMPARED_SIDE_PX = 8  # images are compared at this resolution, averaged over the pixels below
MAX_COMPARED_VALUES = 256  # arrays that are no images are compared by at most so many values
MIN_LABELS, MAX_LABELS = 3, 1024  # for which roughness is measured
LABEL_SUM_DECAY = 0.9  # of the sums of a label, each tick
MIN_LABEL_IMAGES = 16.0  # of a label, before its roughness is measured
MIN_LR_FACTOR = 0.01  # below, weights may well stay where they are
ROUNDING_TOLERANCE = 1e-12  # of squares, in sums of float64
TINY = 1e-300


class HealthSignals:
    """Measures a session. Remembers a sample of its last weights, and sums over the images of each label."""

    def __init__(self) -> None:
        self._previous_weights = dict[str, Tensor]()
        self._label_sums: Tensor | None = None  # [3, K]

    def __call__(self, session: Session) -> dict[str, float]:
        """Return the `Health/` values, the same on all ranks. All ranks call this together."""
        return self.reduce(session, copy_to_host(self.measure(session)))

    def measure(self, session: Session) -> dict[str, Tensor]:
        """Return the sums of this rank, on the device. Does not wait for it."""
        local: dict[str, Tensor] = {}
        for player in session.game.players:
            for name, value in self._player_sums(session, player):
                local[f"{player.name}/{name}"] = value
        local |= _probe_game(session)
        local |= self._label_texture_sums(session)
        return local

    def reduce(self, session: Session, local: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the `Health/` values, the same on all ranks. All ranks call this together.

        Args:
            local: what `measure` returned, as float64 on the host.
        """
        vector = torch.cat([value.reshape(-1) for value in local.values()])
        session.world.all_ranks.all_reduce_sum(vector).wait()
        sums = vector.split([value.numel() for value in local.values()])
        return to_stats(dict(zip(local, sums)), session.role.replicated)

    def _player_sums(self, session: Session, player: Player) -> Iterator[tuple[str, Tensor]]:
        """Yield the terms of this rank for sums over the ranks that train a player; the others add 0."""
        is_trained = float(player in session.role.trained_players)
        params = player.flat.params
        sample = strided_sample(params).to(torch.float64, copy=True)  # params change
        previous = self._previous_weights.get(player.name)
        self._previous_weights[player.name] = sample
        is_comparable = previous is not None and player.lr_factor(session.clock.images) > MIN_LR_FACTOR
        zero = torch.zeros(1)
        yield "ranks", torch.tensor(is_trained)
        parts = player.sharded.step_group.size if player.sharded else 1  # of the gradient; it is 0 elsewhere
        yield "gradient_sq", torch.linalg.vector_norm(player.flat.grads).double().square() * is_trained * parts
        yield "comparable", torch.tensor(is_comparable * is_trained)
        yield (
            "update_sq",
            zero if previous is None else (sample - previous).square().sum() * is_trained * is_comparable,
        )
        yield "sample", sample * is_trained
        yield "sample_sq", sample.square().sum() * is_trained
        yield "step_sq", (player.update_norm.pop_max().square() if player.update_norm else zero) * is_trained

    def _label_texture_sums(self, session: Session) -> dict[str, Tensor]:
        """Return {"labels": [3, K]}, decaying sums over ticks: images of each label, their variance, and that between
        neighboring pixels. Empty without labels, or for other data than images."""
        game = session.game
        micro_batch = session.lanes.micro_batches[0]
        shape = micro_batch.images.shape
        if game.labels is None or micro_batch.labels is None or len(shape) != 4 or min(shape[2:]) < 2:
            return {}
        classes = int(game.labels.max()) + 1
        if not MIN_LABELS <= classes <= MAX_LABELS:
            return {}
        if self._label_sums is None:
            self._label_sums = torch.zeros(3, classes, dtype=torch.float64, device=micro_batch.images.device)
        self._label_sums *= LABEL_SUM_DECAY
        variance, neighbor_variance = texture_variances(micro_batch.images)
        terms = torch.stack([torch.ones_like(variance), variance, neighbor_variance])
        self._label_sums.index_add_(1, micro_batch.labels, terms)
        return {"labels": self._label_sums}


def _probe_game(session: Session) -> dict[str, Tensor]:
    """Return sums over the first lanes of the last batch: diversity of fakes, and logits of D on reals and fakes.

    Under async a rank trains one player only: those of G measure what it makes, and D's logits are not measured.
    """
    game = session.game
    role = session.role
    reals = select_probe(session.lanes.micro_batches[0], all_lanes=session.run.device.compile)
    if game.g not in role.trained_players or not game.objective.uses_fakes:
        return dict.fromkeys(("num_fakes", "fake_variance", "real_variance"), torch.zeros(1))
    with torch.no_grad(), without_side_effects(game), game.autocast():
        fakes = make_probe_fakes(game, reals)
        verdicts = () if role.is_split else [run_discriminator(game.d.net, b.images, b.labels) for b in (reals, fakes)]
    num_fakes = len(fakes.images)
    sums = {
        "num_fakes": torch.tensor(float(num_fakes)),
        "fake_variance": within_label_variance(comparison_features(fakes.images), fakes.labels) * num_fakes,
        "real_variance": within_label_variance(comparison_features(reals.images), None) * num_fakes,
    }
    logits = [d_output.logits for d_output in verdicts]
    if role.is_split or not all(isinstance(x, Tensor) for x in logits):  # a user's own D may return anything
        return sums
    real_logits, fake_logits = (x.double().view(len(x), -1).mean(1) for x in logits)  # PatchGAN: mean over patches
    accuracy = (real_logits[:, None] > fake_logits).double().mean() * num_fakes
    return sums | {"real": real_logits.sum(), "fake": fake_logits.sum(), "accuracy": accuracy}


def to_stats(sums: Mapping[str, Tensor], is_replicated: bool) -> dict[str, float]:
    """Return the `Health/` values from sums over ranks."""
    stats: dict[str, float] = {}
    for name in "GD":
        ranks = float(sums[f"{name}/ranks"])
        num_comparable = float(sums[f"{name}/comparable"])
        sample_sq = float(sums[f"{name}/sample_sq"])
        stats[f"Health/{name}/gradient"] = math.sqrt(float(sums[f"{name}/gradient_sq"]) / ranks)
        stats[f"Health/{name}/step"] = math.sqrt(float(sums[f"{name}/step_sq"]) / ranks)
        if num_comparable:
            update_sq = float(sums[f"{name}/update_sq"])
            stats[f"Health/{name}/update_norm"] = math.sqrt(update_sq / num_comparable * ranks / max(sample_sq, TINY))
        if is_replicated and ranks > 1:
            mean_sq = float((sums[f"{name}/sample"] / ranks).square().sum())
            drift_sq = max(sample_sq / ranks / mean_sq - 1, 0.0) if mean_sq else 0.0
            stats[f"Health/{name}/replica_drift"] = math.sqrt(drift_sq) if drift_sq > ROUNDING_TOLERANCE else 0.0
    num_fakes = float(sums["num_fakes"])
    if num_fakes:
        real_variance = max(float(sums["real_variance"]), TINY)
        stats["Health/G/diversity"] = math.sqrt(float(sums["fake_variance"]) / real_variance)
    for name in ("real", "fake", "accuracy"):
        if name in sums:
            stats[f"Health/D/{name}"] = float(sums[name]) / num_fakes
    if "labels" in sums:
        stats |= find_roughest_label(sums["labels"].view(3, -1))
    return stats


def find_roughest_label(label_sums: Tensor) -> dict[str, float]:
    """Return the `Health/label/` values from [3, K] sums; empty before enough labels have enough images."""
    images, variance, neighbor_variance = label_sums
    labels = ((images >= MIN_LABEL_IMAGES) & (variance > 0)).nonzero().flatten()
    if len(labels) < MIN_LABELS:
        return {}
    roughness = neighbor_variance[labels] / variance[labels]
    roughest = int(roughness.argmax())
    others = roughness[torch.arange(len(roughness)) != roughest].median()
    return {
        "Health/label/roughness": float(roughness[roughest]),
        "Health/label/others": float(others),
        "Health/label/number": float(labels[roughest]),
    }


def texture_variances(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return two [N]: the variance of each image's pixels, and half the mean squared difference of neighboring pixels.

    For noise they are equal.
    """
    centered = images.double() - images.double().mean((1, 2, 3), keepdim=True)
    vertical = centered.diff(dim=2).square().mean((1, 2, 3))
    horizontal = centered.diff(dim=3).square().mean((1, 2, 3))
    return centered.square().mean((1, 2, 3)), (vertical + horizontal) / 4


def select_probe(micro_batch: Batch, all_lanes: bool) -> Batch:
    """Return the first lanes of a batch, about `PROBE_IMAGES` images, or all of them."""
    rng = micro_batch.rng
    lanes = rng.lanes if all_lanes else rng.lanes[: max(1, -(-PROBE_IMAGES // rng.per_lane))]
    images = len(lanes) * rng.per_lane
    labels = None if micro_batch.labels is None else micro_batch.labels[:images]
    fields = {name: values[:images] for name, values in micro_batch.fields.items()}
    return Batch(micro_batch.images[:images], labels, dataclasses.replace(rng, lanes=lanes), fields=fields)


def make_probe_fakes(game: Game, micro_batch: Batch) -> Batch:
    """Make fakes, `FAKES_PER_LABEL` of a label; where G is given data, one for each of the batch."""
    for player in game.players:
        player.set_images_per_lane(micro_batch.rng.per_lane)
    if game.uses_torch_rng:
        micro_batch.rng.seed_torch("health")
    z, y = game.generator_inputs(micro_batch, "health")
    if y is not None and game.conditioning_input is None:
        y = y[torch.arange(len(y), device=y.device) // FAKES_PER_LABEL * FAKES_PER_LABEL]
    return Batch(primary_array(game.g.net(z, y), game.primary), y, micro_batch.rng, z)


def comparison_features(images: Tensor) -> Tensor:
    """Return [N, F] float64 features of images [N, ...] by which they are compared."""
    if images.dim() == 4:
        height, width = images.shape[2:]
        size = (min(height, COMPARED_SIDE_PX), min(width, COMPARED_SIDE_PX))
        return F.adaptive_avg_pool2d(images.float(), size).flatten(1).double()
    flat = images.flatten(1)
    return flat[:, :: -(-flat.shape[1] // MAX_COMPARED_VALUES)].double()


def within_label_variance(x: Tensor, labels: Tensor | None) -> Tensor:
    """Return the variance of [N, F] about the mean of each label, summed over F; 0 if no label occurs twice."""
    if labels is None:
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    # a label is numbered by its first image: `unique` would make the host wait for the device
    group = (labels[:, None] == labels).int().argmax(1)
    counts = x.new_zeros(len(x)).index_add_(0, group, x.new_ones(len(x)))
    means = torch.zeros_like(x).index_add_(0, group, x) / counts.clamp(min=1)[:, None]
    degrees_of_freedom = (len(x) - (counts > 0).sum()).clamp(min=1)
    return (x - means[group]).square().sum() / degrees_of_freedom


@contextlib.contextmanager
def without_side_effects(game: Game) -> Iterator[None]:
    """Put back buffers that passes inside write, and torch's random number generator."""
    buffers = [b for player in game.players if player.mutates_buffers for b in player.net.buffers()]
    saved = [buffer.clone() for buffer in buffers]
    device = game.g.flat.params.device
    with backend_of(device).fork_rng(device, enabled=game.uses_torch_rng):
        yield
    for buffer, value in zip(buffers, saved):
        buffer.copy_(value)
