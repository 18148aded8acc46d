"""The table of metrics: what each is called in which space, where it is defined, what it takes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paragan.core.errors import UsageError
from paragan.eval import kid, per_class, precision_recall
from paragan.eval.accumulators import (
    Accumulator,
    AccuracyAcc,
    ClassGaussianAcc,
    FeatureAcc,
    GaussianAcc,
    ImageAcc,
    LogitAcc,
)
from paragan.eval.classifier import DEFAULT_TRAINING
from paragan.eval.feature_stats import FeatureStats
from paragan.eval.features import FeatureSpace, closest_name, inception_path, inception_source
from paragan.eval.frechet import Gaussian, frechet_distance
from paragan.eval.sharding import ReduceGroup, compute_on_rank0

KID_SUBSET_SIZE = 1000  # images of one of KID's subsets, as is usual
DEFAULT_COUNT = 50_000  # fakes, where nobody says otherwise: the field's custom
MAX_FEATURES = 8192  # of a covariance, whose roots cost the cube of it
MAX_COVARIANCE_NUMBERS = 2**27  # of the covariances of all classes: 1 GB
CAS_TEST_IMAGES = 10_000  # reals that a classifier trained on fakes is tried on


class MetricValue(NamedTuple):
    """A number, and what is known about it."""

    value: float
    error: float | None = None  # how far arithmetic may have moved it
    per_class: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()


class MetricInputs(NamedTuple):
    """What a metric is computed from."""

    real: FeatureStats
    fake: FeatureStats
    group: ReduceGroup
    seed: int
    classes: tuple[str, ...]
    device: torch.device


def _frechet(inputs: MetricInputs) -> list[MetricValue]:
    a, b = inputs.real.get(GaussianAcc()), inputs.fake.get(GaussianAcc())
    value, error = compute_on_rank0(inputs.group, lambda: list(frechet_distance(a, b)), 2)
    return [MetricValue(value, error)]


def _kid(inputs: MetricInputs, **settings: int) -> list[MetricValue]:
    x, y = inputs.real.get(FeatureAcc()), inputs.fake.get(FeatureAcc())
    return [MetricValue(kid.kid(x, y, seed=inputs.seed, group=inputs.group, **settings))]


def _is(inputs: MetricInputs, *, splits: int) -> list[MetricValue]:
    return [MetricValue(inputs.fake.get(LogitAcc(splits)).compute(inputs.group))]


def _prdc(inputs: MetricInputs, *, k: int) -> list[MetricValue]:
    return [
        MetricValue(v)
        for v in precision_recall.prdc(
            inputs.real.get(FeatureAcc()), inputs.fake.get(FeatureAcc()), k, group=inputs.group
        )
    ]


def _intra_frechet(inputs: MetricInputs) -> list[MetricValue]:
    a: list[Gaussian | None] = inputs.real.get(ClassGaussianAcc())
    b: list[Gaussian | None] = inputs.fake.get(ClassGaussianAcc())

    def compute() -> list[float]:
        return [n for one in per_class.intra_frechet(a, b) for n in (one or (-1.0, 0.0))]  # -1: there is none

    numbers = compute_on_rank0(inputs.group, compute, 2 * len(a))
    values = {c: v for c, v in zip(inputs.classes, numbers[::2], strict=True) if v >= 0}
    if not values:
        raise UsageError(
            "count: no class has two fakes and two reals, which an intra-class distance needs; ask for more"
        )
    error = sum(numbers[1::2]) / len(values)
    return [
        MetricValue(sum(values.values()) / len(values), error, values, _missing_classes_note(inputs.classes, values))
    ]


def _accuracy(inputs: MetricInputs) -> list[MetricValue]:
    return [_accuracy_value(inputs, inputs.fake.get(AccuracyAcc()))]


def _cas(inputs: MetricInputs, *, train_samples: int, test_images: int) -> list[MetricValue]:
    fakes, reals = inputs.fake.get(_CAS_TRAIN), inputs.real.get(_CAS_TEST)
    how = dataclasses.replace(DEFAULT_TRAINING, max_samples=train_samples, seed=inputs.seed)
    tally = per_class.train_on_fakes_test_on_reals(fakes, reals, len(inputs.classes), inputs.group, inputs.device, how)
    return [_accuracy_value(inputs, tally)]


def _accuracy_value(inputs: MetricInputs, tally: torch.Tensor) -> MetricValue:
    share, each = per_class.accuracies(tally)
    values = {name: one for name, one in zip(inputs.classes, each, strict=True) if one is not None}
    return MetricValue(share, None, values, _missing_classes_note(inputs.classes, values))


def _missing_classes_note(classes: Sequence[str], values: Mapping[str, float]) -> tuple[str, ...]:
    """Which classes there is no number of, as a note."""
    left = [name for name in classes if name not in values]
    some = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
    return (f"too few images of {len(left)} of {len(classes)} classes ({some})",) if left else ()


# where a metric is defined ----------------------------------------------------------------------------------


def _accept_any_space(name: str, space: FeatureSpace) -> None:
    """The metric is defined in every space."""


def _check_covariance_fits(name: str, space: FeatureSpace) -> None:
    if space.num_features > MAX_FEATURES:
        have = f"{space.name} has {space.num_features} features"
        raise UsageError(f"metrics: {name} takes at most {MAX_FEATURES} features and {have}; kid,prdc take more")


def _check_is_inception(name: str, space: FeatureSpace) -> None:
    if not space.is_inception:
        plain = "intra_fd" if name.startswith("intra") else "fd"
        raise UsageError(
            f"metrics: {name} is defined in the Inception space only, not in {space.name}, where {plain} works; "
            f"for {name} choose the space inception, whose file is {inception_source(inception_path())}"
        )


def _check_has_logits(name: str, space: FeatureSpace) -> None:
    if not space.num_logits:
        raise UsageError(
            f"metrics: {name} needs the logits of a classifier, and {space.name} has none; "
            "fd, kid and prdc work there, or choose the space inception or resnet20"
        )


def _check_has_data_classes(name: str, space: FeatureSpace) -> None:
    if not space.classes:
        raise UsageError(
            f"metrics: {name} needs a classifier of the data's own classes, which {space.name} is not: "
            "choose the space resnet20 (--features resnet20)"
        )


# what to keep in mind ---------------------------------------------------------------------------------------


def _rank_deficiency_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    """Why a Fréchet distance is too large, if it is: too few images for its covariances."""
    sides = {"reals": real.count, "fakes": fake.count}
    return tuple(
        f"{count} {side} for {space.num_features} features: biased upwards"
        for side, count in sides.items()
        if 0 < count <= space.num_features
    )


def _class_rank_deficiency_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    least = [min((g.count for g in s.get(ClassGaussianAcc()) if g), default=0) for s in (real, fake)]
    return tuple(
        f"a class has {count} {side} for {space.num_features} features: biased upwards"
        for side, count in zip(("reals", "fakes"), least, strict=True)
        if count <= space.num_features
    )


def _few_images_notes(space: FeatureSpace, real: FeatureStats | None, fake: FeatureStats) -> tuple[str, ...]:
    few = f"{fake.count} fakes for {space.num_logits} classes: biased downwards"
    return (few,) if fake.count <= space.num_logits else ()


def _small_subset_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    size = min(real.count, fake.count)
    return (f"subsets of {size} images: there are no more",) if size < KID_SUBSET_SIZE else ()


def _no_notes(space: FeatureSpace, real: FeatureStats | None, fake: FeatureStats) -> tuple[str, ...]:
    return ()


# the table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """What may be asked for: which scores it yields, where it is defined, and what it takes.

    In a score's name {} stands for the space; a name without it gets `_<space>` outside Inception.
    """

    scores: tuple[str, ...]
    compute: Callable[..., list[MetricValue]]
    fake_accumulators: tuple[Accumulator, ...]  # what it reads of them
    real_accumulators: tuple[Accumulator, ...]  # likewise; () where it does not look at them
    settings: Mapping[str, int] = field(default_factory=dict)  # part of the protocol
    check_space: Callable[[str, FeatureSpace], None] = _accept_any_space  # raises where it is not defined
    notes: Callable[..., tuple[str, ...]] = _no_notes  # of (space, real, fake): what to keep in mind
    required_fakes: int | None = None  # how many fakes its name says

    @property
    def min_images(self) -> int:
        """The fewest images it is defined for: two, or more than the neighbours it counts."""
        return self.settings.get("k", 0) + 2

    @property
    def needs_labels(self) -> bool:
        """Whether it needs labels."""
        return any(reading.needs_labels for reading in (*self.fake_accumulators, *self.real_accumulators))


_GAUSSIAN, _CLASS_GAUSSIANS, _FEATURES = (GaussianAcc(),), (ClassGaussianAcc(),), (FeatureAcc(),)
_CAS_TRAIN, _CAS_TEST = ImageAcc(DEFAULT_TRAINING.max_images), ImageAcc(CAS_TEST_IMAGES)
_CAS_SETTINGS = {"train_samples": DEFAULT_TRAINING.max_samples, "test_images": CAS_TEST_IMAGES}
_FRECHET = Metric((), _frechet, _GAUSSIAN, _GAUSSIAN, check_space=_check_covariance_fits, notes=_rank_deficiency_notes)
_INTRA = Metric(
    ("intra_fd_{}",),
    _intra_frechet,
    _CLASS_GAUSSIANS,
    _CLASS_GAUSSIANS,
    check_space=_check_covariance_fits,
    notes=_class_rank_deficiency_notes,
)
_KID = Metric(
    ("kid",), _kid, _FEATURES, _FEATURES, {"subsets": 100, "subset_size": KID_SUBSET_SIZE}, notes=_small_subset_notes
)
_IS = Metric(("is",), _is, (LogitAcc(10),), (), {"splits": 10}, _check_has_logits, _few_images_notes)
_PRDC = Metric(("precision_{}", "recall_{}", "density_{}", "coverage_{}"), _prdc, _FEATURES, _FEATURES, {"k": 5})

METRICS: Mapping[str, Metric] = {
    "fd": dataclasses.replace(_FRECHET, scores=("fd_{}",)),
    "fid": dataclasses.replace(_FRECHET, scores=("fid",), check_space=_check_is_inception),
    "fid50k_full": dataclasses.replace(
        _FRECHET, scores=("fid50k_full",), check_space=_check_is_inception, required_fakes=50_000
    ),
    "kid": _KID,
    "kid50k_full": dataclasses.replace(_KID, scores=("kid50k_full",), required_fakes=50_000),
    "is": _IS,
    "is1": dataclasses.replace(_IS, scores=("is1",), fake_accumulators=(LogitAcc(1),), settings={"splits": 1}),
    "is50k": dataclasses.replace(_IS, scores=("is50k",), required_fakes=50_000),
    "prdc": _PRDC,
    "pr50k3_full": dataclasses.replace(
        _PRDC,
        scores=("pr50k3_full_precision_{}", "pr50k3_full_recall_{}"),
        settings={"k": 3},
        required_fakes=50_000,
    ),
    "intra_fd": _INTRA,
    "intra_fid": dataclasses.replace(_INTRA, scores=("intra_fid",), check_space=_check_is_inception),
    "accuracy": Metric(("accuracy_{}",), _accuracy, (AccuracyAcc(),), (), check_space=_check_has_data_classes),
    "cas": Metric(("cas_{}",), _cas, (_CAS_TRAIN,), (_CAS_TEST,), _CAS_SETTINGS, _check_has_data_classes),
}


def metric_names(requested: str, space: FeatureSpace) -> tuple[str, ...]:
    """What the scores of a metric are called in a space: `fd` gives `fd_pixels`; `fid` is refused there.

    Raises `Unusable` for an unknown metric (naming the nearest), and for one that is not defined in the
    space. Call it before training: then an evaluation is refused early.
    """
    metric = get_metric(requested)
    metric.check_space(requested, space)
    tail = "" if space.is_inception else f"_{space.name}"
    return tuple(s.format(space.name) if "{}" in s else f"{s}{tail}" for s in metric.scores)


def check_labels(metrics: Sequence[str], space: FeatureSpace, classes: int) -> None:
    """Raises `Unusable` for metrics of classes where there are no labels, or too many for their covariances."""
    for name in metrics:
        metric = get_metric(name)
        if metric.needs_labels and not classes:
            raise UsageError(
                f"metrics: {name} goes class by class, and there are no labels of the reals, or G is not told any; "
                "fd, kid and prdc need none"
            )
        if ClassGaussianAcc() in metric.fake_accumulators and classes * space.num_features**2 > MAX_COVARIANCE_NUMBERS:
            size = f"{classes} covariances of {space.num_features} features"
            raise UsageError(f"metrics: {name} would take {size}; the space resnet20 has 64 (--features resnet20)")


def num_fakes(metrics: Sequence[str], count: int | None = None) -> int:
    """`count`, or what the metrics' names promise, or 50,000. Raises `Unusable` where these contradict."""
    for name in metrics:
        promised = get_metric(name).required_fakes
        if promised and count not in (None, promised):
            plain = name.partition("50k")[0].replace("pr", "prdc")
            raise UsageError(f"count: {name} is of {promised} fakes, not {count}; ask for {plain}, or count={promised}")
    return DEFAULT_COUNT if count is None else count


def get_metric(name: str) -> Metric:
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise UsageError(f"metrics: {name!r} is none of {known}; did you mean {closest_name(name, METRICS)}?")
    return METRICS[name]
