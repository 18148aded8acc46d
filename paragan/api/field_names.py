"""Messages name fields as a Python script types them: `bs=30`, `strategy.wire=exact`.

Checks are shared with the command line, so their messages name its options: `--batch 30`, `--strategy.wire=exact`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from paragan.core.errors import RunError, UsageError

# Option -> the argument of ScalingManager or `with_policy`, or the field of Config, of another name.
PYTHON_NAMES = {
    "batch": "bs",
    "lanes": "num_workers",
    "kimg": "max_steps",
    "data": "data.path",
    "mirror": "data.mirror",
    "features": "evaluation.features",
    "inception": "evaluation.inception",
    "policy": "name",
    "output.loggers": "loggers",
}
CONSTANTS = {"true": "True", "false": "False", "null": "None"}

# A command in backticks, which stays as it is; an option, and "=" or a space before its value (a number, a placeholder
# such as PATH, or a name); a constant of YAML.
_SPELLING = re.compile(
    r"(?P<command>`[^`]*`)"
    r"|(?<![\w-])--(?P<name>[a-z]\w*(?:[.-]\w+)*)"
    r"(?P<equals>=| (?=[\d.]*\d)| (?=[A-Z]+\b)|(?<=strategy) (?=\w)|(?<=features) (?=\w))?"
    r"|(?<==)(?P<constant>true|false|null)\b"
)


def to_python_names(message: str) -> str:
    """Return a message with `name=value` in place of options `--name value`, and the names and constants of Python."""
    return _SPELLING.sub(_to_python, message)


def _to_python(spelling: re.Match[str]) -> str:
    if spelling["command"]:
        return spelling["command"]
    if spelling["constant"]:
        return CONSTANTS[spelling["constant"]]
    name = spelling["name"].replace("-", "_")
    equals = "=" if spelling["equals"] else ""
    return f"{PYTHON_NAMES.get(name, name)}{equals}"


@contextlib.contextmanager
def with_python_names() -> Iterator[None]:
    """Let errors that are raised inside name fields as a Python script types them. Also decorates a function."""
    try:
        yield
    except (UsageError, RunError) as error:
        error.args = (to_python_names(str(error)), *error.args[1:])
        raise
