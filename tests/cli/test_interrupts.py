"""Ctrl-C at any moment ends a command with one line at most, and never with a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PRINT_AND_WAIT = """
import sys, time
def wait(name):
    if name == {module!r}:
        sys.stdout.write("reached\\n")
        sys.stdout.flush()
        time.sleep(300)
class Finder:
    def find_spec(self, name, path=None, target=None):
        wait(name)
sys.meta_path.insert(0, Finder())
sys.argv = ["paragan", "train", "digits", *{arguments!r}]
import runpy
runpy.run_module("paragan", run_name="__main__")
"""


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("paragan.cli.main", []),
        ("pydantic", []),
        ("torch", []),
        ("paragan.train.local_launcher", ["--ranks=2"]),
    ],
)
def test_an_interrupt_while_modules_are_imported_prints_no_traceback(module, arguments, tmp_path):
    code = PRINT_AND_WAIT.format(module=module, arguments=[*arguments, f"--run-dir={tmp_path / 'run'}"])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=250)
    assert process.returncode in (-signal.SIGINT, 3)
    assert error in ("", "paragan: interrupted\n", "paragan: SIGINT while nothing was being trained\n")
