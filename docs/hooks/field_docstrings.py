"""Extension of griffe: the lines `field : meaning` of a config class become the docstrings of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import griffe

import paragan
from paragan.core.field_docs import documented_names, field_meanings


class FieldDocstrings(griffe.Extension):
    """Gives each field of an exported dataclass its meaning as docstring."""

    def __init__(self) -> None:
        exported = [getattr(paragan, name) for name in paragan.__all__]
        self._classes = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in exported if isinstance(cls, type)}

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        exported = self._classes.get(cls.path)
        if exported is None or cls.docstring is None:
            return
        names = documented_names(exported)
        cls.docstring.value = without_field_lines(cls.docstring.value, names)
        meanings = field_meanings(exported) if dataclasses.is_dataclass(exported) else {}
        for name, meaning in meanings.items():
            field = cls.members.get(name)
            if isinstance(field, griffe.Attribute):
                field.docstring = griffe.Docstring(meaning, parent=field)


def without_field_lines(docstring: str, names: Iterable[str]) -> str:
    """Return a docstring without the lines `field : meaning` of these fields, and those that continue them."""
    fields = set(names)
    lines: list[str] = []
    is_field = False
    for line in docstring.splitlines():
        head, colon, _ = line.partition(":")
        if colon and fields.issuperset(name.strip() for name in head.split(",")):
            is_field = True
        elif not (is_field and line.startswith(" ")):
            is_field = False
            lines.append(line)
    return "\n".join(lines).rstrip()
