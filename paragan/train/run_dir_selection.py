"""Select the folder of a run: the named one, an unfinished one of the same run, or a new one.

Two records are of the same run if they differ only in fields that may change on resume: how long, where, and what is
written. Paths of data and models may differ if what lies there has the same fingerprint.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paragan.comm.elastic.kv_store import ServerAddress
from paragan.config.resolve import fill_strategy_defaults
from paragan.config.run import Run, may_change_on_resume, may_differ_when_joining, to_saved_dict
from paragan.config.sections import DataOptions, InputFingerprints
from paragan.core.atomic_write import create_exclusive
from paragan.core.errors import UsageError
from paragan.core.jsonl import read_jsonl
from paragan.core.schema import diff, from_dict, get_field, replace_fields, to_yaml
from paragan.train.members_file import read_members
from paragan.train.run_dir import RunDir
from paragan.train.saved_run import require_current_format, wrap_run_errors

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
    address : where the folder lies in an object store; `run_dir` is its copy on this machine
    resume  : "auto" continues an unfinished folder of the same run, "never" always creates a new one
    """

    outdir: Path = Path("runs")
    run_dir: Path | None = None
    resume: str = "auto"
    address: str = ""

    def candidates(self) -> list[RunDir]:
        """Return the folders that may hold the run to resume: the named one, or the numbered ones, newest first."""
        if self.run_dir:
            return [RunDir(self.run_dir)]
        return [RunDir(path) for path in reversed(_list_numbered_dirs(self.outdir))]


def no_check() -> None:
    """Accept every run: the default `StartCheck`."""


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
        raise unwritable_error(path, error) from error
    return RunDir(path).read_run_config() or {}


def unwritable_error(path: Path, error: OSError) -> UsageError:
    """Return the error for the folder of a run in which a file cannot be written."""
    return UsageError(f"{path}: cannot be written ({error.strerror}). Use another --run-dir or --outdir")


def find_live_runs(request: RunDirRequest) -> list[tuple[RunDir, dict[int, ServerAddress], str]]:
    """Return the folders whose ranks listen for others, newest first: (folder, addresses by rank, data fingerprint)."""
    if not request.run_dir and request.resume != "auto":
        return []
    rows = [(run_dir, *read_members(run_dir.path)) for run_dir in request.candidates()]
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


def config_changes(
    previous: dict[str, Any], run: Run, may_differ: Callable[[str], bool] = may_change_on_resume
) -> list[tuple[str, Any, Any]]:
    """Return the fields that make a run another one than that of a record: (name, value there, value now)."""
    with contextlib.suppress(UsageError):
        previous = to_saved_dict(fill_strategy_defaults(from_dict(Run, previous)))
    changes = [change for change in diff(previous, to_saved_dict(run)) if not may_differ(change[0])]
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


def check_same_settings(previous: dict[str, Any], run: Run, path: Path) -> None:
    """Raise UsageError if a rank cannot join others that train the run of a record, and name the fields that differ."""
    check_same_run(previous, run, path)
    changes = config_changes(previous, run, may_differ_when_joining)
    if changes:
        listed = "; ".join(f"{name} is {first!r}, not {value!r}" for name, first, value in changes[:8])
        raise UsageError(
            f"{path}: other ranks train it with other settings: {listed}. Use the command that started them"
        )


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
