"""Scores of a generator: FID, KID, precision and recall, Inception score, by class, of pairs. See docs/scores.md."""

from paragan.eval.accumulators import PairedReals
from paragan.eval.evaluate import (
    ClassLabels,
    EvalProtocol,
    Score,
    compute_feature_stats,
    evaluate,
    protocol_differences,
)
from paragan.eval.feature_stats import FeatureStats
from paragan.eval.features import FeatureSpace, inception_2015, module_features, named_space, pixels, space_from_module
from paragan.eval.metrics import METRICS, metric_names, num_fakes
from paragan.eval.reference_stats import load_reference_stats
from paragan.eval.sharding import ReduceGroup

__all__ = [
    "METRICS",
    "ClassLabels",
    "EvalProtocol",
    "FeatureSpace",
    "FeatureStats",
    "PairedReals",
    "ReduceGroup",
    "Score",
    "compute_feature_stats",
    "evaluate",
    "inception_2015",
    "load_reference_stats",
    "metric_names",
    "module_features",
    "named_space",
    "num_fakes",
    "pixels",
    "protocol_differences",
    "space_from_module",
]
