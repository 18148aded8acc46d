"""`paragan eval`: score a model now, or with --follow the models of a run as they appear."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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


HELP = """Scores are appended to RUN_DIR/metrics.jsonl, each with its protocol.

Metrics: fd, kid and prdc in any feature space; is and is1 (1 split) with a classifier; fid, fid50k_full, kid50k_full,
is50k, pr50k3_full and intra_fid with --features inception; intra_fd by class; accuracy and cas with --features
resnet20, a classifier of the data that is trained once. docs/scores.md explains them.
"""


def add_eval_command(commands: Any) -> None:
    p = add_command(commands, "eval", _eval, "score a trained model against its data", details=HELP)
    p.add_argument("run_dir", metavar="RUN_DIR", help="a run folder; or a model folder, with --data")
    p.add_argument("--metrics", metavar="fd,kid,prdc", help="the scores to compute (default: those of the run)")
    p.add_argument("--count", type=int, metavar="N", help="number of fakes (default: as in the run)")
    p.add_argument(
        "--features", metavar="SPACE", help="pixels, inception, resnet20 or module:callable (default: as in the run)"
    )
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    p.add_argument("--reference", metavar="FILE.npz", help="compare with its mu and sigma instead of the data")
    p.add_argument(
        "--data", metavar="PATH", help="compare with other reals, or with those of the run where they lie now"
    )
    p.add_argument(
        "--truncation", default="1", metavar="PSI,PSI", help="one value or several; below 1: less variety (1)"
    )
    p.add_argument("--seed", type=int, metavar="N", help="of the latents (default: that of the run)")
    p.add_argument("--follow", action="store_true", help="score models as they appear in a run, until it is complete")
    p.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="with --follow: end after S s without news (600)"
    )
    p.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: as in the run)")
    add_nets_option(p)


def _eval(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.comm.launch_info import LaunchInfo
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
        return _follow(options, folder, run, evaluation)

    def score_model(world: World, console: RunConsole) -> None:
        sweep_truncations(folder, run, evaluation, world, console, options.data, truncations, seed, options.nets)

    return run_in_world(run, LaunchInfo.from_environment(), score_model, device=options.device)


def _evaluation_fields(options: argparse.Namespace, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation fields of the run with those of the command line. Metrics may imply others."""
    from paragan.eval.metrics import get_metric, num_fakes

    fields: dict[str, Any] = {}
    for name in ("count", "features", "inception", "reference"):
        if (value := getattr(options, name)) is not None:
            fields[name] = value
    metrics = options.metrics.split(",") if options.metrics else recorded["metrics"]
    if "count" not in fields and any(get_metric(name).required_fakes for name in metrics):
        fields["count"] = num_fakes(metrics)
    if "features" not in fields and options.metrics and recorded["features"] == "pixels":
        fields |= _required_features(metrics)
    if "features" not in fields and ":" in recorded["features"]:
        name = recorded["features"]
        raise UsageError(
            f"--features: this run is scored with your own code, which files never run. Use --features {name}"
        )
    return recorded | fields | {"metrics": metrics}


def _required_features(metrics: list[str]) -> dict[str, str]:
    """Return the feature space that these metrics need, or {} if pixels will do."""
    if any(name.startswith(("fid", "intra_fid", "is")) or "50k" in name for name in metrics):
        return {"features": "inception"}
    return {"features": "resnet20"} if {"accuracy", "cas"} & {*metrics} else {}


def _parse_truncations(text: str) -> list[float]:
    """Parse `0.4,0.6,1.0`."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--truncation {text}: not a number. Use 0.5 or 0.4,0.6,1") from None
    for value in values:
        check_truncation(value)
    return list(dict.fromkeys(values))


# --follow ------------------------------------------------------------------------------------------------


def _follow(options: argparse.Namespace, folder: Path, run: Run, evaluation: Any) -> int:
    """Score models as they appear. Exit status 0 when the run is complete, 1 if it stopped, 3 on a signal."""
    from paragan.comm.launch_info import LaunchInfo
    from paragan.config.resolve import load_dataset
    from paragan.report.page import write_report
    from paragan.train.async_eval import RunFollower
    from paragan.train.callbacks.best_model import resolve_best_metric
    from paragan.train.callbacks.scoring import check_evaluation, make_feature_space
    from paragan.train.console import RunConsole

    _check_follow_options(options, LaunchInfo.from_environment().size)
    device = select_device(options.device, run.device.kind)
    console = RunConsole()
    if not evaluation.metrics:
        raise UsageError("--metrics: this run computes no scores. Use --metrics fd,kid")
    dataset = load_dataset(dataclasses.replace(run.data, path=options.data or run.data.path))
    if options.data and run.fingerprints.data and dataset.fingerprint != run.fingerprints.data:
        raise UsageError(
            f"--data {options.data}: not the images that {folder} was trained on, by which --follow scores it. Use "
            "those, or leave --follow out"
        )
    check_evaluation(evaluation, dataset)
    space = make_feature_space(evaluation, dataset)
    best = "" if run.evaluation.metrics else resolve_best_metric(run.output.best_metric, evaluation.metrics, space)
    with _signals_as_interrupted(), _follow_lock(folder):
        follower = RunFollower(folder, run, dataset, evaluation, device, console, options.patience, best, options.nets)
        num_scored = follower()
    write_report(folder)
    console.print(f"{folder} is complete, {num_scored} models scored by this command; see {folder}/report.html")
    return 0


def _check_follow_options(options: argparse.Namespace, ranks: int) -> None:
    if ranks > 1:
        raise UsageError("--follow: runs as one process. Start it without a launcher")
    if options.truncation != "1" or options.seed is not None:
        raise UsageError("--follow: uses the protocol of the run. Leave --truncation and --seed out")
    if not options.patience >= 0:
        raise UsageError(f"--patience {options.patience}: must not be negative. Use 0 or more")


@contextlib.contextmanager
def _follow_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from following this run: they would score the same models."""
    with (folder / ".follow").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder}: another process follows this run. Stop it first") from error
        yield


@contextlib.contextmanager
def _signals_as_interrupted() -> Iterator[None]:
    from paragan.train.shutdown import exit_on_signal

    try:
        with exit_on_signal():
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(str(error).partition(" ")[0] or "SIGINT") from error
