"""paragan trains generative adversarial networks on one device, on many, and across slow networks."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paragan.api import Config, Estimator, ScalingManager, with_policy
    from paragan.config.run import Run
    from paragan.config.sections import Data, Device, Evaluation
    from paragan.core.errors import Failed, Interrupted, Unusable
    from paragan.core.types import Batch, Loss, Verdict
    from paragan.data.dataset import Images, from_arrays
    from paragan.data.dataset import load as load_data
    from paragan.losses.adversarial import Adversarial
    from paragan.models.hub import HubModel as HubModel
    from paragan.models.load import load
    from paragan.models.model import Model
    from paragan.optim.optimizers import SGD, Adam, RMSprop, Side

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages: devices.py
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings where a rank is lost are stack traces
os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler says when it starts and stops

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "Adversarial",
    "Batch",
    "Config",
    "Data",
    "Device",
    "Estimator",
    "Evaluation",
    "Failed",
    "Images",
    "Interrupted",
    "Loss",
    "Model",
    "RMSprop",
    "Run",
    "ScalingManager",
    "Side",
    "Unusable",
    "Verdict",
    "from_arrays",
    "load",
    "load_data",
    "with_policy",
]

# What is imported when it is first used: torch takes seconds, and `paragan --help` and processes that decode need none.
_CALLED = {"load_data": "load"}  # where it comes from
_FROM = {
    ".api": ("Config", "Estimator", "ScalingManager", "with_policy"),
    ".core.types": ("Batch", "Loss", "Verdict"),
    ".data.dataset": ("Images", "from_arrays", "load_data"),
    ".core.errors": ("Failed", "Interrupted", "Unusable"),
    ".losses.adversarial": ("Adversarial",),
    ".optim.optimizers": ("SGD", "Adam", "RMSprop", "Side"),
    ".models.hub": ("HubModel",),
    ".models.load": ("load",),
    ".models.model": ("Model",),
    ".config.run": ("Run",),
    ".config.sections": ("Data", "Device", "Evaluation"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _FROM.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(module, __name__), _CALLED.get(name, name))
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
