"""`python -m paragan` is `paragan`."""

from .cli import program

program()
