"""What the commands share: their parser, checks of options, and how they get a run, a device and a world of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from torch import device as Device

    from paragan.comm.launch_info import LaunchInfo
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.core.image_shape import ImageSize
    from paragan.data.tools.parallel_map import ProgressFn
    from paragan.train.console import RunConsole


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with one line, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message + f" (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from paragan.core.schema import did_you_mean

            option = f"{'/'.join(action.option_strings)}: " if action.option_strings else ""
            self.error(f"{option}there is no {value}{did_you_mean(str(value), map(str, action.choices))}")


def local_folder(location: str, argument: str = "MODEL") -> str:
    """Return a location, or of a folder in an object store the path of a copy of it, which is downloaded.

    argument: names the location, for messages.
    """
    from paragan.data.storage.object_folder import download_for_reading, is_object_address

    return str(download_for_reading(location, argument)) if is_object_address(location) else location


def add_command(
    commands: Any, name: str, action: Any, summary: str, details: str = "", epilog: str | None = None
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: what `add_subparsers` returned.
        action: `(options, rest, arguments) -> exit status`; rest are the arguments that the parser does not know,
            arguments the whole command line. None for a group of commands.
        summary: one line in the list of commands.
        details: follows the summary in the help of the command.
    """
    lines = f"{summary[0].upper()}{summary[1:]}. {details}".splitlines()
    parser = commands.add_parser(
        name,
        help=summary,
        description="\n".join(line.rstrip() for line in lines),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=action)
    return parser


def parse_size(resolution: str | None) -> ImageSize | None:
    """Return the size that --resolution names, or None. Raises UsageError if it is not a size."""
    from paragan.core.image_shape import check_resolution

    return None if resolution is None else check_resolution("--resolution", resolution)


# Runs and fields ----------------------------------------------------------------------------------------


def read_run_file_or_recipe(name: str) -> dict[str, Any]:
    """Return the run in a .yaml file, or that of a named recipe, as plain data."""
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import get_recipe

    return read_yaml(Path(name)) if Path(name).suffix in (".yaml", ".yml") else to_dict(get_recipe(name))


def parse_settings(rest: list[str]) -> list[tuple[str, str]]:
    """Parse arguments that set fields: `--a.b=value` and `--a.b value` become ("a.b", "value").

    Groups that are chosen by name come before their fields, so that `--g.optimizer.lr=1e-3 --g.optimizer=sgd` keeps the
    rate. Otherwise the order is that of the arguments.
    """
    settings: list[tuple[str, str]] = []
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            advice = f"Use --data {word}" if Path(word).exists() else "Set fields as --some.field=value"
            raise UsageError(f"{word}: unexpected argument. {advice}")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"{word} needs a value: {word}=...")
            value = words.pop(0)
        settings.append((name.replace("-", "_"), value))
    return sorted(settings, key=lambda setting: setting[0].removesuffix(".name").count("."))


def with_absolute_paths(run: Run) -> Run:
    """Return the run with absolute paths, so that its run.yaml works from any folder."""
    from paragan.core.image_encoding import is_user_code
    from paragan.data.storage.filesystem import absolute_location

    data = dataclasses.replace(
        run.data,
        path=absolute_location(run.data.path),
        decoder=run.data.decoder if is_user_code(run.data.decoder) else absolute_location(run.data.decoder),
        originals=absolute_location(run.data.originals),
    )
    init_from = absolute_location(run.init_from)
    return dataclasses.replace(run, data=data, init_from=init_from, distill_from=absolute_location(run.distill_from))


# Ranks and devices --------------------------------------------------------------------------------------


def without_ranks_option(arguments: list[str]) -> list[str]:
    """Return the command line without `--ranks N`, for the processes that it starts."""
    result: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--ranks":
            words.pop(0)
        elif not word.startswith("--ranks="):
            result.append(word)
    return result


def count_ranks(requested: int | None, launch_info: LaunchInfo) -> int:
    """Return the number of ranks, by --ranks or the launcher. Raises UsageError if they contradict each other."""
    ranks = launch_info.size if requested is None else requested
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: must be positive. Use 1 or more")
    if is_launched(launch_info) and ranks != launch_info.size:
        raise UsageError(f"--ranks {ranks}: the launcher started {launch_info.size}. Leave --ranks out")
    return ranks


def is_launched(launch_info: LaunchInfo) -> bool:
    """Return whether a launcher started this process as a rank."""
    return launch_info.size > 1 or "RANK" in os.environ


def run_in_world(
    run: Run,
    launch_info: LaunchInfo,
    action: Callable[[World, RunConsole], object],
    join: Callable[[Device], World] | None = None,
    device: Device | None = None,
) -> int:
    """Join the ranks of the launcher, call `action(world, console)` on each, and leave. Returns exit status 0.

    Args:
        join: joins the world on a device (default: World.join).
        device: of this rank (default: as the run says).
    """
    from paragan.comm.world import World
    from paragan.core.devices import pick_device
    from paragan.train.console import RunConsole

    where = device or pick_device(run.device.kind, launch_info.local_rank)
    with join(where) if join else World.join(launch_info, where, run.timeout_s) as world:
        action(world, RunConsole(world.is_main))
    return 0


def select_device(name: str | None, default: str, local_rank: int = 0) -> Device:
    """Return the device of a rank by `--device`, or of the kind `default` if the option is not given."""
    from paragan.core.backends import StreamBackend
    from paragan.core.devices import BACKENDS, pick_device

    kind, colon, number = (name or default).partition(":")
    if name and (kind not in BACKENDS or (colon and not (BACKENDS[kind].has_streams and number.isdecimal()))):
        raise UsageError(f"--device {name}: unknown device. Use cpu, cuda, cuda:1, xpu or mps")
    backend = BACKENDS.get(kind)
    try:
        if number and isinstance(backend, StreamBackend):
            return backend.device_at(int(number))
        return pick_device(kind, local_rank)
    except UsageError as error:  # which names the field of a run
        error.args = (str(error).replace("--device.kind=", "--device "), *error.args[1:])
        raise


@contextmanager
def advise_on_memory(advice: str) -> Iterator[None]:
    """End in one line, with advice, if the device runs out of memory inside."""
    import torch

    from paragan.core.errors import DeviceOutOfMemory

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"{str(error).partition('. GPU')[0]}. {advice}") from error


# Options and their checks -------------------------------------------------------------------------------


def add_nets_option(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nets", metavar="MODULE:CLASS", help="your network class, if the model was trained with one")


def add_decoder_option(p: argparse.ArgumentParser) -> None:
    """Add --decoder, which errors call --data.decoder as in training."""
    p.add_argument(
        "--decoder",
        "--data.decoder",
        default="",
        metavar="MODEL|MODULE:CLASS",
        help="the autoencoder, if G makes latents and it is not where it was, or your own code",
    )


def add_label_options(p: argparse.ArgumentParser, summary: str) -> None:
    p.add_argument("--labels", action=argparse.BooleanOptionalAction, default=True, help=summary)
    p.add_argument("--label-key", default="", metavar="KEY", help="key or column of the labels, if there are several")


@contextmanager
def name_label_options() -> Iterator[None]:
    """Name the options of `add_label_options` in errors, where these name fields of a run."""
    try:
        yield
    except UsageError as error:
        message = str(error).replace("--data.label", "data.label").replace("data.labels=false", "--no-labels")
        error.args = (message.replace("data.label_key", "--label-key"), *error.args[1:])
        raise


def check_no_extra_arguments(rest: list[str]) -> None:
    if rest:
        problem = "this command has no such option" if rest[0].startswith("-") else "unexpected argument"
        raise UsageError(f"{rest[0]}: {problem}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed}: out of range. Use 0 to 2^63 - 1")


def check_truncation(truncation: float) -> None:
    if not 0.05 <= truncation <= 1:
        raise UsageError(f"--truncation {truncation}: out of range. Use a number between 0.05 and 1 (1: no truncation)")


def check_writable(option: str, file: str | None) -> None:
    """Check that a file can be written; None is allowed."""
    if file and Path(file).is_dir():
        raise UsageError(f"{option} {file}: this is a folder. Use the name of a file")
    if file and not os.access(Path(file).absolute().parent, os.W_OK):
        raise UsageError(f"{option} {file}: the folder does not exist or is not writable")


# Progress -----------------------------------------------------------------------------------------------


@contextmanager
def progress_bar(unit: str, every_s: float = 10.0, enabled: bool = True) -> Iterator[ProgressFn]:
    """Yield a function that shows progress on stderr: a live bar on a terminal, else a line every `every_s`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, quiet=not enabled)
    columns = (MofNCompleteColumn(), TextColumn(unit), BarColumn(bar_width=20), TimeRemainingColumn())
    last_line_s = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show_progress(done: int, count: int) -> None:
            nonlocal last_line_s
            bar.update(task, completed=done, total=count)
            if not console.is_terminal and time.monotonic() - last_line_s >= every_s:
                console.print(f"{done:,} of {count:,} {unit}")
                last_line_s = time.monotonic()

        yield show_progress
