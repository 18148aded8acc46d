"""TODO: docstring of paragan/cli/common.py"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, NoReturn

from paragan.core.errors import Unusable
from paragan.data.storage.filesystem import is_address


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise Unusable(f"{message} (`{self.prog} --help` shows how)")


def _command(commands: Any, name: str, action: Any, about: str, **more: Any) -> argparse.ArgumentParser:
    lines = f"{about[0].upper()}{about[1:]}. {more.pop('more', '')}".splitlines()
    parser = commands.add_parser(
        name,
        help=about,
        description="\n".join(line.rstrip() for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **more,
    )
    parser.set_defaults(command=action)
    return parser


def _absolute(run: Any) -> Any:
    """A run whose paths mean the same wherever it is repeated."""
    if run.data.path not in ("", "digits") and not is_address(run.data.path):
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(Path(run.data.path).absolute())))
    paths = {name: str(Path(path).absolute()) for name in ("init_from", "teacher") if (path := getattr(run, name))}
    return dataclasses.replace(run, **paths)


def _settings(rest: list[str]) -> list[tuple[str, str]]:
    """--a.b=value and --a.b value -> (a.b, value)."""
    settings, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise Unusable(f"{word} is not understood; fields are set as --some.field=value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise Unusable(f"{word} needs a value: {word}=...")
            value = words.pop(0)
        settings.append((name.replace("-", "_"), value))
    return settings


def _without_ranks(arguments: list[str]) -> list[str]:
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if word == "--ranks":
            words.pop(0)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept


def _in_world(run: Any, place: Any, action: Any, join: Any = None, device: Any = None) -> int:
    """Do it among all ranks of the launcher, and leave them in good order. device: other than the run says."""
    from paragan.comm.world import World
    from paragan.core.devices import pick_device
    from paragan.train.console import Screen

    device = device_of(device, "") if device else pick_device(run.device.kind, place.local_rank)
    with join(device) if join else World.join(place, device, run.timeout_s) as world:
        action(world, Screen(world.first))
    return 0


def _own_nets(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nets", metavar="MODULE:CLASS", help="networks of your own, if it was trained with such")


def _nothing_left(rest: list[str]) -> None:
    if rest:
        raise Unusable(f"{rest[0]} is not an option of this command")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise Unusable(f"--seed {seed} must be 0 or more, and less than 2^63")


def _check_truncation(truncation: float) -> None:
    if not 0.05 <= truncation <= 1:
        raise Unusable(f"--truncation {truncation} must be between 0.05 and 1 (1: none)")


def device_of(name: str | None, kind: str) -> Any:
    """The device a command asks for, or the run's."""
    from paragan.core.devices import KINDS, pick_device

    if name is None:
        return pick_device(kind)
    word, colon, number = name.partition(":")
    if word not in KINDS or (colon and not (word == "cuda" and number.isdecimal())):
        raise Unusable(f"--device {name} is none of cpu, cuda, cuda:1, mps")
    if not KINDS[word].there():
        raise Unusable(f"--device {name}: torch sees no {word.upper()} device here; use --device cpu")
    return pick_device(word, int(number or 0))


def _check_writable(option: str, file: str | None) -> None:
    if file and Path(file).is_dir():
        raise Unusable(f"{option} {file} is a folder: give a file in it")
    if file and not os.access(Path(file).absolute().parent, os.W_OK):
        raise Unusable(f"{option} {file}: its folder is not there, or cannot be written")
