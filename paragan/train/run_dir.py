"""The run folder: choose it, own it, and recognise whether it holds the same run.

RUN/run.yaml          the record of the run
RUN/.lock             held by the process that writes here
RUN/members.json      under an elastic strategy: where the ranks listen for others that join

Two records are of the same run if they differ only in fields that may change on resume: how long, where, and what is
written. Paths of data and models may differ if what lies there has the same fingerprint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paragan.config.resolve import fill_strategy_defaults
from paragan.config.run import Run, load_without_user_code, may_change_on_resume, to_saved_dict
from paragan.config.sections import DataOptions, InputFingerprints
from paragan.core.atomic_write import atomic_write_bytes, create_exclusive
from paragan.core.errors import UsageError
from paragan.core.jsonl import read_jsonl
from paragan.core.schema import did_you_mean, diff, from_dict, get_field, read_yaml, replace_fields, to_yaml
from paragan.models.model import wrap_config_errors
from paragan.models.model_files import read_model_config
from paragan.nets import Spec
from paragan.train import checkpoint

StartCheck = Callable[[], object]  # raises UsageError for a run that could not start
NUMBERED_DIR = re.compile(r"(\d{5,})-")
INPUT_PATHS = {"data.path": "data", "init_from": "init_from", "distill_from": "distill_from"}  # field -> fingerprint
TUNED_FIELDS = (  # decided by `device.tune=measured`
    "device.precision",
    "device.channels_last",
    "device.compile",
    "device.threads",
    "device.concat_real_fake",
    "device.lanes_per_pass",
    "device.capture_passes",
    "device.pad_channels",
    "device.huge_pages",
    "nets.fused_resampling",
    "g.optimizer.fused",
    "d.optimizer.fused",
)


@dataclass(frozen=True)
class RunDirRequest:
    """What the command line says about the run folder.

    outdir  : where new folders are created
    run_dir : the folder itself, if it is named
    resume  : "auto" continues an unfinished folder of the same run, "never" always creates a new one
    """

    outdir: Path = Path("runs")
    run_dir: Path | None = None
    resume: str = "auto"

    def candidates(self) -> list[RunDir]:
        """Return the folders that may hold the run to resume: the named one, or the numbered ones, newest first."""
        if self.run_dir:
            return [RunDir(self.run_dir)]
        return [RunDir(path) for path in reversed(_list_numbered_dirs(self.outdir))]


def no_check() -> None:
    """Accept every run: the default `StartCheck`."""


class RunDir:
    """A run folder. A process that locks it owns it until it ends: one run at a time writes there.

    completed_duplicate : another folder in which the same run is complete, for messages
    """

    def __init__(self, path: Path):
        self.path = path
        self.completed_duplicate: RunDir | None = None
        self._lock: TextIO | None = None

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
        for path in checkpoint.list_checkpoints(self.checkpoints_dir):
            try:
                clock = checkpoint.read_metadata(path)["clock"]
                return int(clock["images"]), float(clock["seconds"])
            except (checkpoint.CorruptCheckpoint, KeyError, TypeError, ValueError, AttributeError):
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

    def write_members(self, addresses: Mapping[int, tuple[str, int]], fingerprint: str) -> None:
        """Write members.json: where the ranks of an elastic run listen for those that join, and what they train on."""
        atomic_write_bytes(self.path / "members.json", json.dumps({"members": addresses, "data": fingerprint}).encode())

    def read_members(self) -> tuple[dict[int, tuple[str, int]], str]:
        """Return the addresses by rank and the fingerprint of the data; ({}, "") if they cannot be read."""
        try:
            saved = json.loads((self.path / "members.json").read_text())
            addresses = {int(rank): (str(host), int(port)) for rank, (host, port) in saved["members"].items()}
            return addresses, str(saved["data"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, ""


def select_run_dir(request: RunDirRequest, run: Run, ranks: int, start_check: StartCheck = no_check) -> RunDir:
    """Return the folder for a run, locked: the named one, the newest unfinished one of the same run, or a new one.

    Args:
        start_check: called before a folder is created, to refuse a run that could not start.

    Raises:
        UsageError: the named folder holds another run or is in use, or nothing can be written.
    """
    if request.run_dir:
        return _open_requested(request.run_dir, request.resume, run, start_check)
    same_runs: list[tuple[RunDir, Run]] = []
    if request.resume == "auto":
        for run_dir in request.candidates():
            previous = _previous_run(run_dir, run)
            if previous:
                same_runs.append((run_dir, previous))
    for run_dir, previous in same_runs:
        if _is_unfinished(run_dir, run) and run_dir.lock():
            try:
                if run_dir.trained_images:
                    check_same_inputs(to_saved_dict(previous), run, run_dir.path)
            except UsageError:
                run_dir.release()
                raise
            return run_dir
    new = _create_numbered_dir(request.outdir, run, ranks, start_check)
    for run_dir, previous in same_runs:
        if run_dir.trained_images >= min(run.total_images, previous.total_images):
            new.completed_duplicate = run_dir
            break
    return new


def select_shared_run_dir(
    request: RunDirRequest, run: Run, is_finished: Callable[[Path], bool], start_check: StartCheck = no_check
) -> RunDir:
    """Return the folder of a run that any number of processes work on and none owns.

    It is the named one, the newest unfinished one of the same run, or a new one. Processes that select at the same
    moment get the same folder.

    Args:
        is_finished: whether nothing is left to do in a folder.
        start_check: called before a folder is created, to refuse a run that could not start.

    Raises:
        UsageError: the named folder holds another run, or nothing can be written.
    """
    path = request.run_dir
    if path:
        run_dir = RunDir(path)
        previous = run_dir.read_run_config()
        if previous is None:
            try:
                run_dir.require_empty()
            except UsageError:
                previous = run_dir.read_run_config()  # another process may have written it since
                if previous is None:
                    raise
        if previous is not None and request.resume == "never":
            raise _already_holds_run(path)
        check_same_run(previous or _create_or_read_config(path, run, start_check), run, path)
        return run_dir
    if request.resume == "auto":
        for run_dir in request.candidates():
            previous = run_dir.read_run_config()
            if previous is not None and not config_changes(previous, run) and not is_finished(run_dir.path):
                return run_dir
    # a folder without run.yaml may become the one of this run at any moment: it does not count
    with_config = [path for path in _list_numbered_dirs(request.outdir) if (path / "run.yaml").exists()]
    number = _next_number(with_config)
    while True:
        path = request.outdir / _dir_name(number, run)
        if not config_changes(_create_or_read_config(path, run, start_check), run):
            return RunDir(path)
        number += 1


def _create_or_read_config(path: Path, run: Run, start_check: StartCheck) -> dict[str, Any]:
    """Write run.yaml if there is none, and return what it holds: another process may have been faster."""
    start_check()
    try:
        path.mkdir(parents=True, exist_ok=True)
        create_exclusive(path / "run.yaml", to_yaml(to_saved_dict(run)).encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}). Use another --run-dir or --outdir") from error
    return RunDir(path).read_run_config() or {}


def find_live_runs(request: RunDirRequest) -> list[tuple[RunDir, dict[int, tuple[str, int]], str]]:
    """Return the folders whose ranks listen for others, newest first: (folder, addresses by rank, data fingerprint)."""
    if not request.run_dir and request.resume != "auto":
        return []
    rows = [(run_dir, *run_dir.read_members()) for run_dir in request.candidates()]
    return [row for row in rows if row[1]]


def _open_requested(path: Path, resume: str, run: Run, start_check: StartCheck) -> RunDir:
    run_dir = RunDir(path)
    previous = run_dir.read_run_config()
    if previous is None:
        run_dir.require_empty()
        start_check()
    elif resume == "never":
        raise _already_holds_run(path)
    else:
        check_same_run(previous, run, path)
        if run_dir.trained_images:
            check_same_inputs(previous, run, path)
    try:
        is_locked = run_dir.lock()
    except OSError as error:
        raise UsageError(f"--run-dir {path}: cannot be written ({error.strerror}). Use another --run-dir") from error
    if not is_locked:
        raise UsageError(
            f"--run-dir {path}: is being written by {run_dir.lock_owner()}. Stop that run, or use another --run-dir"
        )
    return run_dir


def _already_holds_run(path: Path) -> UsageError:
    return UsageError(f"--resume never: {path} holds a run already. Use another --run-dir")


def _previous_run(run_dir: RunDir, run: Run) -> Run | None:
    """Return this run as it was started in a folder; None if the folder holds another run, or none."""
    with contextlib.suppress(UsageError):
        previous = run_dir.read_run_config()
        if previous is not None and not config_changes(previous, run):
            return from_dict(Run, previous)
    return None


def _is_unfinished(run_dir: RunDir, run: Run) -> bool:
    """Return True if this run was started in a folder and lacks images or its last scores.

    A folder that is already beyond the length asked for now, and was to go further, is another run's.
    """
    previous = _previous_run(run_dir, run)
    images = run_dir.trained_images
    if previous is None or run.total_images < min(images, previous.total_images):
        return False
    if images < previous.total_images:
        return True
    if not previous.evaluation.metrics:
        return False
    return not any(row.get("kimg") == images / 1000 for row in read_jsonl(run_dir.path / "metrics.jsonl"))


def previous_layout(request: RunDirRequest, run: Run) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder in which this run was started, and its `TUNED_FIELDS`; (None, {}) if there is none."""
    if request.resume == "never":
        return None, {}
    for run_dir in request.candidates():
        with contextlib.suppress(UsageError):
            previous = run_dir.read_run_config()
            if previous is None or any(name not in TUNED_FIELDS for name, *_ in config_changes(previous, run)):
                continue
            started = from_dict(Run, previous)
            names = [name for name in TUNED_FIELDS if _has_field(started, name) and _has_field(run, name)]
            fields = {name: get_field(started, name) for name in names}
            if request.run_dir or _is_unfinished(run_dir, replace_fields(run, fields)):
                return run_dir.path, fields
    return None, {}


def check_run_dir(request: RunDirRequest, run: Run) -> None:
    """Raise UsageError if the named folder cannot take this run, whatever strategy is chosen for it."""
    if not request.run_dir or not request.run_dir.is_dir():
        return
    previous = RunDir(request.run_dir).read_run_config()
    if previous:
        with wrap_run_errors(request.run_dir):
            started = from_dict(Run, previous)
        run = fill_strategy_defaults(replace(run, strategy=started.strategy, auto_choice=started.auto_choice))
    _open_requested(request.run_dir, request.resume, run, no_check).release()
    if previous and not run.auto_choice.ranks:
        raise UsageError(
            f"--strategy auto: {request.run_dir} was started with --strategy {run.strategy.name}. "
            "Use that, or another --run-dir"
        )


def previous_auto_run(request: RunDirRequest, run: Run) -> Run | None:
    """Return this run with the strategy that was chosen when it was started; None if it was not started before."""
    if request.resume == "never":
        return None
    for run_dir in request.candidates():
        with contextlib.suppress(UsageError):
            previous = run_dir.read_run_config()
            if previous is None:
                continue
            started = from_dict(Run, previous)
            if not started.auto_choice.ranks:
                continue
            resumed = replace(run, strategy=started.strategy, auto_choice=started.auto_choice, reasons=started.reasons)
            resumed = fill_strategy_defaults(resumed)
            if not config_changes(previous, resumed) and (request.run_dir or _is_unfinished(run_dir, resumed)):
                return resumed
    return None


def _has_field(run: Run, name: str) -> bool:
    try:
        get_field(run, name)
    except AttributeError:
        return False
    return True


def config_changes(previous: dict[str, Any], run: Run) -> list[tuple[str, Any, Any]]:
    """Return the fields that make a run another one than that of a record: (name, value there, value now)."""
    with contextlib.suppress(UsageError):
        previous = to_saved_dict(fill_strategy_defaults(from_dict(Run, previous)))
    changes = [change for change in diff(previous, to_saved_dict(run)) if not may_change_on_resume(change[0])]
    changes = [change for change in changes if not _has_same_content(previous, run.fingerprints, change[0])]
    if previous.get("auto_choice", {}).get("ranks") and run.auto_choice.ranks:
        # --strategy auto may choose other settings of the same strategy for another number of ranks
        changes = [c for c in changes if c[0] == "strategy.name" or not c[0].startswith("strategy.")]
    return changes


def _has_same_content(previous: dict[str, Any], fingerprints: InputFingerprints, name: str) -> bool:
    """Return True if a field is a path and what was read there is, by its fingerprint, what is read now."""
    if name not in INPUT_PATHS:
        return False
    fingerprint = getattr(fingerprints, INPUT_PATHS[name])
    return bool(fingerprint) and fingerprint == previous.get("fingerprints", {}).get(INPUT_PATHS[name])


def check_same_run(previous: dict[str, Any], run: Run, path: Path) -> None:
    """Raise UsageError if the record of a folder is of another run, and name the fields that differ."""
    changes = config_changes(previous, run)
    if changes:
        require_current_format(path)
        listed = "; ".join(f"{name} was {before!r}, is {now!r}" for name, before, now in changes[:8])
        raise UsageError(f"{path}: holds another run: {listed}. Use its settings, or another --run-dir")


def check_same_inputs(previous: dict[str, Any], run: Run, path: Path) -> None:
    """Raise UsageError if data or teacher have the path that they have in a record, and are others by now."""
    saved = previous.get("fingerprints", {})
    if saved.get("data") and saved["data"] != run.fingerprints.data:
        raise other_data_error(run.data, path)
    if saved.get("distill_from") and saved["distill_from"] != run.fingerprints.distill_from:
        raise UsageError(
            f"distill_from={run.distill_from}: not the generators that {path} learned from. Use those, or another "
            "--run-dir"
        )


def other_data_error(options: DataOptions, path: Path) -> UsageError:
    """Return the error for data that are not those of a checkpoint or a folder."""
    return UsageError(
        f"--data {options.redacted_path}: not the images that {path} was trained on. Use those, or another --run-dir"
    )


def _list_numbered_dirs(outdir: Path) -> list[Path]:
    """Return the numbered run folders, oldest first."""
    if not outdir.is_dir():
        return []
    return sorted(p for p in outdir.glob("[0-9]*-*") if p.is_dir() and NUMBERED_DIR.match(p.name))


def _next_number(paths: Iterable[Path]) -> int:
    """Return the number after the highest of numbered folders."""
    numbers = [int(match[1]) for path in paths if (match := NUMBERED_DIR.match(path.name))]
    return max(numbers, default=-1) + 1


def _create_numbered_dir(outdir: Path, run: Run, ranks: int, start_check: StartCheck) -> RunDir:
    start_check()
    try:
        outdir.mkdir(parents=True, exist_ok=True)
        number = _next_number(_list_numbered_dirs(outdir))
        while True:
            run_dir = RunDir(outdir / _dir_name(number, run, ranks))
            try:
                run_dir.path.mkdir()
                break
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UsageError(f"--outdir {outdir}: cannot be written ({error.strerror}). Use another --outdir") from error
    run_dir.lock()
    return run_dir


def _dir_name(number: int, run: Run, ranks: int = 0) -> str:
    """Return 00000-digits-dcgan-sync-r1-b128; sync-int4 with a lossy wire; no ranks if their number may change."""
    nets = run.nets.name.replace(":", ".")  # MODULE:CLASS
    strategy = run.strategy.name
    wire = run.strategy.wire
    if wire.lossy:
        strategy = f"{strategy}-{wire.name.rpartition(':')[2]}"
    ranks_text = f"-r{ranks}" if ranks else ""
    return f"{number:05d}-{run.recipe}-{nets}-{strategy}{ranks_text}-b{run.batch}"


def require_current_format(folder: Path) -> None:
    """Raise UsageError if another version of paragan wrote the checkpoints or the model of a run folder."""
    for path in (*checkpoint.list_checkpoints(folder / "checkpoints"), *sorted(folder.glob("labels/*/checkpoints/*"))):
        with contextlib.suppress(checkpoint.CorruptCheckpoint):
            checkpoint.read_metadata(path)
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
        path: a run folder; or a model folder, such as an imported one.
        data: the data to score a model folder against.

    Raises:
        UsageError: it is neither, or a model folder without `data`.
    """
    if (path / "run.yaml").exists() or not (path / "model.safetensors").exists():
        run_dir = require_run_dir(path)
        return run_dir, load_run_without_user_code(run_dir)
    if not data:
        raise UsageError(f"--data: {path} is a model without its run. Use --data PATH to say what it is scored against")
    config = read_model_config(path)
    with wrap_config_errors(path):
        spec = from_dict(Spec, config["spec"])
        options = from_dict(DataOptions, {"path": data, "resolution": spec.resolution, "channels": spec.channels})
    return path, Run(recipe=str(config.get("recipe", "custom")), data=replace(options, labels=spec.classes > 0))
