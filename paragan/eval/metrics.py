"""The table of metrics: what each is called in which space, where it is defined, what it takes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paragan.errors import Unusable
from paragan.eval import scores
from paragan.eval.features import FeatureSpace, inception_path, nearest, source
from paragan.eval.shares import Summing, agreed
from paragan.eval.summary import Reading, Summary, features_of, gaussian_of

COUNT = 50_000  # fakes, where nobody says otherwise: the field's custom
MOST_FEATURES = 8192  # of a covariance, whose roots cost the cube of it


def _frechet(real: Summary, fake: Summary, *, group: Summing, seed: int) -> list[float]:
    a, b = gaussian_of(real), gaussian_of(fake)
    return [agreed(group, lambda: scores.frechet(a, b), a.mean.device)]


def _kid(real: Summary, fake: Summary, *, group: Summing, seed: int, **settings: int) -> list[float]:
    x, y = features_of(real), features_of(fake)
    return [agreed(group, lambda: scores.kid(x, y, seed=seed, **settings), x.device)]


def _is(real: Summary | None, fake: Summary, *, group: Summing, seed: int, splits: int) -> list[float]:
    y = features_of(fake)
    logits = fake.space.logits
    return [agreed(group, lambda: scores.inception_score(logits(y.double()), splits=splits, seed=seed), y.device)]


def _prdc(real: Summary, fake: Summary, *, group: Summing, seed: int, k: int) -> list[float]:
    return list(scores.prdc(features_of(real), features_of(fake), k, group=group))


def _anywhere(name: str, space: FeatureSpace) -> None:
    """The metric is defined in every space."""


def _where_covariance_fits(name: str, space: FeatureSpace) -> None:
    if space.num_features > MOST_FEATURES:
        have = f"{space.name} has {space.num_features} features"
        raise Unusable(f"metrics: {name} takes at most {MOST_FEATURES} features and {have}; kid,prdc take more")


def _in_inception(name: str, space: FeatureSpace) -> None:
    if not space.is_inception:
        raise Unusable(
            f"metrics: {name} is defined in the Inception space only, not in {space.name}, where fd works; "
            f"for {name} choose the space inception, whose file is {source(inception_path())}"
        )


def _with_logits(name: str, space: FeatureSpace) -> None:
    if not space.num_logits:
        raise Unusable(
            f"metrics: {name} needs the logits of a classifier, and {space.name} has none; "
            "fd, kid and prdc work there, or choose the space inception"
        )


def _rank_deficient(space: FeatureSpace, real: Summary, fake: Summary) -> tuple[str, ...]:
    """Why a Fréchet distance is too large, if it is: too few images for its covariances."""
    sides = {"reals": real.count, "fakes": fake.count}
    return tuple(
        f"{count} {side} for {space.num_features} features: biased upwards"
        for side, count in sides.items()
        if count <= space.num_features
    )


def _few_for_classes(space: FeatureSpace, real: Summary | None, fake: Summary) -> tuple[str, ...]:
    few = f"{fake.count} fakes for {space.num_logits} classes: biased downwards"
    return (few,) if fake.count <= space.num_logits else ()


def _nothing(space: FeatureSpace, real: Summary | None, fake: Summary) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Metric:
    """What may be asked for: which scores it yields, where it is defined, and what it takes.

    In a score's name {} stands for the space; a name without it gets `_<space>` outside Inception.
    """

    scores: tuple[str, ...]
    measure: Callable[..., list[float]]
    reads: Reading  # of the images: `gaussian_of` or `features_of`
    settings: Mapping[str, int] = field(default_factory=dict)  # part of the protocol
    require: Callable[[str, FeatureSpace], None] = _anywhere  # raises where it is not defined
    notes: Callable[..., tuple[str, ...]] = _nothing  # of (space, real, fake): what to keep in mind
    fakes: int | None = None  # as the name promises
    reals: bool = True  # whether it looks at them

    @property
    def least(self) -> int:
        """The fewest images it is defined for: two, or more than the neighbours it counts."""
        return self.settings.get("k", 0) + 2


_FRECHET = Metric((), _frechet, gaussian_of, notes=_rank_deficient)
_KID = Metric(("kid",), _kid, features_of, {"subsets": 100, "subset_size": 1000})
_IS = Metric(("is",), _is, features_of, {"splits": 10}, _with_logits, _few_for_classes, reals=False)
_PRDC = Metric(("precision_{}", "recall_{}", "density_{}", "coverage_{}"), _prdc, features_of, {"k": 5})

METRICS: Mapping[str, Metric] = {
    "fd": dataclasses.replace(_FRECHET, scores=("fd_{}",), require=_where_covariance_fits),
    "fid": dataclasses.replace(_FRECHET, scores=("fid",), require=_in_inception),
    "fid50k_full": dataclasses.replace(_FRECHET, scores=("fid50k_full",), require=_in_inception, fakes=50_000),
    "kid": _KID,
    "kid50k_full": dataclasses.replace(_KID, scores=("kid50k_full",), fakes=50_000),
    "is": _IS,
    "is50k": dataclasses.replace(_IS, scores=("is50k",), fakes=50_000),
    "prdc": _PRDC,
    "pr50k3_full": dataclasses.replace(
        _PRDC,
        scores=("pr50k3_full_precision_{}", "pr50k3_full_recall_{}"),
        settings={"k": 3},
        fakes=50_000,
    ),
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


def number_of_fakes(metrics: Sequence[str], count: int | None = None) -> int:
    """`count`, or what the metrics' names promise, or 50,000. Raises `Unusable` where these contradict."""
    for name in metrics:
        promised = metric_named(name).fakes
        if promised and count not in (None, promised):
            plain = name.partition("50k")[0].replace("pr", "prdc")
            raise Unusable(f"count: {name} is of {promised} fakes, not {count}; ask for {plain}, or leave count out")
    return COUNT if count is None else count


def metric_named(name: str) -> Metric:
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise Unusable(f"metrics: {name!r} is none of {known}; did you mean {nearest(name, METRICS)}?")
    return METRICS[name]
