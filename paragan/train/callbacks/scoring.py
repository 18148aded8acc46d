"""Scores of a run's averaged generator, while it trains and afterwards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.comm.process_group import Group
from paragan.comm.world import World
from paragan.config.resolve import load_images
from paragan.config.run import Run
from paragan.config.sections import Evaluation
from paragan.core.errors import Interrupted, Unusable
from paragan.core.jsonl import Records, Row, is_number, read
from paragan.data.dataset import Images
from paragan.eval import classifier
from paragan.eval.accumulators import Features, Heed, unheeded
from paragan.eval.accumulators import wanted as readings_of
from paragan.eval.evaluate import Labels, Protocol, Score, comparable, evaluate, summarize
from paragan.eval.feature_stats import Summary
from paragan.eval.features import FeatureSpace, by_name, from_module, values
from paragan.eval.metrics import METRICS, check_labels, metric_names, number_of_fakes
from paragan.eval.reference_stats import from_file
from paragan.eval.sharding import GivenUp, dealt, everywhere
from paragan.models.model import Model, load_model
from paragan.models.sampler import Merged, Sampler, ahead
from paragan.train.averaged_model import averaged_sampler
from paragan.train.callbacks.best_model import Best, chosen
from paragan.train.console import Screen
from paragan.train.session import Session, every

BLOCK = 64  # images that are looked at together
TRIES = 10  # to read one model on all ranks while a run replaces it
HELD = 2**28  # bytes of the reals' features that a rank keeps from one time to the next


@dataclass(frozen=True)
class Against:
    """What fakes are compared with: a space, and what it saw of the reals. Made once, it serves often."""

    space: FeatureSpace
    reals: Summary | None  # where a metric looks at them


@dataclass
class Scoring:
    """An observer: scores at the times the run asks for and at its end, shared by all ranks."""

    folder: Path
    images: Images
    screen: Screen
    wanted: Evaluation
    best: Best
    _kept: tuple[Any, Against] | None = None  # for which metrics and ranks

    def __call__(self, session: Session) -> None:
        wanted = self.wanted
        due = every(session, wanted.every_kimg) or session.clock.done
        missing = tuple(m for m in wanted.metrics if not self._has(m, session.clock.kimg)) if due else ()
        if not missing:
            return
        wanted = dataclasses.replace(wanted, metrics=missing)
        self.screen.say(f"scoring {wanted.count:,} fakes: {', '.join(missing)}")
        try:
            with session.stats.scoring():
                scores = self._scored(session, wanted)
                if session.world.first:
                    append(self.folder, scores, session.clock.kimg)
                self.best(session, scores)
        except GivenUp:  # who goes on with the run does it again
            if session.clock.done:
                what = f"stopped at its end, {session.clock.kimg:g} kimg, before its scores were taken"
                raise Interrupted(what, everywhere=not session.world.first) from None
            self.screen.say(f"{session.clock.kimg:g} kimg: its scores are left to who goes on")
            return
        if session.clock.done and session.world.first:  # its line of stats is there already
            beside = session.stats.beside()
            Records(self.folder / "stats.jsonl").amend(lambda row: {k: row.get(k, 0.0) + s for k, s in beside.items()})
        spent = max(score.seconds for score in scores)
        self.screen.say(f"{session.clock.kimg:g} kimg: {summary(scores)}  (in {spent:.3g} s)")

    def _scored(self, session: Session, wanted: Evaluation) -> list[Score]:
        batch_norm = "standing" if session.game.g.coupled else "none"
        with averaged_sampler(session, self.images) as sampler:
            protocol = Protocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=session.run.seed)
            group = session.world.everyone

            def heed(seen: int) -> bool:
                self.screen.count(seen, wanted.count)
                return session.asked()

            to = self._against(wanted, group, sampler, lambda seen: session.asked())
            return score(sampler, self.images, wanted, protocol, group, against=to, heed=heed)

    def _has(self, metric: str, kimg: float) -> bool:
        """Whether this moment was scored already (a finished run that is opened again)."""
        return names_there(self.folder, kimg).issuperset(metric_names(metric, feature_space(self.wanted, self.images)))

    def _against(self, wanted: Evaluation, group: Group, sampler: Sampler | Merged, heed: Heed) -> Against:
        """What was made last time, if it is still right on every rank (they may be other ranks now)."""
        key = (wanted, group.rank, group.size)
        if everywhere(group, self._kept is not None and self._kept[0] == key) and self._kept:
            return self._kept[1]
        made = against(wanted, self.images, group, sampler.device, heed)
        share = made.reals and made.reals.kept.get(Features())
        self._kept = None if share and share.own.nbytes > HELD else (key, made)
        return made


def against(wanted: Evaluation, images: Images, group: Group, device: torch.device, heed: Heed = unheeded) -> Against:
    """What is needed for these metrics. Every rank calls this: a classifier may have to be trained first."""
    space = ready_space(wanted, images, group, device)
    metrics = [name for name in wanted.metrics if METRICS[name].reals]
    if not metrics:
        return Against(space, None)
    if wanted.reference:
        return Against(space, from_file(wanted.reference, space, device))
    how: dict[str, Any] = {"group": group, "batch": BLOCK, "device": device, "heed": heed}
    labels = Labels(images.classes, images.labels)
    return Against(
        space, summarize(images.images, space=space, metrics=metrics, labels=labels, known_as=images.fingerprint, **how)
    )


def score(
    sampler: Sampler | Merged,
    images: Images,
    wanted: Evaluation,
    protocol: Protocol,
    group: Group,
    truncation: float = 1.0,
    against: Against | None = None,
    heed: Heed = unheeded,
) -> list[Score]:
    """The scores a run asks for, every rank sampling its share of the fakes."""
    to = against or _against(wanted, images, group, sampler.device)
    mine = dealt(number_of_fakes(wanted.metrics, wanted.count), BLOCK, group.rank, group.size)
    told = bool(sampler.prior.shares)

    def fakes_labels(rows: range) -> Any:
        return sampler.labels(rows, protocol.seed)

    return evaluate(
        ahead(sampler, mine, protocol.seed, truncation),
        to.reals,
        space=to.space,
        metrics=list(wanted.metrics),
        count=wanted.count,
        group=group,
        batch=BLOCK,
        protocol=_described(protocol, images, sampler),
        device=sampler.device,
        labels=Labels(images.classes, images.labels, fakes_labels if told else None),
        heed=heed,
    )


_against = against  # under another name where an argument has this one


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
    check_labels(wanted.metrics, space, len(images.classes) if images.labels is not None else 0)
    if wanted.reference:
        reals = from_file(wanted.reference, space)
        for reading in readings_of([METRICS[name].reals for name in wanted.metrics]):
            reals.of(reading)


def _check_classes(wanted: Evaluation, images: Images, model: Model) -> None:
    """Refuse scores class by class where the classes of the data are others than those G was trained on. A model whose
    classes are numbers may go with any names."""
    labelled = [name for name in wanted.metrics if METRICS[name].labelled]
    numbers = tuple(map(str, range(len(images.classes))))
    if labelled and model.classes not in ((), images.classes, numbers):
        theirs, mine = (", ".join(names[:5]) + ", ..." * (len(names) > 5) for names in (model.classes, images.classes))
        raise Unusable(
            f"metrics: {labelled[0]} goes class by class, and the data have other classes ({len(images.classes)}: "
            f"{mine}) than the model ({len(model.classes)}: {theirs}); fd, kid and prdc need none"
        )


def feature_space(wanted: Evaluation, images: Images) -> FeatureSpace:
    """What a score sees of such images; of numbers, the numbers. A classifier is not trained yet."""
    name = wanted.features
    if images.numbers:
        if name not in ("values", "pixels"):
            raise Unusable(f"evaluation.features={name} sees images, and the data are numbers: use values")
        return values(images.shape)
    channels, resolution, _ = images.shape
    if name == classifier.NAME:
        return classifier.outline(images.labels, images.classes)
    return (
        from_module(name, images.shape)
        if ":" in name
        else by_name(name, resolution, channels, wanted.inception or None)
    )


def ready_space(wanted: Evaluation, images: Images, group: Group, device: torch.device) -> FeatureSpace:
    """The same, to be looked through. Every rank calls this."""
    if wanted.features != classifier.NAME or images.numbers:
        return feature_space(wanted, images)
    how: dict[str, Any] = {"known_as": images.fingerprint, "group": group, "device": device}
    return classifier.trained(images.images, images.labels, images.classes, **how)


def _described(protocol: Protocol, images: Images, sampler: Sampler | Merged) -> Protocol:
    channels, *sides = images.shape
    what = f"{sides[0]}x{sides[0]}x{channels}, square crop, Lanczos" if not images.numbers else "as they are"
    return dataclasses.replace(
        protocol,
        data=f"{images.fingerprint} {what}",
        split="all",
        labels="as in the data" if sampler.prior.shares else "none",
    )


def names_there(folder: Path, kimg: float) -> set[str]:
    """The scores that were taken of a run at a moment; those of truncated samples do not stand for them."""
    rows = [row for row in read(folder / "metrics.jsonl") if row.get("kimg") == kimg]
    return {str(row.get("name")) for row in rows if _protocol(row).get("truncation") in (None, 1.0)}


def _protocol(row: Row) -> Mapping[str, Any]:
    """How a score was measured; nothing where another program wrote it and does not say."""
    found = row.get("protocol")
    return found if isinstance(found, Mapping) else {}


def append(folder: Path, scores: Sequence[Score], kimg: float) -> None:
    Records(folder / "metrics.jsonl").extend(one.to_json(kimg) for one in scores)


def summary(scores: Sequence[Score]) -> str:
    """fd_pixels 1.23  precision_pixels 0.91 ..."""
    return "  ".join(f"{one.name} {one.value:.4g}" for one in scores)


def sweep(
    folder: Path,
    run: Run,
    wanted: Evaluation,
    world: World,
    screen: Screen,
    data: str | None = None,
    truncations: Sequence[float] = (1.0,),
    seed: int = 0,
    nets: Any = None,
) -> list[list[Score]]:
    """Score the model of a finished (or running) run, under several truncations, the reals seen once. Scores are added
    to its metrics.jsonl, the largest truncation last, and what they may not be compared with is said."""
    if data:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=data))
    images = load_images(run)
    check(wanted, images)
    model = alike(world, lambda: load_model(folder, world.device, nets, images))
    _check_classes(wanted, images, model)
    screen.say(f"scoring {wanted.count:,} fakes: {', '.join(wanted.metrics)}")
    if wanted.features == classifier.NAME:
        screen.say("a classifier of the data is trained first, where none is kept yet: that takes minutes")
    to = against(wanted, images, world.everyone, world.device)
    found: list[list[Score]] = []
    for truncation in sorted(truncations):
        protocol = Protocol(batch_norm=model.batch_norm, ema=True, truncation=truncation, seed=seed)
        found.append(score(model.sampler, images, wanted, protocol, world.everyone, truncation, to))
        if world.first:
            _tell(folder, found[-1], model.kimg, screen)
    if len(found) > 1:
        for line in table(found):
            screen.say(line)
    return found


def alike(world: World, load: Callable[[], Model]) -> Model:
    """The model in a folder, the same one on every rank: a run may replace it while they read."""
    for _ in range(TRIES):
        model = load()
        if len(set(world.agree(json.dumps(model.config, sort_keys=True)))) == 1:
            return model
    raise Unusable(f"{model.folder} is another model on every rank: put it on storage they share")


def _tell(folder: Path, scores: Sequence[Score], kimg: float, screen: Screen) -> None:
    """Write scores down and show them, and what they may not be compared with."""
    former = read(folder / "metrics.jsonl")
    append(folder, scores, kimg)
    for one in scores:
        screen.say(f"{one.name} {one.value:.4g}" + "".join(f"  ({note})" for note in one.notes))
        if one.per_class:
            screen.say("  " + "  ".join(f"{name} {value:.4g}" for name, value in one.per_class.items()))
    for reason, names in _incomparable(scores, former).items():
        screen.say(f"not comparable with {', '.join(names)} before: {reason}")


def _incomparable(scores: Sequence[Score], former: Sequence[Row]) -> dict[str, list[str]]:
    """Why, of scores that may be compared with none of their name; and with which values last."""
    found: dict[str, list[str]] = {}
    for one in scores:
        others = [row for row in former if row.get("name") == one.name and is_number(row.get("value"))]
        differing = [comparable(one, {**row, "protocol": _protocol(row)}) for row in others]
        if differing and all(differing):
            last = _protocol(others[-1])
            reason = ", ".join(f"{key} {one.protocol.get(key)}, was {last.get(key)}" for key in differing[-1])
            found.setdefault(reason, []).append(f"the {one.name} {others[-1]['value']:.4g}")
    return found


def table(found: Sequence[Sequence[Score]]) -> list[str]:
    """A line a truncation, a column a score."""
    rows = [["truncation", *(one.name for one in found[0])]]
    rows += [[f"{scores[0].protocol['truncation']:g}", *(f"{one.value:.4g}" for one in scores)] for scores in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
