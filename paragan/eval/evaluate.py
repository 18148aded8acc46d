"""Scores of a generator, each with the protocol it was measured under.

    found = evaluate(sample, reals, space=pixels(32, 3), metrics=["fd", "prdc"], count=10_000, group=everyone)
    found[0].name, found[0].value        # "fd_pixels", 3.1

`sample` maps a range of indices to images, image i depending on i alone; then a score depends neither on the
number of ranks nor on the batch. Two scores may be compared where `comparable` finds nothing.
"""

import dataclasses
import difflib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paragan.errors import Unusable
from paragan.eval import scores
from paragan.eval.features import FeatureSpace, inception_path, missing
from paragan.eval.scores import Gaussian, Moments
from paragan.eval.shares import ALONE, Summing, agreed, dealt, of_first, whole

Sample = Callable[[range], Tensor]  # indices -> uint8 images [len, C, H, W]
Value = str | int | float | bool | None

COUNT = 50_000  # fakes, where nobody says otherwise: the field's custom
MOST_FEATURES = 8192  # of a covariance, whose roots cost the cube of it


# what is said of a score ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """What the caller knows about how fakes and reals came about; None where it does not.

    `batch_norm` is how the generator's batch norm ran: "running" (statistics kept in training), "standing"
    (estimated afterwards) or "batch of 64" (of the batch at hand, so that the score depends on the batch).
    """

    data: str | None = None  # which dataset, at which resolution, resized how
    split: str | None = None  # of the reals: train, test, all
    labels: str | None = None  # of the fakes: none, uniform, or as in the data
    batch_norm: str | None = None
    ema: bool | None = None  # whether the averaged generator was scored
    truncation: float | None = None  # psi, 1 for none
    seed: int = 0  # of the latents, and of the subsets and splits that kid and is draw


@dataclass(frozen=True)
class Score:
    """One number, how it was measured, and what to keep in mind about it."""

    name: str
    value: float
    protocol: Mapping[str, Value]
    seconds: float  # seeing the images, which all scores of a call share, and its own arithmetic
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """12 hex digits; equal for equal protocols."""
        return hashlib.sha256(json.dumps(dict(self.protocol), sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self, kimg: float | None = None) -> dict[str, Any]:
        """A line of metrics.jsonl, with `notes` if there are any. `kimg`: thousands of images trained on."""
        return {
            "name": self.name,
            "value": self.value,
            **({} if kimg is None else {"kimg": kimg}),
            "protocol": dict(self.protocol),
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


def comparable(a: Score | Mapping[str, Any], b: Score | Mapping[str, Any]) -> list[str]:
    """The fields in which two scores, or their lines of metrics.jsonl, were measured differently.

    Empty where they may be compared. `name` is among them where the scores have different names.
    """
    a, b = (s.to_json() if isinstance(s, Score) else s for s in (a, b))
    one, other = {**a["protocol"], "name": a["name"]}, {**b["protocol"], "name": b["name"]}
    absent = object()
    return sorted(key for key in {*one, *other} if one.get(key, absent) != other.get(key, absent))


# what was seen of a set of images ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What a feature space saw of some images, the same on every rank. Made once, it serves often."""

    space: FeatureSpace
    image: tuple[int, ...]  # (C, H, W)
    count: int
    gaussian: Gaussian | None = None  # where a metric needs it
    features: Tensor | None = None  # [count, F] float32, likewise


def gaussian_of(summary: Summary) -> Gaussian:
    """Raises `Unusable` where no metric that needs it was named when summarizing; `features_of` likewise."""
    if summary.gaussian is None:
        raise Unusable("reals: summarized without a covariance; name fd or fid when summarizing")
    return summary.gaussian


def features_of(summary: Summary) -> Tensor:
    if summary.features is None:
        raise Unusable("reals: summarized without their features; name kid or prdc when summarizing")
    return summary.features


def summarize(
    images: np.ndarray | Sample,
    *,
    space: FeatureSpace,
    metrics: Sequence[str],
    count: int | None = None,
    group: Summing = ALONE,
    batch: int = 64,
    device: torch.device | str = "cpu",
) -> Summary:
    """What `metrics` need to know of images: uint8 [N, H, W, C], or a sampler and a `count`.

    Every rank calls this with equal arguments and looks at its share, in blocks of `batch`. All metrics but
    Fréchet distances keep features: 4 count F bytes on every rank. Raises `Unusable` for what are no uint8
    images, and for features that are not finite.
    """
    device = torch.device(device)
    needs = {_metric(name).reads for name in metrics}
    count = _count(images, count)
    sample = _rows_of(images) if isinstance(images, np.ndarray) else images
    moments = Moments(space.num_features if gaussian_of in needs else 0, device)
    kept = [torch.zeros(0, space.num_features, device=device)]
    image = torch.zeros(3, dtype=torch.int64, device=device)
    for rows in dealt(count, batch, group.rank, group.size):
        pictures = _checked(sample(rows), len(rows))
        image = torch.tensor(pictures.shape[1:], device=device)
        seen = space(pictures.to(device))
        if gaussian_of in needs:
            moments.add(seen)
        if features_of in needs:
            kept.append(seen)
    summary = Summary(
        space,
        tuple(of_first(group, image).tolist()),
        count,
        moments.gaussian(group) if gaussian_of in needs else None,
        whole(torch.cat(kept), count, batch, group) if features_of in needs else None,
    )
    return _finite(summary)


def _count(images: np.ndarray | Sample, count: int | None) -> int:
    if not isinstance(images, np.ndarray):
        count = COUNT if count is None else count
    elif images.dtype != np.uint8 or images.ndim != 4:
        raise Unusable(f"reals: want uint8 images [N, H, W, C], not {images.dtype} {list(images.shape)}")
    else:
        count = len(images) if count is None else min(count, len(images))
    if count < 2:
        raise Unusable(f"count: a score needs at least 2 images, not {count}; {COUNT} is usual")
    return count


def _rows_of(images: np.ndarray) -> Sample:
    def sample(rows: range) -> Tensor:
        part = np.ascontiguousarray(images[rows.start : rows.stop].transpose(0, 3, 1, 2))
        return torch.from_numpy(part)

    return sample


def _checked(pictures: Tensor, count: int) -> Tensor:
    if pictures.dtype != torch.uint8 or pictures.ndim != 4 or len(pictures) != count:
        found = f"{pictures.dtype} {list(pictures.shape)}"
        raise Unusable(f"fakes: want uint8 images [{count}, C, H, W] in [0, 255], not {found}")
    return pictures


def _finite(summary: Summary) -> Summary:
    seen = summary.features if summary.gaussian is None else summary.gaussian.covariance
    if seen is not None and not seen.isfinite().all():
        raise Unusable(f"space: {summary.space.name} gave features that are not finite")
    return summary


# metrics ----------------------------------------------------------------------------------------------------


def _frechet(real: Summary, fake: Summary, *, group: Summing, seed: int) -> list[float]:
    a, b = gaussian_of(real), gaussian_of(fake)
    return [agreed(group, lambda: scores.frechet(a, b), a.mean.device)]


def _kid(real: Summary, fake: Summary, *, group: Summing, seed: int, **settings: int) -> list[float]:
    x, y = features_of(real), features_of(fake)
    return [agreed(group, lambda: scores.kid(x, y, seed=seed, **settings), x.device)]


def _is(real: Summary | None, fake: Summary, *, group: Summing, seed: int, splits: int) -> list[float]:
    y = features_of(fake)
    logits = fake.space.logits
    return [
        agreed(group, lambda: scores.inception_score(logits(y.double()), splits=splits, seed=seed), y.device)
    ]


def _prdc(real: Summary, fake: Summary, *, group: Summing, seed: int, k: int) -> list[float]:
    return list(scores.prdc(features_of(real), features_of(fake), k, group=group))


def _anywhere(name: str, space: FeatureSpace) -> None:
    """The metric is defined in every space."""


def _where_covariance_fits(name: str, space: FeatureSpace) -> None:
    if space.num_features > MOST_FEATURES:
        have = f"{space.name} has {space.num_features} features"
        raise Unusable(
            f"metrics: {name} takes at most {MOST_FEATURES} features and {have}; kid and prdc take them"
        )


def _in_inception(name: str, space: FeatureSpace) -> None:
    if not space.is_inception:
        raise Unusable(
            f"metrics: {name} is defined in the Inception space only, not in {space.name}, where fd works. "
            + missing(inception_path())
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
    reads: Callable[[Summary], Any]  # of the images: `gaussian_of` or `features_of`
    settings: Mapping[str, int] = field(default_factory=dict)  # part of the protocol
    require: Callable[[str, FeatureSpace], None] = _anywhere  # raises where it is not defined
    notes: Callable[..., tuple[str, ...]] = _nothing  # of (space, real, fake): what to keep in mind
    fakes: int | None = None  # as the name promises
    reals: bool = True  # whether it looks at them


_FRECHET = Metric((), _frechet, gaussian_of, notes=_rank_deficient)
_KID = Metric(("kid",), _kid, features_of, {"subsets": 100, "subset_size": 1000})
_IS = Metric(("is",), _is, features_of, {"splits": 10}, _with_logits, _few_for_classes, reals=False)
_PRDC = Metric(("precision_{}", "recall_{}", "density_{}", "coverage_{}"), _prdc, features_of, {"k": 5})

METRICS: Mapping[str, Metric] = {
    "fd": dataclasses.replace(_FRECHET, scores=("fd_{}",), require=_where_covariance_fits),
    "fid": dataclasses.replace(_FRECHET, scores=("fid",), require=_in_inception),
    "fid50k_full": dataclasses.replace(
        _FRECHET, scores=("fid50k_full",), require=_in_inception, fakes=50_000
    ),
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
    metric = _metric(requested)
    metric.require(requested, space)
    tail = "" if space.is_inception else f"_{space.name}"
    return tuple(s.format(space.name) if "{}" in s else f"{s}{tail}" for s in metric.scores)


def number_of_fakes(metrics: Sequence[str], count: int | None = None) -> int:
    """`count`, or what the metrics' names promise, or 50,000. Raises `Unusable` where these contradict."""
    for name in metrics:
        promised = _metric(name).fakes
        if promised and count not in (None, promised):
            plain = name.partition("50k")[0].replace("pr", "prdc")
            raise Unusable(
                f"count: {name} is of {promised} fakes, not {count}; ask for {plain}, or leave count out"
            )
    return COUNT if count is None else count


def _metric(name: str) -> Metric:
    if name not in METRICS:
        nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0)[0]
        raise Unusable(f"metrics: {name!r} is none of {', '.join(METRICS)}; did you mean {nearest}?")
    return METRICS[name]


# evaluation -------------------------------------------------------------------------------------------------


def evaluate(
    fakes: Sample,
    reals: np.ndarray | Summary | None,
    *,
    space: FeatureSpace,
    metrics: Sequence[str],
    protocol: Protocol | None = None,
    count: int | None = None,
    group: Summing = ALONE,
    batch: int = 64,
    device: torch.device | str = "cpu",
) -> list[Score]:
    """Score `count` fakes against all of `reals` by each of `metrics`; the same list on every rank.

    `fakes` gives the images of a range of indices, uint8 [len, C, H, W] in [0, 255]; image i must depend on i
    alone. Each rank asks for its share, blocks of `batch`, the same blocks for any number of ranks. `reals`
    is uint8 [N, H, W, C], or what `summarize` made of it (which saves seeing them again), or None if no
    metric looks at them.

    Every rank calls this, with equal arguments. Raises `Unusable` before any image is drawn for metrics that
    are unknown or not defined in `space`, for a `count` that a metric's name contradicts, and for reals that
    do not fit.
    """
    protocol = protocol or Protocol()
    names = {name: metric_names(name, space) for name in metrics}
    count = number_of_fakes(metrics, count)
    against = [name for name in metrics if METRICS[name].reals]
    start = time.perf_counter()
    look: dict[str, Any] = {"space": space, "group": group, "batch": batch, "device": device}
    real = _seen(reals, against, look) if against else None
    fake = summarize(fakes, metrics=metrics, count=count, **look)
    if real is not None and real.image != fake.image:
        raise Unusable(
            f"reals: images are {_x(real.image)} (CxHxW), the fakes {_x(fake.image)}; they must agree"
        )
    shared = time.perf_counter() - start
    result = []
    for name, called in names.items():
        start = time.perf_counter()
        metric = METRICS[name]
        values = metric.measure(real, fake, group=group, seed=protocol.seed, **metric.settings)
        seconds = shared + time.perf_counter() - start
        record = _record(metric, protocol, real, fake)
        notes = metric.notes(space, real, fake)
        named = zip(called, values, strict=False)  # pr50k3_full reports but two of four
        result += [Score(score, value, record, seconds, notes) for score, value in named]
    return result


def _seen(reals: np.ndarray | Summary | None, metrics: Sequence[str], look: Mapping[str, Any]) -> Summary:
    """A summary of reals that serves these metrics, made if it was not given."""
    if reals is None:
        raise Unusable(
            f"reals: {metrics[0]} compares with real images, uint8 [N, H, W, C], and none were given"
        )
    if not isinstance(reals, Summary):
        return summarize(reals, metrics=metrics, **look)
    if reals.space != look["space"]:
        raise Unusable(
            f"reals: summarized in the space {reals.space.name}, not {look['space'].name}; do it again"
        )
    for name in metrics:
        METRICS[name].reads(reals)
    return reals


def _record(metric: Metric, protocol: Protocol, real: Summary | None, fake: Summary) -> dict[str, Value]:
    return {
        "space": fake.space.name,
        "space_hash": fake.space.hash,
        "resizer": fake.space.resizer,
        "image": _x(fake.image),
        "reals": real.count if real and metric.reals else None,
        "fakes": fake.count,
        **dataclasses.asdict(protocol),
        **metric.settings,
    }


def _x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
