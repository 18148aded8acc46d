"""`paragan eval`: score a model now, with --follow the models of a run as they appear, or two sets of images."""

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
    add_decoder_option,
    add_nets_option,
    advise_on_memory,
    check_no_extra_arguments,
    check_seed,
    check_truncation,
    count_ranks,
    is_launched,
    local_folder,
    run_in_world,
    select_device,
    without_ranks_option,
)
from paragan.cli.eval_sets import MEMORY_ADVICE, check_options_of_runs, eval_sets
from paragan.core.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.train.console import RunConsole


HELP = """Scores of a model are appended to RUN_DIR/metrics.jsonl, each with its protocol.

Metrics: fd, kid and prdc in any feature space; is and is1 (1 split) with a classifier; fid, fid50k_full, kid50k_full,
is50k, pr50k3_full and intra_fid with --features inception; intra_fd by class; accuracy and cas with --features
resnet20, a classifier of the data that is trained once. Where G is given data: psnr of images, log_mel and stft of
waves, each against the real that it was made from. docs/scores.md explains them.

--reals A --fakes B scores two sets without a run. Each is what --data of `paragan train` accepts (a folder, .zip, .npz,
.npy, .h5, tar shards, ...), or an .npz with mu and sigma, which fd and fid can use. The sets must have images of one
size and colour, unless --resolution and --channels say what to make of them.
"""

EXAMPLES = """examples:
  paragan eval runs/00000-* --metrics fd,kid,prdc
  paragan eval --reals photos/ --fakes samples.npz --metrics fd,kid,prdc          two sets of images
  paragan eval --reals photos/ --fakes fakes.zip --metrics fid --inception pt_inception.pth --resolution 256
  paragan eval --reals stats.npz --fakes fakes/ --metrics fd --json scores.json   mu and sigma as reals
"""


def add_eval_command(commands: Any) -> None:
    p = add_command(
        commands, "eval", _eval, "score a trained model, or one set of images against another", HELP, EXAMPLES
    )
    p.set_defaults(parser=p)
    p.add_argument("run_dir", metavar="RUN_DIR", nargs="?", help="a run folder; or a model folder, with --data")
    p.add_argument(
        "--metrics", metavar="fd,kid,prdc", help="the scores to compute (default: those of the run; fd,kid,prdc)"
    )
    p.add_argument("--count", type=int, metavar="N", help="number of fakes (default: as in the run; all of --fakes)")
    p.add_argument(
        "--features",
        metavar="SPACE",
        help="pixels, inception, resnet20 or module:callable (default: as in the run; what metrics need, or pixels)",
    )
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    _add_sets_options(p)
    p.add_argument("--reference", metavar="FILE.npz", help="compare with its mu and sigma instead of the data")
    p.add_argument(
        "--data", metavar="PATH", help="compare with other reals, or with those of the run where they lie now"
    )
    p.add_argument(
        "--truncation", default="1", metavar="PSI,PSI", help="one value or several; below 1: less variety (1)"
    )
    p.add_argument("--seed", type=int, metavar="N", help="of latents and kid's subsets (default: as in the run; 0)")
    p.add_argument("--follow", action="store_true", help="score models as they appear in a run, until it is complete")
    p.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="with --follow: end after S s without news (600)"
    )
    p.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, xpu or mps (default: as in the run)")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    add_nets_option(p)
    add_decoder_option(p)


def _add_sets_options(p: argparse.ArgumentParser) -> None:
    """Add the options of two sets of images."""
    p.add_argument("--reals", metavar="A", help="score --fakes against these images, or this .npz of mu and sigma")
    p.add_argument("--fakes", metavar="B", help="images, or an .npz of mu and sigma, instead of a model")
    p.add_argument(
        "--resolution", metavar="R|WxH", help="of both sets: the largest centred parts, resized with Lanczos"
    )
    p.add_argument("--channels", type=int, choices=[1, 3], help="of both sets: 1 makes them grey, 3 RGB")
    p.add_argument("--range", metavar="MIN:MAX", help="of both sets, of images with more than 8 bits (docs/data.md)")
    p.add_argument("--json", metavar="FILE", help="also write the scores of two sets, with their protocols")


def _eval(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.comm.launch_info import LaunchInfo
    from paragan.config.sections import EvaluationOptions
    from paragan.core.schema import from_dict, to_dict
    from paragan.train.callbacks.scoring import sweep_truncations
    from paragan.train.saved_run import resolve_scored_run

    check_no_extra_arguments(rest)
    if options.seed is not None:
        check_seed(options.seed)
    if options.reals is not None:
        return eval_sets(options, options.parser, arguments)
    check_options_of_runs(options)
    options.run_dir = local_folder(options.run_dir)
    truncations = _parse_truncations(options.truncation)
    folder, run = resolve_scored_run(Path(options.run_dir), options.data)
    if options.decoder:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, decoder=options.decoder))
    seed = run.seed if options.seed is None else options.seed
    evaluation = from_dict(EvaluationOptions, _evaluation_fields(options, to_dict(run.evaluation)))
    launch_info = LaunchInfo.from_environment()
    ranks = count_ranks(options.ranks, launch_info)
    if options.follow:
        _check_follow_options(options, ranks)
        return _follow(options, folder, run, evaluation)
    if ranks > 1 and not is_launched(launch_info):
        from paragan.train.local_launcher import launch

        return launch(ranks, without_ranks_option(arguments))

    def score_model(world: World, console: RunConsole) -> None:
        with advise_on_memory(MEMORY_ADVICE):
            sweep_truncations(folder, run, evaluation, world, console, options.data, truncations, seed, options.nets)

    device = select_device(options.device, run.device.kind, launch_info.local_rank)
    return run_in_world(run, launch_info, score_model, device=device)


def _evaluation_fields(options: argparse.Namespace, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation fields of the run with those of the command line. Metrics may imply others."""
    from paragan.eval.metrics import get_metric, num_fakes, required_features

    fields: dict[str, Any] = {}
    for name in ("count", "features", "inception", "reference"):
        if (value := getattr(options, name)) is not None:
            fields[name] = value
    metrics = options.metrics.split(",") if options.metrics else recorded["metrics"]
    if "count" not in fields and any(get_metric(name).required_fakes for name in metrics):
        fields["count"] = num_fakes(metrics)
    if "features" not in fields and all(get_metric(name).is_paired for name in metrics):
        fields["features"] = "pixels"  # not used
    is_other_request = bool(options.metrics or options.inception)
    if "features" not in fields and is_other_request and recorded["features"] == "pixels":
        fields["features"] = required_features(metrics, options.inception or "")
    if "features" not in fields and ":" in recorded["features"]:
        name = recorded["features"]
        raise UsageError(
            f"--features: this run is scored with your own code, which files never run. Use --features {name}"
        )
    features = fields.get("features", recorded["features"])
    if options.inception and features != "inception":
        raise UsageError(
            f"--inception {options.inception}: is not used by the features {features}. Leave it out, or use "
            "--features inception"
        )
    return recorded | fields | {"metrics": metrics}


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
    from paragan.config.resolve import load_dataset
    from paragan.report.page import write_report
    from paragan.train.async_eval import RunFollower
    from paragan.train.callbacks.best_model import resolve_best_metric
    from paragan.train.callbacks.scoring import check_evaluation, make_feature_space
    from paragan.train.console import RunConsole

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
    with _signals_as_interrupted(), _follow_lock(folder), advise_on_memory(MEMORY_ADVICE):
        follower = RunFollower(folder, run, dataset, evaluation, device, console, options.patience, best, options.nets)
        num_scored = follower()
    write_report(folder)
    scored = f"{num_scored} {'model' if num_scored == 1 else 'models'}"
    console.print(f"{folder} is complete, {scored} scored by this command; see {folder}/report.html")
    return 0


def _check_follow_options(options: argparse.Namespace, ranks: int) -> None:
    if ranks > 1:
        raise UsageError("--follow: runs as one process. Start it without a launcher and without --ranks")
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
