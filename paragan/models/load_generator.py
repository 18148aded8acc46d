"""Build the generator of a model folder and load its weights. Runs no code from the files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paragan.config.user_code import load_user_nets
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict
from paragan.models.model_files import ModelSnapshot
from paragan.nets import Nets, Spec

SIZE_SLACK_BYTES = 2**24


def build_generator(snapshot: ModelSnapshot, nets: Any, spec: Spec) -> nn.Module:
    """Return the generator of a model folder on the CPU, in evaluation mode.

    Args:
        snapshot: its files.
        nets: its networks, from `resolve_nets`.
        spec: what they were built for.

    Raises:
        UsageError: networks and weights do not fit each other.
    """
    max_bytes = 4 * len(snapshot.weights["model"]) + SIZE_SLACK_BYTES
    with wrap_config_errors(snapshot.folder), _limit_parameter_bytes(max_bytes):
        g = nets.generator(spec)
    snapshot.load_into(g)
    return g.eval()


def resolve_nets(config: Any, user_nets: Any, folder: Path) -> Any:
    """Return the networks that a model's config.json names. User-defined networks have to be passed as `user_nets`."""
    name = config.get("name", "") if isinstance(config, dict) else ""
    if ":" not in str(name):
        with wrap_config_errors(folder):
            return from_dict(Nets, config)  # pyright: ignore
    if user_nets is None:
        raise UsageError(f"{folder}: trained with your own networks, which files never run. Use --nets {name}")
    if isinstance(user_nets, str):  # with the fields of training
        return load_user_nets(config | {"name": user_nets})
    return user_nets


@contextlib.contextmanager
def _limit_parameter_bytes(max_bytes: int) -> Iterator[None]:
    """Raise ValueError as soon as the parameters that this thread creates take more bytes.

    A wrong size in config.json must not fill the memory before the network is compared with the weights. Parametrized
    weights count twice.
    """
    thread = threading.get_ident()
    num_bytes = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal num_bytes
        if parameter is not None and threading.get_ident() == thread:
            num_bytes += parameter.nbytes
        if num_bytes > max_bytes:
            raise ValueError("its networks are much larger than the weights in the folder")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def wrap_config_errors(folder: Path) -> Iterator[None]:
    """Turn errors inside the block into a UsageError that names config.json."""
    try:
        yield
    except KeyError as error:
        raise UsageError(f"{folder}/config.json: {error} is missing") from error
    except (UsageError, ValueError, TypeError, RuntimeError) as error:  # RuntimeError: out of memory
        raise UsageError(f"{folder}/config.json cannot be used: {error}") from error
