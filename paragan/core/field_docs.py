"""The meaning of every field of a config class, from its source text: for `paragan train --fields`.

A meaning is written once, in one of two places: a line `field : meaning` of the class docstring (more lines are
indented; `a, b : meaning` is about both), or a string below the field. A class also has the meanings of its bases.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap

_FIELD_LINE = re.compile(r"(?P<names>\w+(?:, \w+)*) *: +(?P<text>.*)")


@functools.cache
def field_meanings(cls: type) -> dict[str, str]:
    """Return field -> meaning, in one line, of the fields of a dataclass that have one."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _meanings_in_docstring(base) | _meanings_below_fields(base)
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    return {name: meanings[name] for name in names if name in meanings}


def documented_names(cls: type) -> list[str]:
    """Return the names before a colon in the docstring of a class. Each should be a field."""
    return list(_meanings_in_docstring(cls))


def _meanings_in_docstring(cls: type) -> dict[str, str]:
    meanings: dict[str, str] = {}
    current: list[str] = []
    paragraphs = inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n")
    for line in "\n".join(paragraphs[1:]).splitlines():  # the first paragraph describes the class
        if match := _FIELD_LINE.fullmatch(line):
            current = match["names"].split(", ")
            for name in current:
                meanings[name] = match["text"].strip()
        elif line.startswith(" ") and current:
            for name in current:
                meanings[name] += f" {line.strip()}"
        else:
            current = []
    return meanings


def _meanings_below_fields(cls: type) -> dict[str, str]:
    meanings: dict[str, str] = {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # made at run time
        return {}
    class_def = ast.parse(source).body[0]
    body = class_def.body if isinstance(class_def, ast.ClassDef) else []
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            meanings[statement.target.id] = " ".join(following.value.value.split())
    return meanings
