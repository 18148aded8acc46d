"""The run folder: lock it, read and write what it holds.

RUN/run.yaml          the record of the run
RUN/.lock             held by the process that writes here
RUN/members.json      under an elastic strategy: where the ranks listen for others that join
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from paragan.comm import checkpoint_files
from paragan.comm.elastic.kv_store import ServerAddress
from paragan.config.run import Run, load_without_user_code, to_saved_dict
from paragan.config.sections import DataOptions
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.schema import did_you_mean, from_dict, read_yaml, to_yaml
from paragan.models.model import read_spec
from paragan.models.model_files import find_model_dir, is_per_label, read_model_config
from paragan.nets import Nets


class RunDir:
    """A run folder. A process that locks it owns it until it ends: one run at a time writes there.

    completed_duplicate : another folder in which the same run is complete, for messages
    is_shared           : whether this rank sees the folder of rank 0
    """

    def __init__(self, path: Path):
        self.path = path
        self.is_shared = True
        self.completed_duplicate: RunDir | None = None
        self._lock: TextIO | None = None

    @property
    def run_name(self) -> str:
        """The name of the run: that of its folder; in a per-label run RUN-label-0003."""
        if self.path.parent.name == "labels":
            return f"{self.path.parent.parent.name}-label-{self.path.name.partition('.')[0]}"
        return self.path.name

    @property
    def checkpoints_dir(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def trained_images(self) -> int:
        """Images seen, by the newest readable checkpoint."""
        return self.progress[0]

    @property
    def progress(self) -> tuple[int, float]:
        """Images seen and seconds of training, by the newest readable checkpoint."""
        for path in checkpoint_files.list_checkpoints(self.checkpoints_dir):
            try:
                clock = checkpoint_files.read_metadata(path)["clock"]
                return int(clock["images"]), float(clock["seconds"])
            except (checkpoint_files.CorruptCheckpoint, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0, 0.0

    def read_run_config(self) -> dict[str, Any] | None:
        """Return the contents of run.yaml, or None if there is none."""
        path = self.path / "run.yaml"
        return read_yaml(path) if path.exists() else None

    def write_run_config(self, run: Run) -> None:
        """Write run.yaml."""
        atomic_write_bytes(self.path / "run.yaml", to_yaml(to_saved_dict(run)).encode())

    def require_empty(self) -> None:
        """Raise UsageError if the folder has files in it; hidden files do not count."""
        if self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise UsageError(f"--run-dir {self.path}: has files in it but no run.yaml. Use an empty or a new folder")

    def lock(self) -> bool:
        """Own the folder until this process ends. Returns False if another process does."""
        if self._lock:
            return True
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            return False
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()
        return True

    def lock_owner(self) -> str:
        """Return who holds the lock, for messages."""
        return (self.path / ".lock").read_text() or "another process"

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._lock:
            self._lock.close()
        self._lock = None

    def write_members(self, addresses: Mapping[int, ServerAddress], fingerprint: str) -> None:
        """Write members.json: where the ranks of an elastic run listen for those that join, and what they train on.

        Only its owner may read it, as it has the secrets with which one joins.
        """
        data = json.dumps({"members": addresses, "data": fingerprint}).encode()
        atomic_write_bytes(self.path / "members.json", data, private=True)

    def read_members(self) -> tuple[dict[int, ServerAddress], str]:
        """Return the addresses by rank and the fingerprint of the data; ({}, "") if they cannot be read."""
        try:
            saved = json.loads((self.path / "members.json").read_text())
            members = saved["members"].items()
            addresses = {
                int(rank): ServerAddress(str(h), int(port), str(secret)) for rank, (h, port, secret) in members
            }
            return addresses, str(saved["data"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, ""


def require_current_format(folder: Path) -> None:
    """Raise UsageError if another version of paragan wrote the checkpoints or the model of a run folder."""
    for path in (
        *checkpoint_files.list_checkpoints(folder / "checkpoints"),
        *sorted(folder.glob("labels/*/checkpoints/*")),
    ):
        with contextlib.suppress(checkpoint_files.CorruptCheckpoint):
            checkpoint_files.read_metadata(path)
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


def require_run_dir(path: Path) -> Path:
    """Return the path if it is a run folder.

    Raises:
        UsageError: it is not; the message names run folders close to it.
    """
    if (path / "run.yaml").exists():
        return path
    if not path.exists():
        siblings = [str(p.parent) for p in sorted(path.parent.glob("*/run.yaml"))][-9:]
        hint = did_you_mean(str(path), siblings) if siblings else ""
        raise UsageError(f"{path}: does not exist{hint}")
    inside = [str(p.parent) for p in sorted(path.glob("*/run.yaml"))]
    hint = f"; there are runs in it: {', '.join(inside[-3:])}" if inside else ""
    raise UsageError(f"{path}: is no run folder (it has no run.yaml){hint}")


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
