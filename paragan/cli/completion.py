"""`paragan completion`: scripts with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from paragan.cli.common import add_command, check_no_extra_arguments
from paragan.core.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
EXAMPLES = """examples:
  paragan completion bash > ~/.local/share/bash-completion/completions/paragan
  paragan completion zsh > ~/.zfunc/_paragan             # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
"""


def add_completion_command(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add `paragan completion`. `parser` is that of the whole command line."""
    summary = "print a script with which a shell completes commands and options"
    p = add_command(commands, "completion", functools.partial(_completion, parser), summary, epilog=EXAMPLES)
    p.add_argument("shell", choices=SHELLS)


def _completion(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str], arguments: list[str]
) -> int:
    check_no_extra_arguments(rest)
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion: needs shtab: pip install shtab") from error
    sys.stdout.write(f"{shtab.complete(parser, options.shell)}\n")
    return 0
