"""The run folder: choosing it, owning it, and telling whether it holds the same run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paragan.config.resolve import fill_strategy_defaults
from paragan.config.run import Run, load_without_user_code, may_change_on_resume, to_saved_dict
from paragan.config.sections import DataOptions
from paragan.core.atomic_write import atomic_write_bytes, create_exclusive
from paragan.core.errors import UsageError
from paragan.core.jsonl import read_jsonl
from paragan.core.schema import did_you_mean, diff, from_dict, get_field, read_yaml, replace_fields, to_yaml
from paragan.models.model import wrap_config_errors
from paragan.models.model_files import read_model_config
from paragan.nets import Spec
from paragan.train import checkpoint

StartCheck = Callable[[], object]
NUMBERED_DIR = re.compile(r"(\d{5,})-")
TUNED_FIELDS = (  # what `device.tune=measured` decides
    *("device.precision", "device.channels_last", "device.compile", "device.threads", "device.concat_real_fake"),
    *("device.lanes_per_pass", "device.capture_passes", "device.pad_channels", "device.huge_pages"),
    *("nets.fused_resampling", "g.optimizer.fused", "d.optimizer.fused"),
)


@dataclass(frozen=True)
class RunDirRequest:
    """What the command line says about where to write and what to go on from."""

    outdir: Path = Path("runs")
    run_dir: Path | None = None
    resume: str = "auto"


def no_check() -> None:
    """Of a run that could begin."""


class RunDir:
    """A folder this process owns until it ends: one run at a time writes there."""

    def __init__(self, path: Path):
        self.path = path
        self.completed_duplicate: RunDir | None = None  # another, in which the same run is complete
        self._lock: TextIO | None = None

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trained_images(self) -> int:
        """How far the run in this folder has come."""
        return self.progress[0]

    @property
    def progress(self) -> tuple[int, float]:
        """Images seen, and seconds of training, by its newest readable checkpoint."""
        for path in checkpoint.list_checkpoints(self.checkpoints_dir):
            try:
                clock = checkpoint.read_metadata(path)["clock"]
                return int(clock["images"]), float(clock.get("seconds", 0.0))
            except (checkpoint.CorruptCheckpoint, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0, 0.0

    def read_run_config(self) -> dict[str, Any] | None:
        """The plain run.yaml, or None in a folder that has none."""
        path = self.path / "run.yaml"
        return read_yaml(path) if path.exists() else None

    def lock(self) -> bool:
        """Own the folder, until this process ends, however it ends. False if somebody else does."""
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
        return (self.path / ".lock").read_text() or "another process"

    def release(self) -> None:
        if self._lock:
            self._lock.close()
        self._lock = None

    def write_members(self, addresses: Mapping[int, tuple[str, int]], fingerprint: str) -> None:
        """Where the ranks of a run that can lose some listen for those who come back, and what they train on."""
        atomic_write_bytes(self.path / "members.json", json.dumps({"members": addresses, "data": fingerprint}).encode())

    def read_members(self) -> tuple[dict[int, tuple[str, int]], str]:
        """What was last written there; nobody where there is nothing to read."""
        try:
            about = json.loads((self.path / "members.json").read_text())
            return {int(r): (str(host), int(port)) for r, (host, port) in about["members"].items()}, str(about["data"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, ""

    def write_run_config(self, run: Run) -> None:
        atomic_write_bytes(self.path / "run.yaml", to_yaml(to_saved_dict(run)).encode())


def select_run_dir(request: RunDirRequest, run: Run, ranks: int, start_check: StartCheck = no_check) -> RunDir:
    """The folder for this run, locked: a given one, the newest unfinished one of the same record, or a new one.

    Nothing is made for a run that could not begin: ready refuses one.
    """
    if request.run_dir:
        return _open_requested(request.run_dir, request.resume, run, start_check)
    paths = _list_numbered_dirs(request.outdir)[::-1] if request.resume == "auto" else []
    begun = [(folder, former) for folder in map(RunDir, paths) if (former := _previous_run(folder, run))]
    for folder, _ in begun:
        if _is_unfinished(folder, run) and folder.lock():
            return folder
    new = _create_numbered_dir(request.outdir, run, ranks, start_check)
    done = (folder for folder, former in begun if folder.trained_images >= min(run.total_images, former.total_images))
    new.completed_duplicate = next(done, None)
    return new


def select_shared_run_dir(
    request: RunDirRequest, run: Run, is_finished: Callable[[Path], bool], start_check: StartCheck = no_check
) -> RunDir:
    """The folder of a run in which any number of processes work at once, and which none of them owns: a given one, the
    newest unfinished one of the same record, or a new one. Processes that look for one at the same moment find the
    same."""
    path = request.run_dir
    if path:
        former = RunDir(path).read_run_config()
        if former is None and path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
            former = RunDir(path).read_run_config()  # another process may have begun it since
            if former is None:
                raise UsageError(f"{path} has files in it but no run.yaml: give an empty or a new folder as --run-dir")
        if former is not None and request.resume == "never":
            raise UsageError(f"{path} holds a run already; --resume never needs another --run-dir")
        check_same_run(former or _create_or_read_config(path, run, start_check), run, path)
        return RunDir(path)
    if request.resume == "auto":
        for there in _list_numbered_dirs(request.outdir)[::-1]:
            former = RunDir(there).read_run_config()
            if former is not None and not config_changes(former, run) and not is_finished(there):
                return RunDir(there)
    begun = [
        p for p in _list_numbered_dirs(request.outdir) if (p / "run.yaml").exists()
    ]  # one without may be ours in a moment
    number = max((int(m[1]) for p in begun if (m := NUMBERED_DIR.match(p.name))), default=-1) + 1
    while config_changes(
        _create_or_read_config(path := request.outdir / _dir_name(number, run), run, start_check), run
    ):
        number += 1
    return RunDir(path)


def _create_or_read_config(path: Path, run: Run, start_check: StartCheck) -> dict[str, Any]:
    """The record in a folder: this run's, unless another process was faster."""
    start_check()
    try:
        path.mkdir(parents=True, exist_ok=True)
        create_exclusive(path / "run.yaml", to_yaml(to_saved_dict(run)).encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another --run-dir or --outdir") from error
    return RunDir(path).read_run_config() or {}


def find_live_runs(request: RunDirRequest) -> list[tuple[RunDir, dict[int, tuple[str, int]], str]]:
    """Folders whose ranks said where they listen, newest first: with their addresses and the data's fingerprint."""
    paths = (
        [request.run_dir]
        if request.run_dir
        else _list_numbered_dirs(request.outdir)[::-1]
        if request.resume == "auto"
        else []
    )
    return [(folder, *folder.read_members()) for folder in map(RunDir, paths) if folder.read_members()[0]]


def _open_requested(path: Path, resume: str, run: Run, start_check: StartCheck) -> RunDir:
    folder = RunDir(path)
    former = folder.read_run_config()
    if former is None and path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
        raise UsageError(f"{path} has files in it but no run.yaml: give an empty or a new folder as --run-dir")
    if former is None:
        start_check()
    if former is not None and resume == "never":
        raise UsageError(f"{path} holds a run already; --resume never needs another --run-dir")
    if former is not None:
        check_same_run(former, run, path)
    try:
        locked = folder.lock()
    except OSError as error:
        raise UsageError(f"--run-dir {path} cannot be written: {error.strerror}") from error
    if not locked:
        raise UsageError(f"{path} is being written by {folder.lock_owner()}: stop that run, or give another --run-dir")
    return folder


def _previous_run(run_dir: RunDir, run: Run) -> Run | None:
    """This run as it was begun in a folder; None where another was, or none."""
    with contextlib.suppress(UsageError):
        former = run_dir.read_run_config()
        return None if former is None or config_changes(former, run) else from_dict(Run, former)
    return None


def _is_unfinished(run_dir: RunDir, run: Run) -> bool:
    """Whether this run was begun in a folder, and lacks images or its last scores. One that is already beyond what is
    asked for now, and was to go further, is another's."""
    begun, seen = _previous_run(run_dir, run), run_dir.trained_images
    if begun is None or run.total_images < min(seen, begun.total_images):
        return False
    scored = not begun.evaluation.metrics or any(
        row.get("kimg") == seen / 1000 for row in read_jsonl(run_dir.path / "metrics.jsonl")
    )
    return seen < begun.total_images or not scored


def previous_layout(request: RunDirRequest, run: Run) -> tuple[Path | None, dict[str, Any]]:
    """Where this run was begun, and with which layout, whatever its own is; nothing where it was not begun."""
    paths = [request.run_dir] if request.run_dir else _list_numbered_dirs(request.outdir)[::-1]
    for folder in map(RunDir, paths if request.resume != "never" else []):
        with contextlib.suppress(UsageError):
            former = folder.read_run_config()
            if former is None or any(name not in TUNED_FIELDS for name, *_ in config_changes(former, run)):
                continue
            begun = from_dict(Run, former)
            fields = {
                name: get_field(begun, name)
                for name in TUNED_FIELDS
                if _has_field(begun, name) and _has_field(run, name)
            }
            if request.run_dir or _is_unfinished(folder, replace_fields(run, fields)):
                return folder.path, fields
    return None, {}


def check_run_dir(request: RunDirRequest, run: Run) -> None:
    """Unusable where the folder that is given cannot take this run, whatever strategy is chosen for it."""
    if not request.run_dir or not request.run_dir.is_dir():
        return
    if former := RunDir(request.run_dir).read_run_config():
        begun = from_dict(Run, former)
        run = fill_strategy_defaults(replace(run, strategy=begun.strategy, auto_choice=begun.auto_choice))
    _open_requested(request.run_dir, request.resume, run, no_check).release()
    if former and not run.auto_choice.ranks:
        name = run.strategy.name
        raise UsageError(f"{request.run_dir} was begun with --strategy {name}: repeat it, or give another --run-dir")


def previous_auto_run(request: RunDirRequest, run: Run) -> Run | None:
    """This run, whose strategy is left open, as it was begun before; None where it was not."""
    paths = [request.run_dir] if request.run_dir else _list_numbered_dirs(request.outdir)[::-1]
    for folder in map(RunDir, paths if request.resume != "never" else []):
        with contextlib.suppress(UsageError):
            former = folder.read_run_config()
            begun = from_dict(Run, former) if former else None
            if former is None or begun is None or not begun.auto_choice.ranks:
                continue
            trial = fill_strategy_defaults(
                replace(run, strategy=begun.strategy, auto_choice=begun.auto_choice, reasons=begun.reasons)
            )
            if not config_changes(former, trial) and (request.run_dir or _is_unfinished(folder, trial)):
                return trial
    return None


def _has_field(run: Run, name: str) -> bool:
    try:
        get_field(run, name)
    except AttributeError:
        return False
    return True


def config_changes(previous: dict[str, Any], run: Run) -> list[tuple[str, Any, Any]]:
    """The fields in which a run differs from the one of a record, but for those that may. What an older paragan did
    not know has its default."""
    with contextlib.suppress(UsageError):
        previous = to_saved_dict(fill_strategy_defaults(from_dict(Run, previous)))
    found = [d for d in diff(previous, to_saved_dict(run)) if not may_change_on_resume(d[0])]
    planned = (
        previous.get("auto_choice", {}).get("ranks") and run.auto_choice.ranks
    )  # another form of the same strategy may be chosen for other ranks
    return [d for d in found if not (planned and d[0].startswith("strategy.") and d[0] != "strategy.name")]


def check_same_run(previous: dict[str, Any], run: Run, path: Path) -> None:
    found = config_changes(previous, run)
    if found:
        listed = "; ".join(f"{name} was {a!r}, is {b!r}" for name, a, b in found[:8])
        raise UsageError(f"{path} holds another run: {listed}. Repeat its settings, or give another --run-dir")


def _list_numbered_dirs(outdir: Path) -> list[Path]:
    return (
        sorted(p for p in outdir.glob("[0-9]*-*") if p.is_dir() and NUMBERED_DIR.match(p.name))
        if outdir.is_dir()
        else []
    )


def _create_numbered_dir(outdir: Path, run: Run, ranks: int, start_check: StartCheck) -> RunDir:
    start_check()
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--outdir {outdir} cannot be written: {error.strerror}") from error
    there = [int(match[1]) for p in _list_numbered_dirs(outdir) if (match := NUMBERED_DIR.match(p.name))]
    number = max(there, default=-1) + 1
    while True:
        folder = RunDir(outdir / _dir_name(number, run, ranks))
        try:
            folder.path.mkdir()
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise UsageError(f"--outdir {outdir} cannot be written: {error.strerror}") from error
        folder.lock()
        return folder


def _dir_name(number: int, run: Run, ranks: int = 0) -> str:
    """00000-digits-dcgan-sync-r1-b128; without ranks where any number of workers may come and go."""
    several = f"-r{ranks}" if ranks else ""
    nets = run.nets.name.replace(":", ".")  # MODULE:CLASS
    return f"{number:05d}-{run.recipe}-{nets}-{_strategy_slug(run)}{several}-b{run.batch}"


def _strategy_slug(run: Run) -> str:
    """The strategy, with its wire where that loses something: sync-int4."""
    wire = run.strategy.wire
    return f"{run.strategy.name}-{wire.name.rpartition(':')[2]}" if wire.lossy else run.strategy.name


def require_run_dir(path: Path) -> Path:
    """A run folder that is there, for `sample`, `eval`, `report` and --resume."""
    if (path / "run.yaml").exists():
        return path
    if not path.exists():
        beside = [str(p.parent) for p in sorted(path.parent.glob("*/run.yaml"))][-9:]
        hint = did_you_mean(str(path), beside) if beside else ""
        raise UsageError(f"{path} does not exist{hint}")
    inside = [str(p.parent) for p in sorted(path.glob("*/run.yaml"))]
    hint = f"; there are runs in it: {', '.join(inside[-3:])}" if inside else ""
    raise UsageError(f"{path} is no run folder (it has no run.yaml){hint}")


def resolve_scored_run(path: Path, data: str | None) -> tuple[Path, Run]:
    """A folder whose model can be scored, and the run that says against what: a run folder; or a model folder, such as
    one that was imported, with the data it is to be scored against."""
    if (path / "run.yaml").exists() or not (path / "model.safetensors").exists():
        folder = require_run_dir(path)
        return folder, load_without_user_code(read_yaml(folder / "run.yaml"))
    if not data:
        raise UsageError(f"{path} is a model without its run: say what it is to be scored against, --data PATH")
    config = read_model_config(path)
    with wrap_config_errors(path):
        spec = from_dict(Spec, config["spec"])
        whole = from_dict(DataOptions, {"path": data, "resolution": spec.resolution, "channels": spec.channels})
    return path, Run(recipe=str(config.get("recipe", "custom")), data=replace(whole, labels=spec.classes > 0))
