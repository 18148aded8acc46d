"""Create the loggers that `output.loggers` names: built-in ones, and classes of the user."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.schema import did_you_mean
from paragan.core.user_imports import import_attribute
from paragan.train.loggers.logger import Logger

LoggerEntry = str | Mapping[str, Any] | Logger  # a name, a name with settings, or the logger itself


@dataclass(frozen=True)
class LoggerBackend:
    """A built-in logger.

    path    : module:Class
    package : what it imports
    install : the package of the extra that has it
    """

    path: str
    package: str
    install: str


BACKENDS = {
    "tensorboard": LoggerBackend(
        "paragan.train.loggers.tensorboard_logger:TensorBoardLogger", "tensorboard", "tensorboard"
    ),
    "wandb": LoggerBackend("paragan.train.loggers.wandb_logger:WandbLogger", "wandb", "wandb"),
    "mlflow": LoggerBackend("paragan.train.loggers.mlflow_logger:MlflowLogger", "mlflow", "mlflow-skinny"),
    "trackio": LoggerBackend("paragan.train.loggers.trackio_logger:TrackioLogger", "trackio", "trackio"),
}


def check_loggers(entries: Sequence[LoggerEntry]) -> None:
    """Refuse loggers that cannot be created. Does not import the packages of built-in ones.

    Raises:
        UsageError: names the logger.
    """
    names = [logger_name(entry) for entry in entries]
    for entry, name in zip(entries, names):
        if names.count(name) > 1:
            raise UsageError(f"--output.loggers={name}: is listed more than once. Use it once")
        if name not in BACKENDS:
            create_logger(entry)
            continue
        _check_backend(name, entry)


def logger_name(entry: LoggerEntry) -> str:
    """Return the name of a logger, for messages and for the id of its run."""
    if isinstance(entry, Logger):
        return type(entry).__name__
    return entry if isinstance(entry, str) else str(entry.get("name", ""))


def create_logger(entry: LoggerEntry) -> Logger:
    """Return the logger of an entry of `output.loggers`.

    Raises:
        UsageError: there is none of this name, its package is missing, or the user's class is none that works.
    """
    if isinstance(entry, Logger):
        return entry
    name = logger_name(entry)
    if name in BACKENDS:
        _check_backend(name, entry)
        return import_attribute(BACKENDS[name].path)()
    if ":" not in name:
        raise UsageError(f"--output.loggers: there is no {name}{did_you_mean(name, BACKENDS)}")
    settings = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "name"}
    try:
        logger = _construct(name, settings)
    except UsageError as error:
        raise UsageError(f"--output.loggers={name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a module may run any code
        raise UsageError(
            f"--output.loggers={name}: {type(error).__name__}: {error}. Use the module:Class of a module "
            "that is installed or in the current folder"
        ) from error
    if not isinstance(logger, Logger):
        kind = type(logger).__name__
        raise UsageError(f"--output.loggers={name}: makes a {kind}. Use a class derived from paragan.Logger")
    return logger


def _construct(name: str, settings: Mapping[str, Any]) -> object:
    """Return what the user's class makes of these settings."""
    logger_class = import_attribute(name)
    signature = inspect.signature(logger_class)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise UsageError(f"settings: {error}. Use those of {signature}") from error
    return logger_class(**settings)


def _check_backend(name: str, entry: LoggerEntry) -> None:
    """Raise UsageError if a built-in logger lacks its package, or has settings in the record of the run."""
    backend = BACKENDS[name]
    if isinstance(entry, Mapping) and len(entry) > 1:
        raise UsageError(
            f"--output.loggers={name}: takes no settings here. Use the environment variables of {backend.package}"
        )
    if importlib.util.find_spec(backend.package) is None:
        raise UsageError(
            f"--output.loggers={name}: needs the package {backend.package}. Use pip install {backend.install}"
        )
