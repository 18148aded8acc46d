"""The table of metrics: names of their scores, the spaces where they are defined, and the accumulators they need."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
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
from paragan.eval.paired import (
    MEL_WINDOW_S,
    MELS,
    PEAK,
    STFT_WINDOWS,
    PairAcc,
    check_is_image,
    check_is_wave,
    log_mel_distances,
    mean_of_pairs,
    psnrs,
    stft_distances,
)
from paragan.eval.sharding import ReduceGroup, compute_on_rank0

KID_SUBSET_SIZE = 1000  # images, the usual value
DEFAULT_COUNT = 50_000  # fakes, the usual value
MAX_FEATURES = 8192  # of a covariance: the time of its root grows with their cube
MAX_COVARIANCE_NUMBERS = 2**27  # in the covariances of all classes: 1 GB
MIN_SPLIT_IMAGES = 2  # in a split of an Inception score, which is 1 for a single image
NO_CLASS_OF_TWO = "no class has two reals, which a distance within classes needs. Use fd, kid or prdc"
CAS_TEST_IMAGES = 10_000  # reals that a classifier trained on fakes is tested on


class MetricValue(NamedTuple):
    """A value, and what is known about it."""

    value: float
    error: float | None = None  # bound of the rounding error
    per_class: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()


class MetricInputs(NamedTuple):
    """Inputs of a metric."""

    real: FeatureStats
    fake: FeatureStats
    group: ReduceGroup
    seed: int
    classes: tuple[str, ...]
    device: torch.device


def _frechet(inputs: MetricInputs) -> list[MetricValue]:
    a = inputs.real.get(GaussianAcc())
    b = inputs.fake.get(GaussianAcc())
    value, error = compute_on_rank0(inputs.group, lambda: list(frechet_distance(a, b)), 2)
    return [MetricValue(value, error)]


def _kid(inputs: MetricInputs, **settings: int) -> list[MetricValue]:
    real = inputs.real.get(FeatureAcc())
    fake = inputs.fake.get(FeatureAcc())
    return [MetricValue(kid.kid(real, fake, seed=inputs.seed, group=inputs.group, **settings))]


def _is(inputs: MetricInputs, *, splits: int) -> list[MetricValue]:
    return [MetricValue(inputs.fake.get(LogitAcc(splits)).compute(inputs.group))]


def _prdc(inputs: MetricInputs, *, k: int) -> list[MetricValue]:
    real = inputs.real.get(FeatureAcc())
    fake = inputs.fake.get(FeatureAcc())
    return [MetricValue(value) for value in precision_recall.prdc(real, fake, k, group=inputs.group)]


def _intra_frechet(inputs: MetricInputs) -> list[MetricValue]:
    a: list[Gaussian | None] = inputs.real.get(ClassGaussianAcc())
    b: list[Gaussian | None] = inputs.fake.get(ClassGaussianAcc())
    if not any(a):
        raise UsageError(NO_CLASS_OF_TWO)

    def compute() -> list[float]:
        numbers: list[float] = []
        for distance in per_class.intra_frechet(a, b):
            numbers += distance or (-1.0, 0.0)  # -1: no distance
        return numbers

    numbers = compute_on_rank0(inputs.group, compute, 2 * len(a))
    values = {name: value for name, value in zip(inputs.classes, numbers[::2], strict=True) if value >= 0}
    if not values:
        raise UsageError(
            f"no class with two reals has two fakes, which a distance needs: {inputs.fake.count} fakes for "
            f"{len(a)} classes. Use a larger count"
        )
    error = sum(numbers[1::2]) / len(values)
    notes = _missing_classes_notes(inputs.classes, values)
    return [MetricValue(sum(values.values()) / len(values), error, values, notes)]


def _accuracy(inputs: MetricInputs) -> list[MetricValue]:
    return [_accuracy_value(inputs, inputs.fake.get(AccuracyAcc()))]


def _cas(inputs: MetricInputs, *, train_samples: int, test_images: int) -> list[MetricValue]:
    training = dataclasses.replace(DEFAULT_TRAINING, max_samples=train_samples, seed=inputs.seed)
    counts = per_class.train_on_fakes_test_on_reals(
        inputs.fake.get(_CAS_TRAIN),
        inputs.real.get(_CAS_TEST),
        len(inputs.classes),
        inputs.group,
        inputs.device,
        training,
    )
    return [_accuracy_value(inputs, counts)]


def _mean_of_pairs(inputs: MetricInputs, *, accumulator: PairAcc, **settings: int) -> list[MetricValue]:
    return [MetricValue(mean_of_pairs(inputs.fake.get(accumulator)))]


def _accuracy_value(inputs: MetricInputs, counts: torch.Tensor) -> MetricValue:
    accuracy, class_accuracies = per_class.accuracies(counts)
    named = zip(inputs.classes, class_accuracies, strict=True)
    values = {name: value for name, value in named if value is not None}
    return MetricValue(accuracy, None, values, _missing_classes_notes(inputs.classes, values))


def _missing_classes_notes(classes: Sequence[str], values: Mapping[str, float]) -> tuple[str, ...]:
    """Return a note that names the classes without a value, if any."""
    missing = [name for name in classes if name not in values]
    if not missing:
        return ()
    names = ", ".join([*missing[:5], "..."] if len(missing) > 5 else missing)
    return (f"too few images of {len(missing)} of {len(classes)} classes ({names})",)


# where a metric is defined ----------------------------------------------------------------------------------


def _accept_any_space(name: str, space: FeatureSpace) -> None:
    """Check nothing: the metric is defined in every space."""


def _check_covariance_fits(name: str, space: FeatureSpace) -> None:
    if space.num_features > MAX_FEATURES:
        raise UsageError(
            f"metrics={name}: takes at most {MAX_FEATURES} features, and the space {space.name} has "
            f"{space.num_features}. Use kid or prdc, or --features inception"
        )


def _check_is_inception(name: str, space: FeatureSpace) -> None:
    if not space.is_inception:
        alternative = "intra_fd" if name.startswith("intra") else "fd"
        raise UsageError(
            f"metrics={name}: is defined in the space inception only, not in {space.name}. Use {alternative}, or "
            f"--features inception with the file {inception_source(inception_path())}"
        )


def _check_has_logits(name: str, space: FeatureSpace) -> None:
    if not space.num_logits:
        raise UsageError(
            f"metrics={name}: needs the logits of a classifier, and the space {space.name} has none. "
            "Use fd, kid or prdc, or --features inception or resnet20"
        )


def _check_has_data_classes(name: str, space: FeatureSpace) -> None:
    if not space.classes:
        raise UsageError(
            f"metrics={name}: needs a classifier of the data's own classes, and the space {space.name} is none. "
            "Use --features resnet20"
        )


# notes of scores ---------------------------------------------------------------------------------------


def _rank_deficiency_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    """Note that a Fréchet distance is biased, if there are too few images for its covariances."""
    sides = {"reals": real.count, "fakes": fake.count}
    return tuple(
        f"{count} {side} for {space.num_features} features: biased upwards"
        for side, count in sides.items()
        if 0 < count <= space.num_features
    )


def _class_rank_deficiency_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    notes: list[str] = []
    for side, stats in (("reals", real), ("fakes", fake)):
        smallest = min((g.count for g in stats.get(ClassGaussianAcc()) if g), default=0)
        if smallest <= space.num_features:
            notes.append(f"a class has {smallest} {side} for {space.num_features} features: biased upwards")
    return tuple(notes)


def _few_images_notes(
    space: FeatureSpace, real: FeatureStats | None, fake: FeatureStats, splits: int
) -> tuple[str, ...]:
    if fake.count // splits > space.num_logits:
        return ()
    of_splits = f" in {splits} splits" if splits > 1 else ""
    return (f"{fake.count} fakes{of_splits} for {space.num_logits} classes: biased downwards",)


def _small_subset_notes(space: FeatureSpace, real: FeatureStats, fake: FeatureStats) -> tuple[str, ...]:
    size = min(real.count, fake.count)
    return (f"subsets of {size} images only",) if size < KID_SUBSET_SIZE else ()


def _no_notes(space: FeatureSpace, real: FeatureStats | None, fake: FeatureStats) -> tuple[str, ...]:
    return ()


# the table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric: the scores it yields, where it is defined, and what it needs.

    In the name of a score {} stands for the space; a name without it gets the suffix `_<space>` outside Inception, if
    the metric uses features.
    """

    scores: tuple[str, ...]
    compute: Callable[..., list[MetricValue]]
    fake_accumulators: tuple[Accumulator, ...]  # what it needs of the fakes
    real_accumulators: tuple[Accumulator, ...]  # likewise of the reals; () if it does not use them
    settings: Mapping[str, int] = field(default_factory=dict)  # part of the protocol
    check_space: Callable[[str, FeatureSpace], None] = _accept_any_space  # raises if the metric is not defined there
    notes: Callable[..., tuple[str, ...]] = _no_notes  # called with (space, real, fake)
    required_fakes: int | None = None  # number of fakes, if its name states it

    @property
    def min_images(self) -> int:
        """Smallest number of images: two, or more than the number of neighbors."""
        return self.settings.get("k", 0) + 2

    def accumulators_of(self, side: Literal["reals", "fakes"]) -> tuple[Accumulator, ...]:
        """Return what it needs of one side."""
        return self.fake_accumulators if side == "fakes" else self.real_accumulators

    def min_images_of(self, side: Literal["reals", "fakes"]) -> int:
        """Return the smallest number of images of one side; of fakes also for the splits of an Inception score."""
        splits = self.settings.get("splits", 1) if side == "fakes" else 1
        return max(self.min_images, splits * MIN_SPLIT_IMAGES)

    @property
    def needs_labels(self) -> bool:
        """Whether it needs labels."""
        return any(acc.needs_labels for acc in (*self.fake_accumulators, *self.real_accumulators))

    @property
    def is_paired(self) -> bool:
        """True if it compares fakes with the reals that they were made from; it then uses no features."""
        return all(acc.is_paired for acc in self.fake_accumulators)


_GAUSSIAN = (GaussianAcc(),)
_CLASS_GAUSSIANS = (ClassGaussianAcc(),)
_FEATURES = (FeatureAcc(),)
_CAS_TRAIN = ImageAcc(DEFAULT_TRAINING.max_images)
_CAS_TEST = ImageAcc(CAS_TEST_IMAGES)
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
_IS = Metric(
    ("is",), _is, (LogitAcc(10),), (), {"splits": 10}, _check_has_logits, partial(_few_images_notes, splits=10)
)
_PRDC = Metric(("precision_{}", "recall_{}", "density_{}", "coverage_{}"), _prdc, _FEATURES, _FEATURES, {"k": 5})


def _paired(
    name: str,
    compare: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    check_space: Callable[[str, FeatureSpace], None],
    **settings: int,
) -> Metric:
    """Return the metric that is the mean over all fakes of what `compare` returns."""
    accumulator = PairAcc(compare, name)
    compute = partial(_mean_of_pairs, accumulator=accumulator)
    return Metric((name,), compute, (accumulator,), (), settings, check_space)


METRICS: Mapping[str, Metric] = {
    "fd": dataclasses.replace(_FRECHET, scores=("fd_{}",)),
    "fid": dataclasses.replace(_FRECHET, scores=("fid",), check_space=_check_is_inception),
    "fid50k_full": dataclasses.replace(
        _FRECHET, scores=("fid50k_full",), check_space=_check_is_inception, required_fakes=50_000
    ),
    "kid": _KID,
    "kid50k_full": dataclasses.replace(_KID, scores=("kid50k_full",), required_fakes=50_000),
    "is": _IS,
    "is1": dataclasses.replace(
        _IS,
        scores=("is1",),
        fake_accumulators=(LogitAcc(1),),
        settings={"splits": 1},
        notes=partial(_few_images_notes, splits=1),
    ),
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
    "psnr": _paired("psnr", psnrs, check_is_image, peak=PEAK),
    "log_mel": _paired("log_mel", log_mel_distances, check_is_wave, window_ms=round(1000 * MEL_WINDOW_S), mels=MELS),
    "stft": _paired("stft", stft_distances, check_is_wave, largest_window=max(STFT_WINDOWS)),
}


def metric_names(requested: str, space: FeatureSpace) -> tuple[str, ...]:
    """Return the names of a metric's scores in a space: `fd` yields `fd_pixels` in pixels.

    Call it before training, so that an evaluation that cannot work is refused early.

    Raises:
        UsageError: The metric is unknown, or not defined in the space.
    """
    metric = get_metric(requested)
    metric.check_space(requested, space)
    suffix = "" if space.is_inception or metric.is_paired else f"_{space.name}"
    return tuple(name.format(space.name) if "{}" in name else f"{name}{suffix}" for name in metric.scores)


def required_features(metrics: Sequence[str], inception: str = "") -> str:
    """Return the name of the feature space that these metrics, or a given file of Inception weights, need.

    That is "pixels" if any space will do.
    """
    if inception or any(name.startswith(("fid", "intra_fid", "is")) or "50k" in name for name in metrics):
        return "inception"
    return "resnet20" if {"accuracy", "cas"} & {*metrics} else "pixels"


def check_class_counts(metrics: Sequence[str], labels: np.ndarray | None) -> None:
    """Raise `UsageError` for distances within classes if no class of the reals has two images."""
    if labels is None or np.bincount(labels).max(initial=0) >= 2:
        return
    for name in metrics:
        if ClassGaussianAcc() in get_metric(name).real_accumulators:
            raise UsageError(f"metrics={name}: {NO_CLASS_OF_TWO}")


def check_labels(metrics: Sequence[str], space: FeatureSpace, classes: int) -> None:
    """Raise `UsageError` for per-class metrics if there are no labels, or too many classes for their covariances."""
    for name in metrics:
        metric = get_metric(name)
        if metric.needs_labels and not classes:
            raise UsageError(
                f"metrics={name}: needs classes, and the reals have no labels or G is unconditional. "
                "Use fd, kid or prdc"
            )
        if ClassGaussianAcc() in metric.fake_accumulators and classes * space.num_features**2 > MAX_COVARIANCE_NUMBERS:
            size = f"{classes} covariances of {space.num_features} features"
            raise UsageError(f"metrics={name}: would need {size}. Use --features resnet20, which has 64 features")


def check_pairs(metrics: Sequence[str], sample_rate: int | None) -> None:
    """Raise `UsageError` for metrics of pairs that the data do not allow.

    Args:
        metrics: Keys of METRICS.
        sample_rate: Of the reals that fakes are made from, Hz; 0 without one; None if fakes are not made from reals.
    """
    for name in metrics:
        if not get_metric(name).is_paired:
            continue
        if sample_rate is None:
            raise UsageError(
                f"metrics={name}: compares each fake with the real that it was made from, and G is not given reals "
                "(conditioning_input), or there is a G for each label. Use fd, kid or prdc"
            )
        if name == "log_mel" and not sample_rate:
            raise UsageError(f"metrics={name}: needs the sample rate of audio files, and arrays have none. Use stft")


def num_fakes(metrics: Sequence[str], count: int | None = None) -> int:
    """Return `count`, by default 50,000.

    Raises:
        UsageError: the name of a metric states another number, or they are too few for its splits.
    """
    for name in metrics:
        metric = get_metric(name)
        required = metric.required_fakes
        if required and count not in (None, required):
            other = metric_of_any_count(name, count or 0)
            raise UsageError(f"count={count}: {name} is of {required} fakes. Use {other}, or count={required}")
        splits = metric.settings.get("splits", 1)
        if splits > 1 and count is not None and count < splits * MIN_SPLIT_IMAGES:
            raise UsageError(
                f"count={count}: {name} is of {splits} splits of at least {MIN_SPLIT_IMAGES} fakes. Use "
                f"count={splits * MIN_SPLIT_IMAGES} or more, or is1"
            )
    return DEFAULT_COUNT if count is None else count


def metric_of_any_count(name: str, count: int) -> str:
    """Return the metric to use instead of one whose name states a number of fakes, such as fid50k_full, for `count`."""
    general = name.partition("50k")[0].replace("pr", "prdc")
    if METRICS[general].min_images_of("fakes") <= count:
        return general
    return "is1" if general == "is" else "fd"


def get_metric(name: str) -> Metric:
    """Return the metric of a name. Raises `UsageError` if there is none."""
    if f"{name}_{{}}" in _PRDC.scores:
        raise UsageError(f"metrics={name}: is one of the scores of prdc. Use prdc")
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise UsageError(f"metrics={name}: is none of {known}; did you mean {closest_name(name, METRICS)}?")
    return METRICS[name]
