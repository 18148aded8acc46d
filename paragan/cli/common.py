"""TODO: docstring of paragan/cli/common.py"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paragan.core.errors import UsageError
from paragan.data.storage.filesystem import is_url

if TYPE_CHECKING:
    from paragan.comm.world import LaunchInfo
    from paragan.config.run import Run


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows how)")


def add_command(commands: Any, name: str, action: Any, summary: str, **more: Any) -> argparse.ArgumentParser:
    lines = f"{summary[0].upper()}{summary[1:]}. {more.pop('more', '')}".splitlines()
    parser = commands.add_parser(
        name,
        help=summary,
        description="\n".join(line.rstrip() for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **more,
    )
    parser.set_defaults(command=action)
    return parser


def with_absolute_paths(run: Run) -> Any:
    """A run whose paths mean the same wherever it is repeated."""
    if run.data.path not in ("", "digits") and not is_url(run.data.path):
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(Path(run.data.path).absolute())))
    paths = {name: str(Path(path).absolute()) for name in ("init_from", "distill_from") if (path := getattr(run, name))}
    return dataclasses.replace(run, **paths)


def parse_settings(rest: list[str]) -> list[tuple[str, str]]:
    """--a.b=value and --a.b value -> (a.b, value)."""
    settings, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UsageError(f"{word} is not understood; fields are set as --some.field=value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"{word} needs a value: {word}=...")
            value = words.pop(0)
        settings.append((name.replace("-", "_"), value))
    return settings


def without_ranks_option(arguments: list[str]) -> list[str]:
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if word == "--ranks":
            words.pop(0)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept


def run_in_world(run: Run, launch_info: LaunchInfo, action: Any, join: Any = None, device: Any = None) -> int:
    """Do it among all ranks of the launcher, and leave them in good order. device: other than the run says."""
    from paragan.comm.world import World
    from paragan.core.devices import pick_device
    from paragan.train.console import RunConsole

    device = select_device(device, "") if device else pick_device(run.device.kind, launch_info.local_rank)
    with join(device) if join else World.join(launch_info, device, run.timeout_s) as world:
        action(world, RunConsole(world.is_main))
    return 0


def add_nets_option(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nets", metavar="MODULE:CLASS", help="networks of your own, if it was trained with such")


def check_no_extra_arguments(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"{rest[0]} is not an option of this command")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed} must be 0 or more, and less than 2^63")


def check_truncation(truncation: float) -> None:
    if not 0.05 <= truncation <= 1:
        raise UsageError(f"--truncation {truncation} must be between 0.05 and 1 (1: none)")


def select_device(name: str | None, kind: str) -> Any:
    """The device a command asks for, or the run's."""
    from paragan.core.devices import BACKENDS, pick_device

    if name is None:
        return pick_device(kind)
    word, colon, number = name.partition(":")
    if word not in BACKENDS or (colon and not (word == "cuda" and number.isdecimal())):
        raise UsageError(f"--device {name} is none of cpu, cuda, cuda:1, mps")
    if not BACKENDS[word].is_available():
        raise UsageError(f"--device {name}: torch sees no {word.upper()} device here; use --device cpu")
    return pick_device(word, int(number or 0))


def check_writable(option: str, file: str | None) -> None:
    if file and Path(file).is_dir():
        raise UsageError(f"{option} {file} is a folder: give a file in it")
    if file and not os.access(Path(file).absolute().parent, os.W_OK):
        raise UsageError(f"{option} {file}: its folder is not there, or cannot be written")
