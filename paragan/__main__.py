"""`python -m paragan` is `paragan`."""

from paragan.cli.main import entry_point

entry_point()
