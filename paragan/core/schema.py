"""Configuration classes: frozen, validated dataclasses, read from YAML and dotted overrides, written as YAML.

Every error is one line that names the field as the user types it and what would fit.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from pydantic.fields import FieldInfo as PydanticFieldInfo

from paragan.core.errors import UsageError
from paragan.core.field_docs import field_meanings
from paragan.core.user_imports import import_attribute

T = TypeVar("T")
MAX_YAML_VALUES = 100_000
MAX_LISTED_NAMES = 40
MAX_SIMILAR_NAMES = 3

# A section that is one of several classes may be given by its name alone: `strategy: sync`.
name_shorthand = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)

# Data may be given by their path alone: `data: points.npz`.
path_shorthand = BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)


def or_user_class(validate_user_class: Callable[[Any], None], *required: str) -> WrapValidator:
    """Return a validator that also accepts a class of the user's own for a section of the configuration.

    In YAML it is given as `name: module:Class`, with its fields like those of any other section; its field `name` keeps
    that text, so the saved configuration finds it again. In Python it may be any object with the required attributes.
    The class is imported and validated when the configuration is built, and never by programs that only read files
    (`eval`, `sample`, `load`).

    Args:
        validate_user_class: is called with the object, and raises if it does not work.
        required: attributes it must have.
    """

    def validate(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name", "") if isinstance(value, Mapping) else ""
        if not isinstance(value, Mapping):
            if value is not None and all(hasattr(value, attribute) for attribute in required):
                return value
            return known(value)
        if not isinstance(name, str) or ":" not in name:
            return known(value)
        cls = _load_user_class(name, required)
        try:
            config = from_dict(cls, value)
            validate_user_class(config)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        except Exception as error:
            raise UsageError(f"{name}: {type(error).__name__} when it was tried: {error}") from error
        return config

    return WrapValidator(validate)


def _load_user_class(name: str, required: Sequence[str]) -> type:
    try:
        cls = import_attribute(name)
    except (Exception, SystemExit) as error:  # importing a module may run any code
        raise UsageError(f"{name}: {error}. Use module:Class, and start in the folder of the module") from error
    if not isinstance(cls, type) or not is_pydantic_dataclass(cls):
        raise UsageError(f"{name}: is not a config class. Decorate it with @paragan.core.schema.config_class")
    fields = [f.name for f in dataclasses.fields(cls)]
    missing = [word for word in ("name", *required) if word not in fields and not hasattr(cls, word)]
    if missing:
        raise UsageError(f"{name}: has no {', '.join(missing)}")
    return cls


@typing.dataclass_transform(frozen_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are validated; unknown fields are an error.

    Its constructor raises UsageError with the text of `from_dict`.
    """
    config = pydantic.dataclasses.dataclass(cls, frozen=True, config=ConfigDict(extra="forbid"))  # pyright: ignore
    construct = config.__init__

    @functools.wraps(construct)
    def construct_or_explain(self: Any, *args: Any, **fields: Any) -> None:
        try:
            construct(self, *args, **fields)
        except ValidationError as error:
            raise UsageError(_describe_error(type(self), error)) from error

    config.__init__ = construct_or_explain
    return config  # pyright: ignore[reportReturnType]


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return a validated `cls` (a config class, or a union of them) built from plain data.

    Raises:
        UsageError: names the first wrong field as a user types it, and what it may be.
    """
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as error:
        raise UsageError(_describe_error(cls, error)) from error


def to_dict(value: Any) -> Any:
    """Return a dataclass as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    return [to_dict(item) for item in value] if isinstance(value, list | tuple) else value


def to_yaml(value: Any) -> str:
    """Return a dataclass or plain data as YAML, with the fields in their order."""
    return yaml.safe_dump(to_dict(value), sort_keys=False, default_flow_style=None, width=100)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        UsageError: names the file and what is wrong with it.
    """
    try:
        return from_yaml(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def parse_yaml(text: str) -> Any:
    """Return the data in YAML text.

    Raises:
        ValueError: it is not YAML, is nested too deeply, or has more than MAX_YAML_VALUES values (aliases can make a
            few lines stand for billions).
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error
    uncounted = [data]
    for _ in range(MAX_YAML_VALUES):
        if not uncounted:
            return data
        item = uncounted.pop()
        if isinstance(item, dict):
            uncounted += item.values()
        elif isinstance(item, list):
            uncounted += item
    raise ValueError(f"it holds more than {MAX_YAML_VALUES:,} values")


def from_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the mapping in YAML text; `name` is what messages call it.

    Raises:
        UsageError: it is not YAML, or not a mapping.
    """
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{name}: must hold fields with values, as `paragan train RECIPE -n` prints them")
    return data


def apply_overrides(data: dict[str, Any], settings: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a copy of `data` with dotted fields set, such as ("g.optimizer.lr", "1e-3").

    Setting a section by name alone (("g.optimizer", "adam")) gives its other fields their defaults.

    Args:
        data: the configuration as plain data.
        settings: (dotted field, value as YAML text).

    Raises:
        UsageError: a field of something that is not a section is set.
    """
    data = _copy_dicts(data)
    for path, text in settings:
        *parents, last = path.removesuffix(".name").split(".")
        section = data
        for parent in parents:
            if isinstance(section.get(parent), str):
                section[parent] = {"name": section[parent]}
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise UsageError(f"--{path}: {parent} is a value, not a group of fields")
        section[last] = _parse_scalar(text)
    return data


def diff(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted field, value in a, value in b) for every difference between two configurations as plain data."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        differences: list[tuple[str, Any, Any]] = []
        for key in keys:
            differences += diff(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
        return differences
    return [] if a == b else [(path, a, b)]


def get_field(config: Any, path: str) -> Any:
    """Return the value of a dotted field of a configuration."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def replace_fields(config: T, fields: Mapping[str, Any]) -> T:
    """Return a copy of a configuration with other values of these dotted fields, all of which must exist."""
    for path, value in fields.items():
        name, _, rest = path.partition(".")
        inner = replace_fields(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})  # pyright: ignore[reportArgumentType, reportCallIssue]
    return config


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean X?", or "; there are: ..." with at most MAX_LISTED_NAMES of the choices.

    A choice that contains the last part of the word comes before those of similar spelling. The section that the word
    and all choices are in is not compared.
    """
    names = list(choices)
    if not names:
        return ""
    section, _, last_part = word.rpartition(".")
    prefix = f"{section}." if section and all(name.startswith(f"{section}.") for name in names) else ""
    matches = [name for name in names if last_part in name.rpartition(".")[2].split("_")]
    if not matches:
        short_names = [name.removeprefix(prefix) for name in names]
        similar = difflib.get_close_matches(word.removeprefix(prefix), short_names, n=1, cutoff=0.5)
        matches = [prefix + name for name in similar]
    if matches:
        return f"; did you mean {matches[0]}?"
    listed = ", ".join(names[:MAX_LISTED_NAMES])
    if len(names) > MAX_LISTED_NAMES:
        listed += f", ... ({len(names)} in all)"
    return f"; there are: {listed}"


class FieldInfo(NamedTuple):
    """A field of a config class, for --fields."""

    name: str  # dotted
    values: str  # what it may be; "(of X)" if only the choice X has it
    default: str
    meaning: str  # "" if it has no text


def list_fields(cls: Any, prefix: str = "", skip_repeats: bool = False) -> list[FieldInfo]:
    """Return the fields of a config class and of the sections in it.

    Args:
        cls: the config class.
        prefix: is put before every field.
        skip_repeats: do not list the fields of a union again inside a member of the same union.
    """
    return _list_fields(cls, prefix, frozenset[Any]() if skip_repeats else None)


def _list_fields(cls: Any, prefix: str, expanded: frozenset[Any] | None) -> list[FieldInfo]:
    rows: list[FieldInfo] = []
    hints = typing.get_type_hints(cls)
    meanings = field_meanings(cls)
    for f in dataclasses.fields(cls):
        name = f"{prefix}{f.name}"
        meaning = meanings.get(f.name, "")
        choices = _union_members(hints[f.name])
        if len(choices) > 1:
            default = "" if f.default is dataclasses.MISSING else _default_name(type(f.default))
            names = [tag for choice in choices for tag in _names_of(choice)]
            names += ["null"] if type(None) in typing.get_args(hints[f.name]) else []
            rows.append(FieldInfo(name, " | ".join(names), default, meaning))
        is_repeat = expanded is not None and len(expanded) > 0 and expanded.issuperset(choices)
        expanded_below = None if expanded is None else expanded.union(choices)
        for choice in choices:
            if is_repeat:
                break
            owner = f" (of {_default_name(choice)})" if len(choices) > 1 else ""
            for inner in _list_fields(choice, f"{name}.", expanded_below):
                rows.append(inner._replace(values=inner.values + owner))
        if not choices and f.name != "name":
            value = (
                f.default.get_default(call_default_factory=True)
                if isinstance(f.default, PydanticFieldInfo)
                else f.default
            )
            default = "" if value is dataclasses.MISSING else to_dict(value)
            default = "null" if default is None else str(default)
            rows.append(FieldInfo(name, _type_name(hints[f.name]), default, meaning))
    return rows


def _union_members(hint: Any) -> list[Any]:
    """Return the dataclasses that a type hint admits."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    members = typing.get_args(hint) if is_union else (hint,)
    return [m for m in members if dataclasses.is_dataclass(m)]


def _record_in(hint: Any) -> Any:
    """Return the dataclass of which a type hint admits a list, or None."""
    arguments = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return next((argument for argument in arguments if dataclasses.is_dataclass(argument)), None)


def _default_name(cls: Any) -> str:
    if cls is type(None):
        return "null"
    return next(str(f.default) for f in dataclasses.fields(cls) if f.name == "name")


def _names_of(cls: Any) -> tuple[str, ...]:
    """The names under which a class is chosen: its own, and those of its presets."""
    hint = typing.get_type_hints(cls)["name"]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else (_default_name(cls),)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        return _type_name(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Mapping:
        return f"{{name: {_type_name(typing.get_args(hint)[1])}, ...}}"
    record = _record_in(hint)
    if record:
        return f"[{{{', '.join(f.name for f in dataclasses.fields(record))}}}, ...]"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join("null" if part is type(None) else _type_name(part) for part in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


def _parse_scalar(text: str) -> Any:
    if ":" in text and set(text) <= set("0123456789.:+-"):
        return text  # a range or a ratio, such as 10:50, which YAML reads as 650
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _copy_dicts(data: Any) -> Any:
    return {k: _copy_dicts(v) for k, v in data.items()} if isinstance(data, dict) else data


def _describe_error(cls: Any, error: ValidationError) -> str:
    """Return one line about the first error, which names the field as a user types it."""
    first = error.errors()[0]
    cls, loc = _resolve_choice(cls, _name_position(cls, first["loc"]))
    path, section, alternatives = _locate_field(cls, loc)
    error_type = first["type"]
    value = first["input"]
    if error_type in ("extra_forbidden", "unexpected_keyword_argument"):
        return _describe_unknown_field(cls, path, section)
    if error_type == "union_tag_not_found":
        return f"{path} has no name: {path}=NAME selects one" if path else "it has no name"
    if error_type in ("missing", "missing_argument"):
        return f"{path} is missing"
    if error_type == "union_tag_invalid":
        context = first.get("ctx", {})
        known = [tag.strip("'") for tag in context["expected_tags"].split(", ")]
        return f"{path}: there is no {context['tag']}{did_you_mean(context['tag'], known)}".removeprefix(": ")
    if error_type == "model_attributes_type" and path:  # neither a name nor fields, where one of several is chosen
        hint = typing.get_type_hints(section)[path.rpartition(".")[2]]
        names = [name for choice in _union_members(hint) for name in _names_of(choice)]
        return f"{path}: there is no {_truncate(value)}{did_you_mean(_truncate(value), names)}"
    if error_type == "dataclass_type" and path:
        return _describe_fields(path, section, value)
    if error_type == "tuple_type":
        return f"{path}={_truncate(value)}: input should be a list: {path}=[{_truncate(value)}]"
    message = first["msg"]
    if isinstance(value, float) and not math.isfinite(value):  # pydantic's message would be about a bound
        message = "Input should be a finite number"
    message = message.removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if alternatives:
        message = f"input should be {alternatives}"
    prefix = [path] if path else []  # empty if the configuration as a whole is wrong
    if isinstance(value, dict):
        return ": ".join([*prefix, message])
    return ": ".join(["=".join([*prefix, _truncate(value)]), message])


def _describe_fields(path: str, section: Any, value: Any) -> str:
    """Return a message about a value in place of a section, or of a record in a list, whose class is `section`."""
    name = path.rpartition(".")[2]
    if name.isdecimal():
        first = next(f.name for f in dataclasses.fields(section) if f.default is dataclasses.MISSING)
        return f"{path}={_truncate(value)}: is a record of several fields. Use {{{first}: {str(value)!r}}}"
    members = dataclasses.fields(_union_members(typing.get_type_hints(section)[name])[0])
    fields = ", ".join(f"{path}.{member.name}" for member in members)
    return f"{path}={_truncate(value)}: is a section of several fields. Set one of {fields}"


def _describe_unknown_field(cls: Any, path: str, section: Any) -> str:
    parent, _, last_part = path.rpartition(".")
    owners = [field.values.partition("(of ")[2].partition(")")[0] for field in list_fields(cls) if field.name == path]
    if owners:
        selected = _default_name(section)
        return (
            f"there is no field {path} where {parent}={selected}: it is of {parent}={', '.join(dict.fromkeys(owners))}"
        )
    if parent.rpartition(".")[2].isdecimal():  # a record in a list
        return f"there is no field {path}{did_you_mean(last_part, [f.name for f in dataclasses.fields(section)])}"
    elsewhere = dict.fromkeys(field.name for field in list_fields(cls) if field.name.rpartition(".")[2] == last_part)
    if elsewhere:
        depth = min(name.count(".") for name in elsewhere)
        elsewhere = [name for name in elsewhere if name.count(".") == depth]
        return f"there is no field {path}; did you mean {' or '.join([*elsewhere][:MAX_SIMILAR_NAMES])}?"
    fields = [f"{parent}.{f.name}".strip(".") for f in dataclasses.fields(section) if f.name != "name"]
    return f"there is no field {path}{did_you_mean(path, fields)}"


def _resolve_choice(cls: Any, loc: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the class that was selected, if `cls` is a union, and the location within it."""
    choices = [] if dataclasses.is_dataclass(cls) else _union_members(*typing.get_args(cls)[:1])
    selected = next((choice for choice in choices if loc and loc[0] in _names_of(choice)), None)
    return (selected, loc[1:]) if selected else (cls, loc)


def _name_position(cls: Any, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the location with the name of the field, where a constructor got its value by position."""
    if not dataclasses.is_dataclass(cls) or not loc or not isinstance(loc[0], int):
        return loc
    names = [f.name for f in dataclasses.fields(cls)]
    return (*names[loc[0] : loc[0] + 1], *loc[1:])


def _truncate(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _locate_field(cls: Any, loc: tuple[Any, ...]) -> tuple[str, Any, str]:
    """Translate a pydantic location, which also names the selected members of unions.

    Returns:
        The dotted field as a user types it; the config class that would have it; and, for a field that is a union of
        scalars, its possible types as text.
    """
    parts: list[str] = []
    alternatives = ""
    rest = list(loc)
    section = cls
    while rest:
        part = rest.pop(0)
        parts.append(str(part))
        section = cls or section
        hint = typing.get_type_hints(cls).get(part) if dataclasses.is_dataclass(cls) else None
        record = _record_in(hint)
        if record and rest:
            parts.append(str(rest.pop(0)))
            section = cls = record
            continue
        choices = _union_members(hint)
        preset_cls = next((c for c in choices if len(choices) > 1 and rest and rest[0] in _names_of(c)), None)
        if preset_cls:
            cls = preset_cls
            rest.pop(0)
        else:
            cls = choices[0] if choices else None
            if rest and not choices and typing.get_origin(hint) in (typing.Union, types.UnionType):
                alternatives = _type_name(hint).replace("bool", "true | false")
                rest = []  # the alternative that pydantic tried
    return ".".join(parts), section, alternatives
