"""`paragan eval --follow`: what the command line says of it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paragan.cli.common import _check_seed, _check_truncation, _command, _in_world, _nothing_left, _own_nets, device_of
from paragan.core.errors import Interrupted, Unusable


def follow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="score models as they appear in a run, until it is complete"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="end when the run shows nothing new for S s (600)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: as the run says)")


def follow(options: argparse.Namespace, folder: Path, run: Any, wanted: Any) -> int:
    """Score models as they appear. Status 0 when the run is complete, 1 where it stopped, 3 on a signal."""
    from paragan.comm.world import Place
    from paragan.config.resolve import load_images
    from paragan.report.page import write_report
    from paragan.train.async_eval import Follow
    from paragan.train.callbacks.best_model import chosen
    from paragan.train.callbacks.scoring import check, feature_space
    from paragan.train.console import Screen

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
    from paragan.train.shutdown import at_once

    try:
        with at_once():
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error).partition(" ")[0] or "SIGINT") from error


ABOUT = "score a trained model against its data"


HELP = """Scores are added to RUN_DIR/metrics.jsonl, each with how it was measured.

Metrics: fd, kid, prdc in any space; is, is1 (1 split) where there is a classifier; fid, fid50k_full, kid50k_full,
is50k, pr50k3_full, intra_fid with --features inception; class by class intra_fd, and with --features resnet20, a
classifier of the data that is trained once, accuracy and cas. docs/scores.md says what they are.
"""


def eval_parser(commands: Any) -> None:
    """Add `eval`."""
    p = _command(commands, "eval", _eval, ABOUT, more=HELP)
    p.add_argument("run_dir", metavar="RUN_DIR", help="a run folder; or a model folder, with --data")
    p.add_argument("--metrics", metavar="fd,kid,prdc", help="which scores (default: as the run says)")
    p.add_argument("--count", type=int, metavar="N", help="how many fakes (default: as the run says)")
    p.add_argument(
        "--features", metavar="SPACE", help="pixels, inception, resnet20 or module:callable (default: as the run says)"
    )
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    p.add_argument("--reference", metavar="FILE.npz", help="compare with its mu and sigma, not with the data")
    p.add_argument("--data", metavar="PATH", help="other reals than those the run was trained on")
    p.add_argument("--truncation", default="1", metavar="PSI,PSI", help="one or several; below 1: less variety (1)")
    p.add_argument("--seed", type=int, metavar="N", help="of the latents (default: the run's)")
    follow_options(p)
    _own_nets(p)


def _eval(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.comm.world import Place
    from paragan.config.sections import Evaluation
    from paragan.core.schema import build, plain
    from paragan.train.callbacks.scoring import sweep
    from paragan.train.run_dir import scorable

    _nothing_left(rest)
    truncations = _truncations(options.truncation)
    if options.seed is not None:
        _check_seed(options.seed)
    folder, run = scorable(Path(options.run_dir), options.data)
    seed = run.seed if options.seed is None else options.seed
    evaluation = build(Evaluation, _wanted(options, plain(run.evaluation)))
    if options.follow:
        return follow(options, folder, run, evaluation)

    def action(world: Any, screen: Any) -> None:
        sweep(folder, run, evaluation, world, screen, options.data, truncations, seed, options.nets)

    return _in_world(run, Place.from_environment(), action, device=options.device)


def _wanted(options: argparse.Namespace, recorded: dict[str, Any]) -> dict[str, Any]:
    """What the run is scored by, as it says itself unless something else is asked for."""
    from paragan.eval.metrics import metric_named, number_of_fakes

    names = ("count", "features", "inception", "reference")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    metrics = options.metrics.split(",") if options.metrics else recorded["metrics"]
    if "count" not in asked and any(metric_named(name).promised for name in metrics):
        asked["count"] = number_of_fakes(metrics)
    if "features" not in asked and recorded["features"] == "pixels":
        asked |= _features_for(metrics) if options.metrics else {}
    if "features" not in asked and ":" in recorded["features"]:
        own = recorded["features"]
        raise Unusable(f"this run is scored by code of your own, which no file runs: give it, --features {own}")
    return recorded | asked | {"metrics": metrics}


def _features_for(metrics: list[str]) -> dict[str, str]:
    """The space in which metrics are defined that pixels have not."""
    if any(name.startswith(("fid", "intra_fid", "is")) or "50k" in name for name in metrics):
        return {"features": "inception"}
    return {"features": "resnet20"} if {"accuracy", "cas"} & {*metrics} else {}


def _truncations(text: str) -> list[float]:
    """0.4,0.6,1.0 -> numbers, each checked."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise Unusable(f"--truncation {text} is no number, nor several: 0.5 or 0.4,0.6,1") from None
    for one in found:
        _check_truncation(one)
    return list(dict.fromkeys(found))
