"""`paragan` answers at once, and says which command was meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paragan.cli.main import main

SLOW_MODULES = ("torch", "numpy", "pydantic", "yaml", "rich", "scipy", "PIL")


@pytest.mark.parametrize("call", ["build_parser().format_help()", "main(['recipes'])"])
def test_help_and_the_list_of_recipes_import_nothing_slow(call):
    code = (
        "import io, sys; from paragan.cli.main import build_parser, main; out, sys.stdout = sys.stdout, io.StringIO();"
        f"{call}; print([name for name in {SLOW_MODULES} if name in sys.modules], file=out)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_arguments_the_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: paragan [-h] [--version] COMMAND ...\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian digits", "there is no trian; did you mean train? (see `paragan --help`)"),
        ("bench stp", "there is no stp; did you mean step? (see `paragan bench --help`)"),
        ("export x --format=onx", "--format: there is no onx; did you mean onnx? (see `paragan export --help`)"),
    ],
)
def test_misspelled_names_are_answered_with_those_that_exist(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err == f"paragan: {message}\n"
