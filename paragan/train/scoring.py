"""Scores of a run's averaged generator, while it trains and afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm.groups import Group
from ..comm.world import World
from ..data.images import Images
from ..errors import Unusable
from ..eval.evaluate import Protocol, Score, comparable, evaluate
from ..eval.features import FeatureSpace, by_name, values
from ..eval.metrics import METRICS, metric_names, number_of_fakes
from ..eval.shares import dealt
from ..report.records import Records, read
from .best import Best, chosen
from .loop import Session
from .model import load_model
from .observers import averaged_sampler, every
from .progress import Screen
from .run import Evaluation, Run, load_images
from .sampler import Merged, Sampler, ahead


@dataclass(frozen=True)
class Scoring:
    """An observer: scores at the times the run asks for and at its end, shared by all ranks."""

    folder: Path
    images: Images
    screen: Screen
    wanted: Evaluation
    best: Best

    def __call__(self, session: Session) -> None:
        wanted = self.wanted
        due = every(session, wanted.every_kimg) or session.clock.done
        missing = tuple(m for m in wanted.metrics if not self._has(m, session.clock.kimg)) if due else ()
        if not missing:
            return
        wanted = dataclasses.replace(wanted, metrics=missing)
        self.screen.say(f"scoring {wanted.count:,} fakes: {', '.join(missing)}")
        with session.stats.scoring():
            scores = self._scored(session, wanted)
            if session.world.first:
                append(self.folder, scores, session.clock.kimg)
            self.best(session, scores)
        if session.clock.done and session.world.first:  # its line of stats is there already
            beside = session.stats.beside()
            Records(self.folder / "stats.jsonl").amend(lambda row: {k: row.get(k, 0.0) + s for k, s in beside.items()})
        spent = max(score.seconds for score in scores)
        self.screen.say(f"{session.clock.kimg:g} kimg: {summary(scores)}  (in {spent:.3g} s)")

    def _scored(self, session: Session, wanted: Evaluation) -> list[Score]:
        batch_norm = "standing" if session.game.g.coupled else "none"
        with averaged_sampler(session, self.images) as sampler:
            protocol = Protocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=session.run.seed)
            return score(sampler, self.images, wanted, protocol, session.world.everyone)

    def _has(self, metric: str, kimg: float) -> bool:
        """Whether this moment was scored already (a finished run that is opened again)."""
        there = {row.get("name") for row in read(self.folder / "metrics.jsonl") if row.get("kimg") == kimg}
        return there.issuperset(metric_names(metric, feature_space(self.wanted, self.images)))


BLOCK = 64  # images that are looked at together


def score(
    sampler: Sampler | Merged,
    images: Images,
    wanted: Evaluation,
    protocol: Protocol,
    group: Group,
    truncation: float = 1.0,
) -> list[Score]:
    """The scores a run asks for, every rank sampling its share of the fakes."""
    mine = dealt(number_of_fakes(wanted.metrics, wanted.count), BLOCK, group.rank, group.size)
    return evaluate(
        ahead(sampler, mine, protocol.seed, truncation),
        images.images,
        space=feature_space(wanted, images),
        metrics=list(wanted.metrics),
        count=wanted.count,
        group=group,
        batch=BLOCK,
        protocol=_described(protocol, images, sampler),
        device=sampler.device,
    )


def check(wanted: Evaluation, images: Images, best: str = "none") -> None:
    """Refuse what could not be scored, before anything is trained. best: the score that picks the best model."""
    space = feature_space(wanted, images)
    chosen(best, wanted.metrics, space)
    for name in wanted.metrics:
        metric_names(name, space)
        least = METRICS[name].least
        if min(wanted.count, len(images.images)) < least:
            raise Unusable(
                f"evaluation.metrics: {name} needs at least {least} images, and there are {len(images.images)} reals "
                f"and {wanted.count} fakes (evaluation.count)"
            )
    number_of_fakes(wanted.metrics, wanted.count)


def feature_space(wanted: Evaluation, images: Images) -> FeatureSpace:
    """What a score sees of such images; of numbers, the numbers."""
    if images.numbers:
        if wanted.features not in ("values", "pixels"):
            raise Unusable(f"evaluation.features={wanted.features} sees images, and the data are numbers: use values")
        return values(images.shape)
    channels, resolution, _ = images.shape
    return by_name(wanted.features, resolution, channels, wanted.inception or None)


def _described(protocol: Protocol, images: Images, sampler: Sampler | Merged) -> Protocol:
    channels, *sides = images.shape
    what = f"{sides[0]}x{sides[0]}x{channels}, square crop, Lanczos" if not images.numbers else "as they are"
    return dataclasses.replace(
        protocol,
        data=f"{images.fingerprint} {what}",
        split="all",
        labels="as in the data" if sampler.prior.shares else "none",
    )


def append(folder: Path, scores: Sequence[Score], kimg: float) -> None:
    Records(folder / "metrics.jsonl").extend(one.to_json(kimg) for one in scores)


def summary(scores: Sequence[Score]) -> str:
    """fd_pixels 1.23  precision_pixels 0.91 ..."""
    return "  ".join(f"{one.name} {one.value:.4g}" for one in scores)


def rescore(
    folder: Path,
    run: Run,
    wanted: Evaluation,
    world: World,
    screen: Screen,
    data: str | None = None,
    truncation: float = 1.0,
    seed: int = 0,
    nets: Any = None,
) -> list[Score]:
    """Score the model of a finished (or running) run, add the scores to its metrics.jsonl, and say where
    they were measured differently from those that stand there."""
    if data:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=data))
    images = load_images(run)
    model = load_model(folder, world.device, nets, images)
    batch_norm = str(model.config["batch_norm"])
    protocol = Protocol(batch_norm=batch_norm, ema=True, truncation=truncation, seed=seed)
    screen.say(f"scoring {wanted.count:,} fakes: {', '.join(wanted.metrics)}")
    scores = score(model.sampler, images, wanted, protocol, world.everyone, truncation)
    if world.first:
        former = read(folder / "metrics.jsonl")
        append(folder, scores, float(model.config["kimg"]))
        for one in scores:
            screen.say(f"{one.name} {one.value:.4g}" + "".join(f"  ({note})" for note in one.notes))
            other = next((row for row in reversed(former) if row.get("name") == one.name), None)
            if other and (fields := comparable(one, other)):
                screen.say(f"  not comparable with the {other['value']:.4g} before: other {', '.join(fields)}")
    return scores
