"""paragan trains generative adversarial networks on one device, on many, and across slow networks."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings where a rank is lost are stack traces

from .api import Config, Estimator, ScalingManager, with_policy
from .batch import Batch, Loss
from .data.images import Images, load
from .errors import Failed, Interrupted, Unusable
from .losses.adversarial import Adversarial
from .optim.optimizers import SGD, Adam, RMSprop
from .train.model import load_model
from .train.run import Data, Device, Evaluation, Run, Side

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
    "RMSprop",
    "Run",
    "ScalingManager",
    "Side",
    "Unusable",
    "load",
    "load_model",
    "with_policy",
]
