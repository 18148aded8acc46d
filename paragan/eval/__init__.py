from paragan.eval.evaluate import (
    METRICS,
    Protocol,
    Score,
    Summary,
    comparable,
    evaluate,
    metric_names,
    number_of_fakes,
    summarize,
)
from paragan.eval.features import FeatureSpace, by_name, inception_2015, module_features, pixels
from paragan.eval.shares import Summing

__all__ = [
    "METRICS",
    "FeatureSpace",
    "Protocol",
    "Score",
    "Summary",
    "Summing",
    "by_name",
    "comparable",
    "evaluate",
    "inception_2015",
    "metric_names",
    "module_features",
    "number_of_fakes",
    "pixels",
    "summarize",
]
