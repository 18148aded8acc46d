"""`paragan eval --follow`: what the command line says of it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import Interrupted, Unusable


def follow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="score models as they appear in a run, until it is complete"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="end when the run shows nothing new for S s (600)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: as the run says)")


def device_of(name: str | None, kind: str) -> Any:
    """The device a command asks for, or the run's."""
    from .devices import KINDS, pick_device

    if name is None:
        return pick_device(kind)
    word, colon, number = name.partition(":")
    if word not in KINDS or (colon and not (word == "cuda" and number.isdecimal())):
        raise Unusable(f"--device {name} is none of cpu, cuda, cuda:1, mps")
    if not KINDS[word].there():
        raise Unusable(f"--device {name}: torch sees no {word.upper()} device here; use --device cpu")
    return pick_device(word, int(number or 0))


def follow(options: argparse.Namespace, folder: Path, run: Any, wanted: Any) -> int:
    """Score models as they appear. Status 0 when the run is complete, 1 where it stopped, 3 on a signal."""
    from .comm.world import Place
    from .report.page import write_report
    from .train.best import chosen
    from .train.follow import Follow
    from .train.progress import Screen
    from .train.run import load_images
    from .train.scoring import check, feature_space

    _refuse(options, Place.from_environment().size)
    device, screen = device_of(options.device, run.device.kind), Screen()
    if not wanted.metrics:
        raise Unusable("this run measures no scores: say which, --metrics fd,kid")
    images = load_images(run)
    check(wanted, images)
    space = feature_space(wanted, images)
    best = "" if run.evaluation.metrics else chosen(run.output.best, wanted.metrics, space)
    with _stoppable(), _alone(folder):
        number = Follow(folder, run, images, wanted, device, screen, options.patience, best, options.nets)()
    write_report(folder)
    screen.say(f"{folder} is complete and scored ({number} models by this command); look at {folder}/report.html")
    return 0


def _refuse(options: argparse.Namespace, ranks: int) -> None:
    if ranks > 1:
        raise Unusable("--follow is one process: start it without a launcher")
    if options.truncation != "1" or options.seed is not None or options.data:
        raise Unusable("--follow measures as the run does: leave --truncation, --seed and --data out")
    if not options.patience >= 0:
        raise Unusable(f"--patience {options.patience} must be 0 or more")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process follows this run meanwhile: both would score the same models."""
    with (folder / ".follow").open("a") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unusable(f"{folder} is followed by another process already: stop that one first") from error
        yield


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    from .train.stop import at_once

    try:
        with at_once():
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error).partition(" ")[0] or "SIGINT") from error
