"""The table of metrics: what each is called in which space, where it is defined, what it takes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paragan.core.errors import Unusable
from paragan.eval import kid, per_class, precision_recall
from paragan.eval.accumulators import Features, Guesses, Hits, OfAll, OfClasses, Pictures, Reading
from paragan.eval.classifier import TRAINING
from paragan.eval.feature_stats import Summary
from paragan.eval.features import FeatureSpace, inception_path, nearest, source
from paragan.eval.frechet import Gaussian, frechet
from paragan.eval.sharding import Summing, agreed

SUBSET = 1000  # images of one of KID's subsets, as is usual
COUNT = 50_000  # fakes, where nobody says otherwise: the field's custom
MOST_FEATURES = 8192  # of a covariance, whose roots cost the cube of it
MOST_NUMBERS = 2**27  # of the covariances of all classes: 1 GB
TESTED = 10_000  # reals that a classifier trained on fakes is tried on


class Found(NamedTuple):
    """A number, and what is known about it."""

    value: float
    error: float | None = None  # how far arithmetic may have moved it
    per_class: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()


class Given(NamedTuple):
    """What a metric is computed from."""

    real: Summary
    fake: Summary
    group: Summing
    seed: int
    classes: tuple[str, ...]
    device: torch.device


def _frechet(at: Given) -> list[Found]:
    a, b = at.real.of(OfAll()), at.fake.of(OfAll())
    value, error = agreed(at.group, lambda: list(frechet(a, b)), 2)
    return [Found(value, error)]


def _kid(at: Given, **settings: int) -> list[Found]:
    x, y = at.real.of(Features()), at.fake.of(Features())
    return [Found(kid.kid(x, y, seed=at.seed, group=at.group, **settings))]


def _is(at: Given, *, splits: int) -> list[Found]:
    return [Found(at.fake.of(Guesses(splits)).score(at.group))]


def _prdc(at: Given, *, k: int) -> list[Found]:
    return [Found(v) for v in precision_recall.prdc(at.real.of(Features()), at.fake.of(Features()), k, group=at.group)]


def _intra(at: Given) -> list[Found]:
    a: list[Gaussian | None] = at.real.of(OfClasses())
    b: list[Gaussian | None] = at.fake.of(OfClasses())

    def compute() -> list[float]:
        return [n for one in per_class.intra_frechet(a, b) for n in (one or (-1.0, 0.0))]  # -1: there is none

    numbers = agreed(at.group, compute, 2 * len(a))
    values = {c: v for c, v in zip(at.classes, numbers[::2], strict=True) if v >= 0}
    if not values:
        raise Unusable("count: no class has two fakes and two reals, which an intra-class distance needs; ask for more")
    error = sum(numbers[1::2]) / len(values)
    return [Found(sum(values.values()) / len(values), error, values, _without(at.classes, values))]


def _accuracy(at: Given) -> list[Found]:
    return [_told(at, at.fake.of(Hits()))]


def _cas(at: Given, *, shown: int, tested: int) -> list[Found]:
    fakes, reals = at.fake.of(_PICTURES), at.real.of(_TESTED)
    how = dataclasses.replace(TRAINING, shown=shown, seed=at.seed)
    tally = per_class.trained_on_fakes(fakes, reals, len(at.classes), at.group, at.device, how)
    return [_told(at, tally)]


def _told(at: Given, tally: torch.Tensor) -> Found:
    share, each = per_class.shares(tally)
    values = {name: one for name, one in zip(at.classes, each, strict=True) if one is not None}
    return Found(share, None, values, _without(at.classes, values))


def _without(classes: Sequence[str], values: Mapping[str, float]) -> tuple[str, ...]:
    """Which classes there is no number of, as a note."""
    left = [name for name in classes if name not in values]
    some = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
    return (f"too few images of {len(left)} of {len(classes)} classes ({some})",) if left else ()


# where a metric is defined ----------------------------------------------------------------------------------


def _anywhere(name: str, space: FeatureSpace) -> None:
    """The metric is defined in every space."""


def _where_covariance_fits(name: str, space: FeatureSpace) -> None:
    if space.num_features > MOST_FEATURES:
        have = f"{space.name} has {space.num_features} features"
        raise Unusable(f"metrics: {name} takes at most {MOST_FEATURES} features and {have}; kid,prdc take more")


def _in_inception(name: str, space: FeatureSpace) -> None:
    if not space.is_inception:
        plain = "intra_fd" if name.startswith("intra") else "fd"
        raise Unusable(
            f"metrics: {name} is defined in the Inception space only, not in {space.name}, where {plain} works; "
            f"for {name} choose the space inception, whose file is {source(inception_path())}"
        )


def _with_logits(name: str, space: FeatureSpace) -> None:
    if not space.num_logits:
        raise Unusable(
            f"metrics: {name} needs the logits of a classifier, and {space.name} has none; "
            "fd, kid and prdc work there, or choose the space inception or resnet20"
        )


def _with_the_data_s_classes(name: str, space: FeatureSpace) -> None:
    if not space.classes:
        raise Unusable(
            f"metrics: {name} needs a classifier of the data's own classes, which {space.name} is not: "
            "choose the space resnet20 (--features resnet20)"
        )


# what to keep in mind ---------------------------------------------------------------------------------------


def _rank_deficient(space: FeatureSpace, real: Summary, fake: Summary) -> tuple[str, ...]:
    """Why a Fréchet distance is too large, if it is: too few images for its covariances."""
    sides = {"reals": real.count, "fakes": fake.count}
    return tuple(
        f"{count} {side} for {space.num_features} features: biased upwards"
        for side, count in sides.items()
        if 0 < count <= space.num_features
    )


def _rank_deficient_classes(space: FeatureSpace, real: Summary, fake: Summary) -> tuple[str, ...]:
    least = [min((g.count for g in s.of(OfClasses()) if g), default=0) for s in (real, fake)]
    return tuple(
        f"a class has {count} {side} for {space.num_features} features: biased upwards"
        for side, count in zip(("reals", "fakes"), least, strict=True)
        if count <= space.num_features
    )


def _few_for_classes(space: FeatureSpace, real: Summary | None, fake: Summary) -> tuple[str, ...]:
    few = f"{fake.count} fakes for {space.num_logits} classes: biased downwards"
    return (few,) if fake.count <= space.num_logits else ()


def _small_subsets(space: FeatureSpace, real: Summary, fake: Summary) -> tuple[str, ...]:
    size = min(real.count, fake.count)
    return (f"subsets of {size} images: there are no more",) if size < SUBSET else ()


def _nothing(space: FeatureSpace, real: Summary | None, fake: Summary) -> tuple[str, ...]:
    return ()


# the table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """What may be asked for: which scores it yields, where it is defined, and what it takes.

    In a score's name {} stands for the space; a name without it gets `_<space>` outside Inception.
    """

    scores: tuple[str, ...]
    measure: Callable[..., list[Found]]
    fakes: tuple[Reading, ...]  # what it reads of them
    reals: tuple[Reading, ...]  # likewise; () where it does not look at them
    settings: Mapping[str, int] = field(default_factory=dict)  # part of the protocol
    require: Callable[[str, FeatureSpace], None] = _anywhere  # raises where it is not defined
    notes: Callable[..., tuple[str, ...]] = _nothing  # of (space, real, fake): what to keep in mind
    promised: int | None = None  # how many fakes its name says

    @property
    def least(self) -> int:
        """The fewest images it is defined for: two, or more than the neighbours it counts."""
        return self.settings.get("k", 0) + 2

    @property
    def labelled(self) -> bool:
        """Whether it needs labels."""
        return any(reading.labelled for reading in (*self.fakes, *self.reals))


_ALL, _EACH, _FEATURES = (OfAll(),), (OfClasses(),), (Features(),)
_PICTURES, _TESTED = Pictures(TRAINING.most), Pictures(TESTED)
_CAS = {"shown": TRAINING.shown, "tested": TESTED}
_FRECHET = Metric((), _frechet, _ALL, _ALL, require=_where_covariance_fits, notes=_rank_deficient)
_INTRA = Metric(("intra_fd_{}",), _intra, _EACH, _EACH, require=_where_covariance_fits, notes=_rank_deficient_classes)
_KID = Metric(("kid",), _kid, _FEATURES, _FEATURES, {"subsets": 100, "subset_size": SUBSET}, notes=_small_subsets)
_IS = Metric(("is",), _is, (Guesses(10),), (), {"splits": 10}, _with_logits, _few_for_classes)
_PRDC = Metric(("precision_{}", "recall_{}", "density_{}", "coverage_{}"), _prdc, _FEATURES, _FEATURES, {"k": 5})

METRICS: Mapping[str, Metric] = {
    "fd": dataclasses.replace(_FRECHET, scores=("fd_{}",)),
    "fid": dataclasses.replace(_FRECHET, scores=("fid",), require=_in_inception),
    "fid50k_full": dataclasses.replace(_FRECHET, scores=("fid50k_full",), require=_in_inception, promised=50_000),
    "kid": _KID,
    "kid50k_full": dataclasses.replace(_KID, scores=("kid50k_full",), promised=50_000),
    "is": _IS,
    "is1": dataclasses.replace(_IS, scores=("is1",), fakes=(Guesses(1),), settings={"splits": 1}),
    "is50k": dataclasses.replace(_IS, scores=("is50k",), promised=50_000),
    "prdc": _PRDC,
    "pr50k3_full": dataclasses.replace(
        _PRDC,
        scores=("pr50k3_full_precision_{}", "pr50k3_full_recall_{}"),
        settings={"k": 3},
        promised=50_000,
    ),
    "intra_fd": _INTRA,
    "intra_fid": dataclasses.replace(_INTRA, scores=("intra_fid",), require=_in_inception),
    "accuracy": Metric(("accuracy_{}",), _accuracy, (Hits(),), (), require=_with_the_data_s_classes),
    "cas": Metric(("cas_{}",), _cas, (_PICTURES,), (_TESTED,), _CAS, _with_the_data_s_classes),
}


def metric_names(requested: str, space: FeatureSpace) -> tuple[str, ...]:
    """What the scores of a metric are called in a space: `fd` gives `fd_pixels`; `fid` is refused there.

    Raises `Unusable` for an unknown metric (naming the nearest), and for one that is not defined in the
    space. Call it before training: then an evaluation is refused early.
    """
    metric = metric_named(requested)
    metric.require(requested, space)
    tail = "" if space.is_inception else f"_{space.name}"
    return tuple(s.format(space.name) if "{}" in s else f"{s}{tail}" for s in metric.scores)


def check_labels(metrics: Sequence[str], space: FeatureSpace, classes: int) -> None:
    """Raises `Unusable` for metrics of classes where there are no labels, or too many for their covariances."""
    for name in metrics:
        metric = metric_named(name)
        if metric.labelled and not classes:
            raise Unusable(
                f"metrics: {name} goes class by class, and there are no labels of the reals, or G is not told any; "
                "fd, kid and prdc need none"
            )
        if OfClasses() in metric.fakes and classes * space.num_features**2 > MOST_NUMBERS:
            size = f"{classes} covariances of {space.num_features} features"
            raise Unusable(f"metrics: {name} would take {size}; the space resnet20 has 64 (--features resnet20)")


def number_of_fakes(metrics: Sequence[str], count: int | None = None) -> int:
    """`count`, or what the metrics' names promise, or 50,000. Raises `Unusable` where these contradict."""
    for name in metrics:
        promised = metric_named(name).promised
        if promised and count not in (None, promised):
            plain = name.partition("50k")[0].replace("pr", "prdc")
            raise Unusable(f"count: {name} is of {promised} fakes, not {count}; ask for {plain}, or count={promised}")
    return COUNT if count is None else count


def metric_named(name: str) -> Metric:
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise Unusable(f"metrics: {name!r} is none of {known}; did you mean {nearest(name, METRICS)}?")
    return METRICS[name]
