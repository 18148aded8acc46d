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

from paragan.config.resolve import settled
from paragan.config.run import Run, differing, without_code, written
from paragan.config.sections import Data
from paragan.core.atomic_write import create_once, write_whole
from paragan.core.errors import Unusable
from paragan.core.jsonl import read
from paragan.core.schema import build, differences, field_of, nearest, read_yaml, to_yaml, with_fields
from paragan.models.model import reading
from paragan.models.model_files import read_config
from paragan.nets import Spec
from paragan.train import checkpoint

Ready = Callable[[], object]
NUMBERED = re.compile(r"(\d{5,})-")
LAYOUT = (  # what `device.layout=measured` decides
    *("device.precision", "device.channels_last", "device.compile", "device.threads", "device.one_call"),
    *("device.merge", "device.graph", "device.pad_channels", "device.huge_pages"),
    *("nets.rewritten", "g.optimizer.fused", "d.optimizer.fused"),
)


@dataclass(frozen=True)
class Wanted:
    """What the command line says about where to write and what to go on from."""

    outdir: Path = Path("runs")
    run_dir: Path | None = None
    resume: str = "auto"


def nothing() -> None:
    """Of a run that could begin."""


class RunFolder:
    """A folder this process owns until it ends: one run at a time writes there."""

    def __init__(self, path: Path):
        self.path = path
        self.finished: RunFolder | None = None  # another, in which the same run is complete
        self._lock: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def images_seen(self) -> int:
        """How far the run in this folder has come."""
        return self.reached[0]

    @property
    def reached(self) -> tuple[int, float]:
        """Images seen, and seconds of training, by its newest readable checkpoint."""
        for path in checkpoint.complete(self.checkpoints):
            try:
                clock = checkpoint.read_about(path)["clock"]
                return int(clock["images"]), float(clock.get("seconds", 0.0))
            except (checkpoint.Damaged, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0, 0.0

    def record(self) -> dict[str, Any] | None:
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

    def owner(self) -> str:
        return (self.path / ".lock").read_text() or "another process"

    def release(self) -> None:
        if self._lock:
            self._lock.close()
        self._lock = None

    def write_members(self, addresses: Mapping[int, tuple[str, int]], data: str) -> None:
        """Where the ranks of a run that can lose some listen for those who come back, and what they train on."""
        write_whole(self.path / "members.json", json.dumps({"members": addresses, "data": data}).encode())

    def members(self) -> tuple[dict[int, tuple[str, int]], str]:
        """What was last written there; nobody where there is nothing to read."""
        try:
            about = json.loads((self.path / "members.json").read_text())
            return {int(r): (str(host), int(port)) for r, (host, port) in about["members"].items()}, str(about["data"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, ""

    def write_record(self, run: Run) -> None:
        write_whole(self.path / "run.yaml", to_yaml(written(run)).encode())


def choose(wanted: Wanted, run: Run, ranks: int, ready: Ready = nothing) -> RunFolder:
    """The folder for this run, locked: a given one, the newest unfinished one of the same record, or a new one.

    Nothing is made for a run that could not begin: ready refuses one.
    """
    if wanted.run_dir:
        return _given(wanted.run_dir, wanted.resume, run, ready)
    paths = _numbered(wanted.outdir)[::-1] if wanted.resume == "auto" else []
    begun = [(folder, former) for folder in map(RunFolder, paths) if (former := _asked_before(folder, run))]
    for folder, _ in begun:
        if _unfinished(folder, run) and folder.lock():
            return folder
    new = _new(wanted.outdir, run, ranks, ready)
    done = (folder for folder, former in begun if folder.images_seen >= min(run.images, former.images))
    new.finished = next(done, None)
    return new


def join(wanted: Wanted, run: Run, finished: Callable[[Path], bool], ready: Ready = nothing) -> RunFolder:
    """The folder of a run in which any number of processes work at once, and which none of them owns: a given one, the
    newest unfinished one of the same record, or a new one. Processes that look for one at the same moment find the
    same."""
    path = wanted.run_dir
    if path:
        former = RunFolder(path).record()
        if former is None and path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
            former = RunFolder(path).record()  # another process may have begun it since
            if former is None:
                raise Unusable(f"{path} has files in it but no run.yaml: give an empty or a new folder as --run-dir")
        if former is not None and wanted.resume == "never":
            raise Unusable(f"{path} holds a run already; --resume never needs another --run-dir")
        refuse_differences(former or _begun(path, run, ready), run, path)
        return RunFolder(path)
    if wanted.resume == "auto":
        for there in _numbered(wanted.outdir)[::-1]:
            former = RunFolder(there).record()
            if former is not None and not changed(former, run) and not finished(there):
                return RunFolder(there)
    begun = [p for p in _numbered(wanted.outdir) if (p / "run.yaml").exists()]  # one without may be ours in a moment
    number = max((int(m[1]) for p in begun if (m := NUMBERED.match(p.name))), default=-1) + 1
    while changed(_begun(path := wanted.outdir / _name(number, run), run, ready), run):
        number += 1
    return RunFolder(path)


def _begun(path: Path, run: Run, ready: Ready) -> dict[str, Any]:
    """The record in a folder: this run's, unless another process was faster."""
    ready()
    try:
        path.mkdir(parents=True, exist_ok=True)
        create_once(path / "run.yaml", to_yaml(written(run)).encode())
    except OSError as error:
        raise Unusable(f"{path} cannot be written: {error.strerror}; give another --run-dir or --outdir") from error
    return RunFolder(path).record() or {}


def under_way(wanted: Wanted) -> list[tuple[RunFolder, dict[int, tuple[str, int]], str]]:
    """Folders whose ranks said where they listen, newest first: with their addresses and the data's fingerprint."""
    paths = [wanted.run_dir] if wanted.run_dir else _numbered(wanted.outdir)[::-1] if wanted.resume == "auto" else []
    return [(folder, *folder.members()) for folder in map(RunFolder, paths) if folder.members()[0]]


def _given(path: Path, resume: str, run: Run, ready: Ready) -> RunFolder:
    folder = RunFolder(path)
    former = folder.record()
    if former is None and path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
        raise Unusable(f"{path} has files in it but no run.yaml: give an empty or a new folder as --run-dir")
    if former is None:
        ready()
    if former is not None and resume == "never":
        raise Unusable(f"{path} holds a run already; --resume never needs another --run-dir")
    if former is not None:
        refuse_differences(former, run, path)
    try:
        locked = folder.lock()
    except OSError as error:
        raise Unusable(f"--run-dir {path} cannot be written: {error.strerror}") from error
    if not locked:
        raise Unusable(f"{path} is being written by {folder.owner()}: stop that run, or give another --run-dir")
    return folder


def _asked_before(folder: RunFolder, run: Run) -> Run | None:
    """This run as it was begun in a folder; None where another was, or none."""
    with contextlib.suppress(Unusable):
        former = folder.record()
        return None if former is None or changed(former, run) else build(Run, former)
    return None


def _unfinished(folder: RunFolder, run: Run) -> bool:
    """Whether this run was begun in a folder, and lacks images or its last scores. One that is already beyond what is
    asked for now, and was to go further, is another's."""
    begun, seen = _asked_before(folder, run), folder.images_seen
    if begun is None or run.images < min(seen, begun.images):
        return False
    scored = not begun.evaluation.metrics or any(
        row.get("kimg") == seen / 1000 for row in read(folder.path / "metrics.jsonl")
    )
    return seen < begun.images or not scored


def layout_before(wanted: Wanted, run: Run) -> tuple[Path | None, dict[str, Any]]:
    """Where this run was begun, and with which layout, whatever its own is; nothing where it was not begun."""
    paths = [wanted.run_dir] if wanted.run_dir else _numbered(wanted.outdir)[::-1]
    for folder in map(RunFolder, paths if wanted.resume != "never" else []):
        with contextlib.suppress(Unusable):
            former = folder.record()
            if former is None or any(name not in LAYOUT for name, *_ in changed(former, run)):
                continue
            begun = build(Run, former)
            fields = {name: field_of(begun, name) for name in LAYOUT if _has(begun, name) and _has(run, name)}
            if wanted.run_dir or _unfinished(folder, with_fields(run, fields)):
                return folder.path, fields
    return None, {}


def refuse_given(wanted: Wanted, run: Run) -> None:
    """Unusable where the folder that is given cannot take this run, whatever strategy is chosen for it."""
    if not wanted.run_dir or not wanted.run_dir.is_dir():
        return
    if former := RunFolder(wanted.run_dir).record():
        begun = build(Run, former)
        run = settled(replace(run, strategy=begun.strategy, chosen=begun.chosen))
    _given(wanted.run_dir, wanted.resume, run, nothing).release()
    if former and not run.chosen.ranks:
        name = run.strategy.name
        raise Unusable(f"{wanted.run_dir} was begun with --strategy {name}: repeat it, or give another --run-dir")


def begun_as(wanted: Wanted, run: Run) -> Run | None:
    """This run, whose strategy is left open, as it was begun before; None where it was not."""
    paths = [wanted.run_dir] if wanted.run_dir else _numbered(wanted.outdir)[::-1]
    for folder in map(RunFolder, paths if wanted.resume != "never" else []):
        with contextlib.suppress(Unusable):
            former = folder.record()
            begun = build(Run, former) if former else None
            if former is None or begun is None or not begun.chosen.ranks:
                continue
            trial = settled(replace(run, strategy=begun.strategy, chosen=begun.chosen, about=begun.about))
            if not changed(former, trial) and (wanted.run_dir or _unfinished(folder, trial)):
                return trial
    return None


def _has(run: Run, name: str) -> bool:
    try:
        field_of(run, name)
    except AttributeError:
        return False
    return True


def changed(former: dict[str, Any], run: Run) -> list[tuple[str, Any, Any]]:
    """The fields in which a run differs from the one of a record, but for those that may. What an older paragan did
    not know has its default."""
    with contextlib.suppress(Unusable):
        former = written(settled(build(Run, former)))
    found = [d for d in differences(former, written(run)) if not differing(d[0])]
    planned = (
        former.get("chosen", {}).get("ranks") and run.chosen.ranks
    )  # another form of the same strategy may be chosen for other ranks
    return [d for d in found if not (planned and d[0].startswith("strategy.") and d[0] != "strategy.name")]


def refuse_differences(former: dict[str, Any], run: Run, path: Path) -> None:
    found = changed(former, run)
    if found:
        listed = "; ".join(f"{name} was {a!r}, is {b!r}" for name, a, b in found[:8])
        raise Unusable(f"{path} holds another run: {listed}. Repeat its settings, or give another --run-dir")


def _numbered(outdir: Path) -> list[Path]:
    return (
        sorted(p for p in outdir.glob("[0-9]*-*") if p.is_dir() and NUMBERED.match(p.name)) if outdir.is_dir() else []
    )


def _new(outdir: Path, run: Run, ranks: int, ready: Ready) -> RunFolder:
    ready()
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"--outdir {outdir} cannot be written: {error.strerror}") from error
    there = [int(match[1]) for p in _numbered(outdir) if (match := NUMBERED.match(p.name))]
    number = max(there, default=-1) + 1
    while True:
        folder = RunFolder(outdir / _name(number, run, ranks))
        try:
            folder.path.mkdir()
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise Unusable(f"--outdir {outdir} cannot be written: {error.strerror}") from error
        folder.lock()
        return folder


def _name(number: int, run: Run, ranks: int = 0) -> str:
    """00000-digits-dcgan-sync-r1-b128; without ranks where any number of workers may come and go."""
    several = f"-r{ranks}" if ranks else ""
    nets = run.nets.name.replace(":", ".")  # MODULE:CLASS
    return f"{number:05d}-{run.recipe}-{nets}-{_how(run)}{several}-b{run.batch}"


def _how(run: Run) -> str:
    """The strategy, with its wire where that loses something: sync-int4."""
    wire = run.strategy.wire
    return f"{run.strategy.name}-{wire.name.rpartition(':')[2]}" if wire.lossy else run.strategy.name


def existing(path: Path) -> Path:
    """A run folder that is there, for `sample`, `eval`, `report` and --resume."""
    if (path / "run.yaml").exists():
        return path
    if not path.exists():
        beside = [str(p.parent) for p in sorted(path.parent.glob("*/run.yaml"))][-9:]
        hint = nearest(str(path), beside) if beside else ""
        raise Unusable(f"{path} does not exist{hint}")
    inside = [str(p.parent) for p in sorted(path.glob("*/run.yaml"))]
    hint = f"; there are runs in it: {', '.join(inside[-3:])}" if inside else ""
    raise Unusable(f"{path} is no run folder (it has no run.yaml){hint}")


def scorable(path: Path, data: str | None) -> tuple[Path, Run]:
    """A folder whose model can be scored, and the run that says against what: a run folder; or a model folder, such as
    one that was imported, with the data it is to be scored against."""
    if (path / "run.yaml").exists() or not (path / "model.safetensors").exists():
        folder = existing(path)
        return folder, without_code(read_yaml(folder / "run.yaml"))
    if not data:
        raise Unusable(f"{path} is a model without its run: say what it is to be scored against, --data PATH")
    config = read_config(path)
    with reading(path):
        spec = build(Spec, config["spec"])
        whole = build(Data, {"path": data, "resolution": spec.resolution, "channels": spec.channels})
    return path, Run(recipe=str(config.get("recipe", "custom")), data=replace(whole, labels=spec.classes > 0))
