"""`python -m paragan` is `paragan`."""

from paragan.cli.main import program

program()
