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

from paragan.core.devices import kind_of
from paragan.core.types import Batch, judged
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.update_norm import sampled
from paragan.train.session import Session

PROBED = 64  # reals, and fakes, that a rank looks at
ALIKE = 4  # fakes of one label
SIDE = 8  # images are compared at this resolution, as means over what lies in a pixel,
NUMBERS = 256  # and records of numbers by so many of them
ENOUGH_LABELS, MOST_LABELS = 3, 1024  # that are told apart
MEMORY = 0.9  # of a label's sums, a tick
LEAST = 16.0  # images of a label, before anything is said of it
STILL = 0.01  # of a learning rate, with which weights may well stay where they are
ROUNDING = 1e-12  # of squares, in sums of float64
TINY = 1e-300


class Signs:
    """Measures a session; remembers where its weights were, and what images of each label look like."""

    def __init__(self) -> None:
        self._before = dict[str, Tensor]()
        self._labels: Tensor | None = None  # [3, K]

    def __call__(self, session: Session) -> dict[str, float]:
        """The same on all ranks, which call it together."""
        mine = {f"{player.name}/{name}": x for player in session.game.players for name, x in self._of(session, player)}
        mine |= _probed(session) | self._by_label(session)
        vector = torch.cat([x.double().reshape(-1).cpu() for x in mine.values()])
        session.world.everyone.sum(vector).wait()
        parts = vector.split([x.numel() for x in mine.values()])
        return told(dict(zip(mine, parts)), session.role.replicated)

    def _of(self, session: Session, player: Player) -> Iterator[tuple[str, Tensor]]:
        """Sums over the ranks that move a player; the others add nothing."""
        moves, params = float(player in session.role.moves), player.flat.params
        sample = sampled(params).double()
        before, self._before[player.name] = self._before.get(player.name), sample
        known = before is not None and player.rate(session.clock.images) > STILL
        yield "ranks", torch.tensor(moves)
        yield "square", torch.linalg.vector_norm(player.flat.grads).double().square() * moves
        yield "known", torch.tensor(known * moves)
        yield "went", (sample - before).square().sum() * moves * known if before is not None else torch.zeros(1)
        yield "sample", sample * moves
        yield "length", sample.square().sum() * moves
        yield "step", (player.stride.take().square() if player.stride else torch.zeros(1)) * moves

    def _by_label(self, session: Session) -> dict[str, Tensor]:
        """[3, K] of every label, over the last ticks: images, what varies in them, and what between neighbours."""
        game, hand = session.game, session.lanes.hands[0]
        shape = hand.images.shape
        if game.labels is None or hand.labels is None or len(shape) != 4 or min(shape[2:]) < 2:
            return {}
        classes = int(game.labels.max()) + 1
        if not ENOUGH_LABELS <= classes <= MOST_LABELS:
            return {}
        if self._labels is None:
            self._labels = torch.zeros(3, classes, dtype=torch.float64, device=hand.images.device)
        self._labels *= MEMORY
        varies, apart = texture(hand.images)
        self._labels.index_add_(1, hand.labels, torch.stack([torch.ones_like(varies), varies, apart]))
        return {"labels": self._labels}


def _probed(session: Session) -> dict[str, Tensor]:
    """What G makes and D says at this moment, of the last batch's first lanes. Where ranks move one player only, those
    of G look at what it makes, and nobody has both."""
    game, role = session.game, session.role
    hand = probe(session.lanes.hands[0], whole=session.run.device.compile)
    if game.g not in role.moves:
        return dict.fromkeys(("made", "within", "reals"), torch.zeros(1))
    with torch.no_grad(), unwritten(game), game.autocast():
        fake = alike(game, hand)
        verdicts = () if role.teams else [judged(game.d.net, b.images, b.labels) for b in (hand, fake)]
    number = len(fake.images)
    found = {
        "made": torch.tensor(float(number)),
        "within": within(features(fake.images), fake.labels) * number,
        "reals": within(features(hand.images), None) * number,
    }
    said = [verdict.logits for verdict in verdicts]
    if role.teams or not all(isinstance(one, Tensor) for one in said):  # a D of the user's own says what it wants
        return found
    real, fakes = (one.double().view(len(one), -1).mean(1) for one in said)  # a D of patches: of all of an image
    told_apart = (real[:, None] > fakes).double().mean() * number
    return found | {"real": real.sum(), "fake": fakes.sum(), "accuracy": told_apart}


def told(sums: Mapping[str, Tensor], replicated: bool) -> dict[str, float]:
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
        if replicated and ranks > 1:
            mean = float((sums[f"{name}/sample"] / ranks).square().sum())
            apart = max(length / ranks / mean - 1, 0.0) if mean else 0.0
            found[f"Health/{name}/apart"] = math.sqrt(apart) if apart > ROUNDING else 0.0
    made = float(sums["made"])
    found["Health/G/diversity"] = math.sqrt(float(sums["within"]) / max(float(sums["reals"]), TINY))
    found |= {f"Health/D/{name}": float(sums[name]) / made for name in ("real", "fake", "accuracy") if name in sums}
    return found | (roughest(sums["labels"].view(3, -1)) if "labels" in sums else {})


def roughest(labels: Tensor) -> dict[str, float]:
    """The label whose images look most like noise, and what the others do; nothing before enough were seen."""
    images, varies, apart = labels
    known = ((images >= LEAST) & (varies > 0)).nonzero().flatten()
    if len(known) < ENOUGH_LABELS:
        return {}
    rough = apart[known] / varies[known]
    most = int(rough.argmax())
    others = rough[torch.arange(len(rough)) != most].median()
    return {
        "Health/label/roughness": float(rough[most]),
        "Health/label/others": float(others),
        "Health/label/number": float(known[most]),
    }


def texture(images: Tensor) -> tuple[Tensor, Tensor]:
    """[N] the variance of each image's pixels, and half the mean square of what neighbours differ by: of noise they are
    the same."""
    centred = images.double() - images.double().mean((1, 2, 3), keepdim=True)
    down, across = centred.diff(dim=2).square().mean((1, 2, 3)), centred.diff(dim=3).square().mean((1, 2, 3))
    return centred.square().mean((1, 2, 3)), (down + across) / 4


def probe(hand: Batch, whole: bool) -> Batch:
    """The first lanes of a hand, of PROBED images or a few more. whole: all of them."""
    draw = hand.draw
    lanes = draw.lanes if whole else draw.lanes[: max(1, -(-PROBED // draw.per_lane))]
    images = len(lanes) * draw.per_lane
    labels = None if hand.labels is None else hand.labels[:images]
    return Batch(hand.images[:images], labels, dataclasses.replace(draw, lanes=lanes))


def alike(game: Game, hand: Batch) -> Batch:
    """Fakes, some of each label; where G is given data, one for each of the hand."""
    for player in game.players:
        player.see_lanes_of(hand.draw.per_lane)
    if game.restless:
        hand.draw.seed_torch("health")
    z, y = game.inputs(hand, "health")
    if y is not None and game.given is None:
        y = y[torch.arange(len(y), device=y.device) // ALIKE * ALIKE]
    return Batch(game.g.net(z, y), y, hand.draw, z)


def features(images: Tensor) -> Tensor:
    """[N, ...] -> [N, F] float64 in which images are compared."""
    if images.dim() == 4:
        height, width = images.shape[2:]
        return F.adaptive_avg_pool2d(images.float(), (min(height, SIDE), min(width, SIDE))).flatten(1).double()
    flat = images.flatten(1)
    return flat[:, :: -(-flat.shape[1] // NUMBERS)].double()


def within(x: Tensor, labels: Tensor | None) -> Tensor:
    """The variance of [N, F] about the mean of each label, summed over F; 0 where no label is there twice."""
    if labels is None:
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    _, group = labels.unique(return_inverse=True)
    counts = torch.bincount(group).double()
    means = x.new_zeros(len(counts), x.shape[1]).index_add_(0, group, x) / counts[:, None]
    return (x - means[group]).square().sum() / max(len(x) - len(counts), 1)


@contextlib.contextmanager
def unwritten(game: Game) -> Iterator[None]:
    """Inside, passes leave no trace: buffers that a pass writes are put back, and so are torch's random numbers."""
    buffers = [b for player in game.players if player.written for b in player.net.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    device = game.g.flat.params.device
    with kind_of(device).forked(device, enabled=game.restless):
        yield
    for buffer, value in zip(buffers, kept):
        buffer.copy_(value)
