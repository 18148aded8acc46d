"""Runs as data: YAML in, dotted overrides, one clear line for what is wrong, YAML out."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic.dataclasses
import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.dataclasses import is_pydantic_dataclass

from paragan.core.errors import UsageError

T = TypeVar("T")
MAX_YAML_VALUES = 100_000  # of a record, at most

# A part that is one of several records may be given by its name alone: `strategy: sync`.
name_shorthand = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)


def or_user_class(validate_user_class: Callable[[Any], None], *required: str) -> WrapValidator:
    """A part may also be a record of the user's own, given as `module:Class` (with fields beside it, like any other);
    `needed` are the attributes it must have, `prove` tries it. Its field `name` holds how it was given, so that the
    record of the run finds it again. From Python it may be any object that has them."""

    def validate(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name", "") if isinstance(value, Mapping) else ""
        if not isinstance(value, Mapping):
            return value if value is not None and all(hasattr(value, word) for word in required) else known(value)
        if not isinstance(name, str) or ":" not in name:
            return known(value)
        kind = _load_user_class(name, required)
        try:
            own = from_dict(kind, value)
            validate_user_class(own)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        except Exception as error:
            raise UsageError(f"{name}: {type(error).__name__} where it was tried: {error}") from error
        return own

    return WrapValidator(validate)


def _load_user_class(name: str, required: Sequence[str]) -> type:
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # where a script's own modules lie, as with `python -m`
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a module may do
        raise UsageError(
            f"{name}: {error} (a class of your own is given as module:Class, from where the module lies)"
        ) from error
    if not isinstance(kind, type) or not is_pydantic_dataclass(kind):
        raise UsageError(f"{name} is not a class under @paragan.core.schema.config_class")
    fields = [f.name for f in dataclasses.fields(kind)]
    missing = [word for word in ("name", *required) if word not in fields and not hasattr(kind, word)]
    if missing:
        raise UsageError(f"{name} has no {', '.join(missing)}")
    return kind


@typing.dataclass_transform(frozen_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are checked and whose unknown fields are refused."""
    return pydantic.dataclasses.dataclass(cls, frozen=True, config=ConfigDict(extra="forbid"))  # pyright: ignore


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """A validated `kind` (a pydantic dataclass) from plain data. Unusable names the field and what fits."""
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as error:
        raise UsageError(_describe_error(cls, error)) from error


def to_dict(value: Any) -> Any:
    """A dataclass as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    return [to_dict(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(value: Any) -> str:
    return yaml.safe_dump(to_dict(value), sort_keys=False, default_flow_style=None, width=100)


def read_yaml(path: Path) -> dict[str, Any]:
    """The plain record in a file. Unusable names the file and what is wrong with it."""
    try:
        return from_yaml(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def parse_yaml(text: str) -> Any:
    """What is in YAML. ValueError where it is none, is nested beyond all measure, or where aliases make a few lines
    stand for more values than anybody wrote."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error
    waiting = [data]
    for _ in range(MAX_YAML_VALUES):
        if not waiting:
            return data
        item = waiting.pop()
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    raise ValueError(f"it holds more than {MAX_YAML_VALUES:,} values")


def from_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{name} must hold fields with values, as `paragan train RECIPE -n` prints them")
    return data


def apply_overrides(data: dict[str, Any], settings: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Set dotted fields: ("g.optimizer.lr", "1e-3"). A part that is set by its name alone takes the other fields of
    that part's defaults."""
    data = _copy_dicts(data)
    for path, text in settings:
        *parents, last = path.removesuffix(".name").split(".")
        at = data
        for parent in parents:
            if isinstance(at.get(parent), str):
                at[parent] = {"name": at[parent]}
            at = at.setdefault(parent, {})
            if not isinstance(at, dict):
                raise UsageError(f"--{path}: {parent} is a value, not a group of fields")
        at[last] = _parse_scalar(text)
    return data


def diff(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) wherever two plain records differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        return [d for k in keys for d in diff(a.get(k), b.get(k), f"{path}.{k}" if path else str(k))]
    return [] if a == b else [(path, a, b)]


def get_field(config: Any, path: str) -> Any:
    """The value of a dotted field."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def replace_fields(config: T, fields: Mapping[str, Any]) -> T:
    """The same with these dotted fields, which it has."""
    for path, value in fields.items():
        name, _, rest = path.partition(".")
        inner = replace_fields(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})  # pyright: ignore[reportArgumentType, reportCallIssue]
    return config


MAX_LISTED_NAMES = 40  # names, at most


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'; did you mean X?' or the list of what there is, or its beginning."""
    names = list(choices)
    if not names:
        return ""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    listed = ", ".join(names[:MAX_LISTED_NAMES]) + f", ... ({len(names)} in all)" * (len(names) > MAX_LISTED_NAMES)
    return f"; did you mean {close[0]}?" if close else f"; there are: {listed}"


def list_fields(cls: Any, prefix: str = "", skip_repeats: bool = False) -> list[tuple[str, str, str]]:
    """(dotted field, what it takes, its default) of a dataclass and those inside it, for --help. once: the fields of a
    choice within one of the same choices are not listed again."""
    return _list_fields(cls, prefix, frozenset[Any]() if skip_repeats else None)


def _list_fields(cls: Any, prefix: str, expanded: frozenset[Any] | None) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name, choices = f"{prefix}{f.name}", _union_members(hints[f.name])
        if len(choices) > 1:
            default = "" if f.default is dataclasses.MISSING else _default_name(type(f.default))
            rows.append((name, " | ".join(_default_name(c) for c in choices), default))
        inside = None if expanded is None else expanded.union(choices)
        for choice in () if expanded and expanded.issuperset(choices) else choices:
            where = f" (of {_default_name(choice)})" if len(choices) > 1 else ""
            rows += [
                (inner, what + where, default) for inner, what, default in _list_fields(choice, f"{name}.", inside)
            ]
        if not choices and f.name != "name":
            default = "" if f.default is dataclasses.MISSING else to_dict(f.default)
            rows.append((name, _type_name(hints[f.name]), "null" if default is None else str(default)))
    return rows


def _union_members(hint: Any) -> list[Any]:
    """The dataclasses a type hint admits."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return [m for m in members if dataclasses.is_dataclass(m)]


def _default_name(cls: Any) -> str:
    return next(str(f.default) for f in dataclasses.fields(cls) if f.name == "name")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join("null" if part is type(None) else _type_name(part) for part in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


def _parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _copy_dicts(data: Any) -> Any:
    return {k: _copy_dicts(v) for k, v in data.items()} if isinstance(data, dict) else data


def _describe_error(cls: Any, error: ValidationError) -> str:
    first = error.errors()[0]
    cls, loc = _resolve_choice(cls, first["loc"])
    path, holder, either = _locate_field(cls, loc)
    kind_of, message, given = first["type"], first["msg"], first["input"]
    if kind_of in ("extra_forbidden", "unexpected_keyword_argument"):
        parent = path.rpartition(".")[0]
        owners = [what.rpartition("(of ")[2].rstrip(")") for name, what, _ in list_fields(cls) if name == path]
        if owners:
            chosen = next(str(f.default) for f in dataclasses.fields(holder) if f.name == "name")
            return f"there is no field {path} where {parent}={chosen}: it is of {parent}={', '.join(owners)}"
        beside = [f"{parent}.{f.name}".strip(".") for f in dataclasses.fields(holder) if f.name != "name"]
        return f"there is no field {path}{did_you_mean(path, beside)}"
    if kind_of == "union_tag_not_found":
        return f"{path} has no name: --{path}=NAME says which one it is" if path else "it has no name"
    if kind_of in ("missing", "missing_argument"):
        return f"{path} is missing"
    if kind_of == "union_tag_invalid":
        about = first.get("ctx", {})
        known = [tag.strip("'") for tag in about["expected_tags"].split(", ")]
        return f"{path}: there is no {about['tag']}{did_you_mean(about['tag'], known)}".removeprefix(": ")
    if kind_of == "tuple_type":
        return f"{path}={_truncate(given)}: input should be a list: --{path}=[{_truncate(given)}]"
    if isinstance(given, float) and not math.isfinite(given):  # which is no number that a bound speaks of
        message = "Input should be a finite number"
    message = message.removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if either:
        message = f"input should be {either}"
    named = [path] if path else []  # nothing where the whole is wrong
    return ": ".join([*named, message] if isinstance(given, dict) else ["=".join([*named, _truncate(given)]), message])


def _resolve_choice(cls: Any, loc: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Of a kind that is a choice itself: the one that was chosen, and the place in it."""
    choices = [] if dataclasses.is_dataclass(cls) else _union_members(*typing.get_args(cls)[:1])
    chosen = next((one for one in choices if loc and _default_name(one) == loc[0]), None)
    return (chosen, loc[1:]) if chosen else (cls, loc)


def _truncate(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _locate_field(cls: Any, loc: tuple[Any, ...]) -> tuple[str, Any, str]:
    """The field a user would type for a pydantic location, which also names the chosen class of a union; the dataclass
    that would have it; and what the field may be, where that is one thing or another, none of them a record."""
    parts: list[str] = []
    either = ""
    rest, holder = list(loc), cls
    while rest:
        part = rest.pop(0)
        parts.append(str(part))
        holder = cls or holder
        hint = typing.get_type_hints(cls).get(part) if dataclasses.is_dataclass(cls) else None
        choices = _union_members(hint)
        if len(choices) > 1 and rest and rest[0] in [_default_name(c) for c in choices]:
            cls = next(c for c in choices if _default_name(c) == rest[0])
            rest.pop(0)
        else:
            cls = choices[0] if choices else None
            if rest and not choices and typing.get_origin(hint) in (typing.Union, types.UnionType):
                either = _type_name(hint).replace("bool", "true | false")
                rest = []  # the alternative that was tried
    return ".".join(parts), holder, either
