"""`paragan eval --follow`: what the command line says of it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import (
    add_command,
    add_nets_option,
    check_no_extra_arguments,
    check_seed,
    check_truncation,
    run_in_world,
    select_device,
)
from paragan.core.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.train.console import RunConsole


def add_follow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="score models as they appear in a run, until it is complete"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="end when the run shows nothing new for S s (600)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: as the run says)")


def follow(options: argparse.Namespace, folder: Path, run: Run, evaluation: Any) -> int:
    """Score models as they appear. Status 0 when the run is complete, 1 where it stopped, 3 on a signal."""
    from paragan.comm.world import LaunchInfo
    from paragan.config.resolve import load_dataset
    from paragan.report.page import write_report
    from paragan.train.async_eval import RunFollower
    from paragan.train.callbacks.best_model import resolve_best_metric
    from paragan.train.callbacks.scoring import check_evaluation, make_feature_space
    from paragan.train.console import RunConsole

    _check_follow_options(options, LaunchInfo.from_environment().size)
    device, screen = select_device(options.device, run.device.kind), RunConsole()
    if not evaluation.metrics:
        raise UsageError("this run measures no scores: say which, --metrics fd,kid")
    images = load_dataset(run)
    check_evaluation(evaluation, images)
    space = make_feature_space(evaluation, images)
    best = "" if run.evaluation.metrics else resolve_best_metric(run.output.best_metric, evaluation.metrics, space)
    with _signals_as_interrupted(), _follow_lock(folder):
        number = RunFollower(folder, run, images, evaluation, device, screen, options.patience, best, options.nets)()
    write_report(folder)
    screen.print(f"{folder} is complete and scored ({number} models by this command); look at {folder}/report.html")
    return 0


def _check_follow_options(options: argparse.Namespace, ranks: int) -> None:
    if ranks > 1:
        raise UsageError("--follow is one process: start it without a launcher")
    if options.truncation != "1" or options.seed is not None or options.data:
        raise UsageError("--follow measures as the run does: leave --truncation, --seed and --data out")
    if not options.patience >= 0:
        raise UsageError(f"--patience {options.patience} must be 0 or more")


@contextlib.contextmanager
def _follow_lock(folder: Path) -> Iterator[None]:
    """No other process follows this run meanwhile: both would score the same models."""
    with (folder / ".follow").open("a") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder} is followed by another process already: stop that one first") from error
        yield


@contextlib.contextmanager
def _signals_as_interrupted() -> Iterator[None]:
    from paragan.train.shutdown import exit_on_signal

    try:
        with exit_on_signal():
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error).partition(" ")[0] or "SIGINT") from error


SUMMARY = "score a trained model against its data"


HELP = """Scores are added to RUN_DIR/metrics.jsonl, each with how it was measured.

Metrics: fd, kid, prdc in any space; is, is1 (1 split) where there is a classifier; fid, fid50k_full, kid50k_full,
is50k, pr50k3_full, intra_fid with --features inception; class by class intra_fd, and with --features resnet20, a
classifier of the data that is trained once, accuracy and cas. docs/scores.md says what they are.
"""


def add_eval_command(commands: Any) -> None:
    """Add `eval`."""
    p = add_command(commands, "eval", _eval, SUMMARY, more=HELP)
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
    add_follow_options(p)
    add_nets_option(p)


def _eval(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.comm.world import LaunchInfo
    from paragan.config.sections import EvaluationOptions
    from paragan.core.schema import from_dict, to_dict
    from paragan.train.callbacks.scoring import sweep_truncations
    from paragan.train.run_dir import resolve_scored_run

    check_no_extra_arguments(rest)
    truncations = _parse_truncations(options.truncation)
    if options.seed is not None:
        check_seed(options.seed)
    folder, run = resolve_scored_run(Path(options.run_dir), options.data)
    seed = run.seed if options.seed is None else options.seed
    evaluation = from_dict(EvaluationOptions, _evaluation_fields(options, to_dict(run.evaluation)))
    if options.follow:
        return follow(options, folder, run, evaluation)

    def action(world: World, console: RunConsole) -> None:
        sweep_truncations(folder, run, evaluation, world, console, options.data, truncations, seed, options.nets)

    return run_in_world(run, LaunchInfo.from_environment(), action, device=options.device)


def _evaluation_fields(options: argparse.Namespace, recorded: dict[str, Any]) -> dict[str, Any]:
    """What the run is scored by, as it says itself unless something else is asked for."""
    from paragan.eval.metrics import get_metric, num_fakes

    names = ("count", "features", "inception", "reference")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    metrics = options.metrics.split(",") if options.metrics else recorded["metrics"]
    if "count" not in asked and any(get_metric(name).required_fakes for name in metrics):
        asked["count"] = num_fakes(metrics)
    if "features" not in asked and recorded["features"] == "pixels":
        asked |= _features_for(metrics) if options.metrics else {}
    if "features" not in asked and ":" in recorded["features"]:
        own = recorded["features"]
        raise UsageError(f"this run is scored by code of your own, which no file runs: give it, --features {own}")
    return recorded | asked | {"metrics": metrics}


def _features_for(metrics: list[str]) -> dict[str, str]:
    """The space in which metrics are defined that pixels have not."""
    if any(name.startswith(("fid", "intra_fid", "is")) or "50k" in name for name in metrics):
        return {"features": "inception"}
    return {"features": "resnet20"} if {"accuracy", "cas"} & {*metrics} else {}


def _parse_truncations(text: str) -> list[float]:
    """0.4,0.6,1.0 -> numbers, each checked."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--truncation {text} is no number, nor several: 0.5 or 0.4,0.6,1") from None
    for one in found:
        check_truncation(one)
    return list(dict.fromkeys(found))
