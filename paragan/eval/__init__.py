from paragan.eval.evaluate import Labels, Protocol, Score, comparable, evaluate, summarize
from paragan.eval.feature_stats import Summary
from paragan.eval.features import FeatureSpace, by_name, from_module, inception_2015, module_features, pixels
from paragan.eval.metrics import METRICS, metric_names, number_of_fakes
from paragan.eval.reference_stats import from_file
from paragan.eval.sharding import Summing

__all__ = [
    "METRICS",
    "FeatureSpace",
    "Labels",
    "Protocol",
    "Score",
    "Summary",
    "Summing",
    "by_name",
    "comparable",
    "evaluate",
    "from_file",
    "from_module",
    "inception_2015",
    "metric_names",
    "module_features",
    "number_of_fakes",
    "pixels",
    "summarize",
]
