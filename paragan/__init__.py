"""Train generative adversarial networks on one device, on many, and across slow networks.

The public names are imported when they are first used: importing torch takes seconds, which `paragan --help` and the
processes that decode images do not need.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from paragan.core.version import __version__ as __version__

if TYPE_CHECKING:
    from paragan.api.estimator import Estimator
    from paragan.api.game_config import Config, with_policy
    from paragan.api.joined_world import join
    from paragan.api.load_saved import load
    from paragan.api.positions import rng, shard
    from paragan.api.replica import Replica
    from paragan.api.replica_files import save
    from paragan.api.scaling_manager import ScalingManager
    from paragan.comm.ddp_hook import ddp_hook
    from paragan.comm.replica_check import ReplicasDiffer, check_replicas
    from paragan.config.run import Run
    from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions
    from paragan.core.errors import Interrupted, RunError, UsageError
    from paragan.core.types import Batch, DiscriminatorOutput, Loss
    from paragan.data.dataset import Dataset, from_arrays
    from paragan.data.dataset import load_data as load_data
    from paragan.losses.adversarial import Adversarial
    from paragan.losses.gradient_weights import AdaptiveWeight, Balancer
    from paragan.losses.reconstruction import Reconstruction
    from paragan.models.hub import HubModel as HubModel
    from paragan.models.model import Model
    from paragan.optim.optimizers import SGD, Adam, DiscriminatorOptim, PlayerOptim, RMSprop
    from paragan.optim.param_groups import ParamGroup
    from paragan.train.compare_sets import compare
    from paragan.train.loggers.logger import Logger, RunInfo
    from paragan.watch.notebook import show_run

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for torch's allocations (core/devices.py)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack traces when a rank is lost
os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no messages from torch's profiler

__all__ = [
    "SGD",
    "Adam",
    "AdaptiveWeight",
    "Adversarial",
    "Balancer",
    "Batch",
    "Config",
    "DataOptions",
    "Dataset",
    "DeviceOptions",
    "DiscriminatorOptim",
    "DiscriminatorOutput",
    "Estimator",
    "EvaluationOptions",
    "Interrupted",
    "Logger",
    "Loss",
    "Model",
    "ParamGroup",
    "PlayerOptim",
    "RMSprop",
    "Reconstruction",
    "Replica",
    "ReplicasDiffer",
    "Run",
    "RunError",
    "RunInfo",
    "ScalingManager",
    "UsageError",
    "check_replicas",
    "compare",
    "ddp_hook",
    "from_arrays",
    "join",
    "load",
    "load_data",
    "rng",
    "save",
    "shard",
    "show_run",
    "with_policy",
]

_EXPORTS = {  # module -> public names, imported on first use
    ".api.estimator": ("Estimator",),
    ".api.game_config": ("Config", "with_policy"),
    ".api.joined_world": ("join",),
    ".api.load_saved": ("load",),
    ".api.positions": ("rng", "shard"),
    ".api.replica": ("Replica",),
    ".api.replica_files": ("save",),
    ".api.scaling_manager": ("ScalingManager",),
    ".comm.ddp_hook": ("ddp_hook",),
    ".comm.replica_check": ("ReplicasDiffer", "check_replicas"),
    ".core.types": ("Batch", "Loss", "DiscriminatorOutput"),
    ".data.dataset": ("Dataset", "from_arrays", "load_data"),
    ".core.errors": ("RunError", "Interrupted", "UsageError"),
    ".losses.adversarial": ("Adversarial",),
    ".losses.gradient_weights": ("AdaptiveWeight", "Balancer"),
    ".losses.reconstruction": ("Reconstruction",),
    ".optim.optimizers": ("SGD", "Adam", "RMSprop", "PlayerOptim", "DiscriminatorOptim"),
    ".optim.param_groups": ("ParamGroup",),
    ".models.hub": ("HubModel",),
    ".models.model": ("Model",),
    ".train.compare_sets": ("compare",),
    ".train.loggers.logger": ("Logger", "RunInfo"),
    ".watch.notebook": ("show_run",),
    ".config.run": ("Run",),
    ".config.sections": ("DataOptions", "DeviceOptions", "EvaluationOptions"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _EXPORTS.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
