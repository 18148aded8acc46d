"""Read the run that a folder holds, and say how its data are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paragan.comm.checkpoint_metadata import CorruptCheckpoint, list_checkpoints, read_metadata
from paragan.config.run import Run, load_without_user_code
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, read_yaml
from paragan.models.model import read_spec
from paragan.models.model_config import read_model_config
from paragan.models.model_files import find_model_dir, is_per_label
from paragan.nets import Nets
from paragan.train.run_dir import require_run_dir


def require_current_format(folder: Path) -> None:
    """Raise UsageError if another version of paragan wrote the checkpoints or the model of a run folder."""
    for path in (
        *list_checkpoints(folder / "checkpoints"),
        *sorted(folder.glob("labels/*/checkpoints/*")),
    ):
        with contextlib.suppress(CorruptCheckpoint):
            read_metadata(path)
            return
    if (folder / "model" / "config.json").is_file():
        read_model_config(folder / "model")


@contextlib.contextmanager
def wrap_run_errors(folder: Path) -> Iterator[None]:
    """Name the format of a run folder in UsageErrors that come from a record of another version of paragan."""
    try:
        yield
    except UsageError as error:
        require_current_format(folder)
        raise UsageError(f"{folder / 'run.yaml'}: {error}") from error


def load_run(folder: Path) -> Run:
    """Return the run that a folder holds.

    Raises:
        UsageError: run.yaml is none of this version of paragan.
    """
    record = read_yaml(folder / "run.yaml")
    with wrap_run_errors(folder):
        return from_dict(Run, record)


def load_run_without_user_code(folder: Path) -> Run:
    """Return the run that a folder holds, without the parts that may import user code."""
    record = read_yaml(folder / "run.yaml")
    with wrap_run_errors(folder):
        return load_without_user_code(record)


def load_builtin_nets(folder: Path) -> Any:
    """Return the networks of the run that a folder holds, or None if they are user code."""
    nets = read_yaml(folder / "run.yaml").get("nets")
    if not isinstance(nets, dict) or ":" in str(nets.get("name")):
        return None
    with wrap_run_errors(folder):
        return from_dict(Nets, nets)  # pyright: ignore


def resolve_scored_run(path: Path, data: str | None) -> tuple[Path, Run]:
    """Return a folder whose model can be scored, and the run that says against what.

    Args:
        path: a run folder; or a model folder, such as an imported one, or a folder with a pooled model.
        data: the data to score a model folder against.

    Raises:
        UsageError: it is neither, or a model folder without `data`.
    """
    is_model = (path / "model.safetensors").exists() or any(map(is_per_label, (path, path / "model")))
    if (path / "run.yaml").exists() or not is_model:
        run_dir = require_run_dir(path)
        return run_dir, load_run_without_user_code(run_dir)
    if not data:
        raise UsageError(f"--data: {path} is a model without its run. Use --data PATH to say what it is scored against")
    recipe = str(read_model_config(find_model_dir(path)).get("recipe", "custom"))
    return path, Run(recipe=recipe, data=replace(data_options_of_model(path), path=data))


def scored_data_options(folder: Path, options: DataOptions, path: str | None) -> DataOptions:
    """Return how the data are read that the model in a folder is scored against.

    Args:
        folder: a run folder or a model folder.
        options: those of its run.
        path: other data, in place of those of the run: images, also where G makes latents.
    """
    if not path:
        return options
    return replace(data_options_of_model(folder) if read_spec(folder).image_shape else options, path=path)


def data_options_of_model(path: Path) -> DataOptions:
    """Return how data are read for a model without its run: images of its size, or segments of its length."""
    spec = read_spec(path).sample_spec
    fields: dict[str, Any] = {"resolution": spec.resolution, "channels": spec.channels}
    if spec.array_shape:
        fields = {"field": spec.main_field, "segment": spec.array_shape[-1] if spec.sample_rate else 0}
    return from_dict(DataOptions, fields | {"labels": spec.classes > 0})
