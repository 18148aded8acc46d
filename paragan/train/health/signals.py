"""What a game shows of its health, measured at a tick: reductions on the device, one sum over ranks.

Health/G/gradient, Health/D/gradient   the norm of the last step's gradient (of ranks' own ones: root mean square)
Health/G/moved, Health/D/moved         how far the weights moved since the last tick, relative to their norm
Health/G/step, Health/D/step           how long the longest step since then was, relative to their norm before it
Health/G/apart, Health/D/apart         how far replicas are from their mean, relative to its norm
Health/D/real, Health/D/fake           what D says of reals and of fakes as G now makes them
Health/D/accuracy                      how often it finds a real more real than a fake (0.5: it cannot tell)
Health/G/diversity                     how much fakes of one label differ, relative to how much reals differ
Health/label/roughness, /number        of the label whose images look most like noise (1: they do), and which it is
Health/label/others                    the median of the other labels

All but `moved`, `step` and those of labels are functions of the state the game is in: a resumed run sees what an
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
from paragan.core.types import Batch, run_discriminator
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.update_norm import strided_sample
from paragan.train.session import Session

PROBE_IMAGES = 64  # reals, and fakes, that a rank looks at
FAKES_PER_LABEL = 4  # fakes of one label
COMPARED_SIDE_PX = 8  # images are compared at this resolution, as means over what lies in a pixel,
MAX_COMPARED_VALUES = 256  # and records of numbers by so many of them
MIN_LABELS, MAX_LABELS = 3, 1024  # that are told apart
LABEL_SUM_DECAY = 0.9  # of a label's sums, a tick
MIN_LABEL_IMAGES = 16.0  # images of a label, before anything is said of it
MIN_LR_FACTOR = 0.01  # of a learning rate, with which weights may well stay where they are
ROUNDING_TOLERANCE = 1e-12  # of squares, in sums of float64
TINY = 1e-300


class HealthSignals:
    """Measures a session; remembers where its weights were, and what images of each label look like."""

    def __init__(self) -> None:
        self._previous_weights = dict[str, Tensor]()
        self._label_sums: Tensor | None = None  # [3, K]

    def __call__(self, session: Session) -> dict[str, float]:
        """The same on all ranks, which call it together."""
        mine = {
            f"{player.name}/{name}": x
            for player in session.game.players
            for name, x in self._player_sums(session, player)
        }
        mine |= _probe_game(session) | self._label_texture_sums(session)
        vector = torch.cat([x.double().reshape(-1).cpu() for x in mine.values()])
        session.world.all_ranks.all_reduce_sum(vector).wait()
        parts = vector.split([x.numel() for x in mine.values()])
        return to_stats(dict(zip(mine, parts)), session.role.replicated)

    def _player_sums(self, session: Session, player: Player) -> Iterator[tuple[str, Tensor]]:
        """Sums over the ranks that move a player; the others add nothing."""
        moves, params = float(player in session.role.trained_players), player.flat.params
        sample = strided_sample(params).double()
        before, self._previous_weights[player.name] = self._previous_weights.get(player.name), sample
        known = before is not None and player.lr_factor(session.clock.images) > MIN_LR_FACTOR
        yield "ranks", torch.tensor(moves)
        yield "square", torch.linalg.vector_norm(player.flat.grads).double().square() * moves
        yield "known", torch.tensor(known * moves)
        yield "went", (sample - before).square().sum() * moves * known if before is not None else torch.zeros(1)
        yield "sample", sample * moves
        yield "length", sample.square().sum() * moves
        yield "step", (player.update_norm.pop_max().square() if player.update_norm else torch.zeros(1)) * moves

    def _label_texture_sums(self, session: Session) -> dict[str, Tensor]:
        """[3, K] of every label, over the last ticks: images, what varies in them, and what between neighbours."""
        game, hand = session.game, session.lanes.micro_batches[0]
        shape = hand.images.shape
        if game.labels is None or hand.labels is None or len(shape) != 4 or min(shape[2:]) < 2:
            return {}
        classes = int(game.labels.max()) + 1
        if not MIN_LABELS <= classes <= MAX_LABELS:
            return {}
        if self._label_sums is None:
            self._label_sums = torch.zeros(3, classes, dtype=torch.float64, device=hand.images.device)
        self._label_sums *= LABEL_SUM_DECAY
        varies, apart = texture_variances(hand.images)
        self._label_sums.index_add_(1, hand.labels, torch.stack([torch.ones_like(varies), varies, apart]))
        return {"labels": self._label_sums}


def _probe_game(session: Session) -> dict[str, Tensor]:
    """What G makes and D says at this moment, of the last batch's first lanes. Where ranks move one player only, those
    of G look at what it makes, and nobody has both."""
    game, role = session.game, session.role
    hand = select_probe(session.lanes.micro_batches[0], all_lanes=session.run.device.compile)
    if game.g not in role.trained_players:
        return dict.fromkeys(("made", "within", "reals"), torch.zeros(1))
    with torch.no_grad(), without_side_effects(game), game.autocast():
        fake = make_probe_fakes(game, hand)
        verdicts = () if role.is_split else [run_discriminator(game.d.net, b.images, b.labels) for b in (hand, fake)]
    number = len(fake.images)
    found = {
        "made": torch.tensor(float(number)),
        "within": within_label_variance(comparison_features(fake.images), fake.labels) * number,
        "reals": within_label_variance(comparison_features(hand.images), None) * number,
    }
    said = [verdict.logits for verdict in verdicts]
    if role.is_split or not all(isinstance(one, Tensor) for one in said):  # a D of the user's own says what it wants
        return found
    real, fakes = (one.double().view(len(one), -1).mean(1) for one in said)  # a D of patches: of all of an image
    told_apart = (real[:, None] > fakes).double().mean() * number
    return found | {"real": real.sum(), "fake": fakes.sum(), "accuracy": told_apart}


def to_stats(sums: Mapping[str, Tensor], is_replicated: bool) -> dict[str, float]:
    """A line's part, from sums over ranks."""
    found = dict[str, float]()
    for name in "GD":
        ranks, known, square, went, length, step = (
            float(sums[f"{name}/{what}"]) for what in ("ranks", "known", "square", "went", "length", "step")
        )
        found[f"Health/{name}/gradient"] = math.sqrt(square / ranks)
        found[f"Health/{name}/step"] = math.sqrt(step / ranks)
        if known:
            found[f"Health/{name}/moved"] = math.sqrt(went / known * ranks / max(length, TINY))
        if is_replicated and ranks > 1:
            mean = float((sums[f"{name}/sample"] / ranks).square().sum())
            apart = max(length / ranks / mean - 1, 0.0) if mean else 0.0
            found[f"Health/{name}/apart"] = math.sqrt(apart) if apart > ROUNDING_TOLERANCE else 0.0
    made = float(sums["made"])
    found["Health/G/diversity"] = math.sqrt(float(sums["within"]) / max(float(sums["reals"]), TINY))
    found |= {f"Health/D/{name}": float(sums[name]) / made for name in ("real", "fake", "accuracy") if name in sums}
    return found | (find_roughest_label(sums["labels"].view(3, -1)) if "labels" in sums else {})


def find_roughest_label(label_sums: Tensor) -> dict[str, float]:
    """The label whose images look most like noise, and what the others do; nothing before enough were seen."""
    images, varies, apart = label_sums
    known = ((images >= MIN_LABEL_IMAGES) & (varies > 0)).nonzero().flatten()
    if len(known) < MIN_LABELS:
        return {}
    rough = apart[known] / varies[known]
    most = int(rough.argmax())
    others = rough[torch.arange(len(rough)) != most].median()
    return {
        "Health/label/roughness": float(rough[most]),
        "Health/label/others": float(others),
        "Health/label/number": float(known[most]),
    }


def texture_variances(images: Tensor) -> tuple[Tensor, Tensor]:
    """[N] the variance of each image's pixels, and half the mean square of what neighbours differ by: of noise they are
    the same."""
    centred = images.double() - images.double().mean((1, 2, 3), keepdim=True)
    down, across = centred.diff(dim=2).square().mean((1, 2, 3)), centred.diff(dim=3).square().mean((1, 2, 3))
    return centred.square().mean((1, 2, 3)), (down + across) / 4


def select_probe(micro_batch: Batch, all_lanes: bool) -> Batch:
    """The first lanes of a hand, of PROBED images or a few more. whole: all of them."""
    draw = micro_batch.rng
    lanes = draw.lanes if all_lanes else draw.lanes[: max(1, -(-PROBE_IMAGES // draw.per_lane))]
    images = len(lanes) * draw.per_lane
    labels = None if micro_batch.labels is None else micro_batch.labels[:images]
    return Batch(micro_batch.images[:images], labels, dataclasses.replace(draw, lanes=lanes))


def make_probe_fakes(game: Game, micro_batch: Batch) -> Batch:
    """Fakes, some of each label; where G is given data, one for each of the hand."""
    for player in game.players:
        player.set_images_per_lane(micro_batch.rng.per_lane)
    if game.uses_torch_rng:
        micro_batch.rng.seed_torch("health")
    z, y = game.generator_inputs(micro_batch, "health")
    if y is not None and game.conditioning_input is None:
        y = y[torch.arange(len(y), device=y.device) // FAKES_PER_LABEL * FAKES_PER_LABEL]
    return Batch(game.g.net(z, y), y, micro_batch.rng, z)


def comparison_features(images: Tensor) -> Tensor:
    """[N, ...] -> [N, F] float64 in which images are compared."""
    if images.dim() == 4:
        height, width = images.shape[2:]
        return (
            F.adaptive_avg_pool2d(images.float(), (min(height, COMPARED_SIDE_PX), min(width, COMPARED_SIDE_PX)))
            .flatten(1)
            .double()
        )
    flat = images.flatten(1)
    return flat[:, :: -(-flat.shape[1] // MAX_COMPARED_VALUES)].double()


def within_label_variance(x: Tensor, labels: Tensor | None) -> Tensor:
    """The variance of [N, F] about the mean of each label, summed over F; 0 where no label is there twice."""
    if labels is None:
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    _, group = labels.unique(return_inverse=True)
    counts = torch.bincount(group).double()
    means = x.new_zeros(len(counts), x.shape[1]).index_add_(0, group, x) / counts[:, None]
    return (x - means[group]).square().sum() / max(len(x) - len(counts), 1)


@contextlib.contextmanager
def without_side_effects(game: Game) -> Iterator[None]:
    """Inside, passes leave no trace: buffers that a pass writes are put back, and so are torch's random numbers."""
    buffers = [b for player in game.players if player.mutates_buffers for b in player.net.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    device = game.g.flat.params.device
    with backend_of(device).fork_rng(device, enabled=game.uses_torch_rng):
        yield
    for buffer, value in zip(buffers, kept):
        buffer.copy_(value)
