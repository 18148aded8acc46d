"""Rows of numbers in a file: one JSON object a line, only ever appended to."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError

Row = dict[str, Any]


class JsonlFile:
    """The writer of a `stats.jsonl` or a `metrics.jsonl`.

    >>> stats = Records(run_dir / "stats.jsonl")
    >>> stats.truncate_after(1000)                                # resumed from the checkpoint of step 1000
    >>> stats.append({"Progress/step": 1010, "Loss/G/loss": math.nan})
    {"Progress/step": 1010, "Loss/G/loss": null, "nonfinite": ["Loss/G/loss"]}     <- the line

    Holds no file open: a line is out of this process when `append` returns. Several processes may write to one file:
    each has it for itself while it does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. A value that is not plain (a tensor, say) is a TypeError that names its key."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write some lines, all of them or none."""
        lines = b"".join(map(_encode_row, rows))
        with _locked(self.path) as file:
            _repair_tail(file)
            file.write(lines)

    def update_last(self, changes: Callable[[Row], Mapping[str, Any]]) -> None:
        """Lay more over the last line, which it is told, where there is one."""
        if not self.path.exists():
            return
        with _locked(self.path):
            lines = list(_iter_rows(self.path))
            if lines:
                last = _encode_row({**lines[-1][1], **changes(lines[-1][1])})
                atomic_write_bytes(self.path, b"".join([line for line, _ in lines[:-1]] + [last]))

    def truncate_after(self, max_value: float, key: str = "Progress/step") -> None:
        """Drop the rows whose `key` is beyond `last`; the others keep their bytes, also those without `key`.

        What a resumed run appends then continues the file that an undisturbed run would have. Scores have no
        step: `truncate_after(kimg, key="kimg")`.
        """
        self.filter(lambda row: not _exceeds(row.get(key), max_value))

    def filter(self, predicate: Callable[[Row], bool]) -> None:
        """Drop all other rows; these keep their bytes."""
        if not self.path.exists():
            return
        with _locked(self.path):
            kept = b"".join(line for line, row in _iter_rows(self.path) if predicate(row))
            if kept != self.path.read_bytes():
                atomic_write_bytes(self.path, kept)


def read_jsonl(path: Path) -> list[Row]:
    """All rows; none where there is no file yet.

    A last line without an end is what a crash leaves: it is left out. Any other line that is no JSON object
    is Unusable.
    """
    return [row for _, row in _iter_rows(path)] if path.exists() else []


def newest_scores(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The scores of the last moment that was scored, by name; of those taken twice that of most weight, and then the
    second."""
    rows = [row for row in rows if "name" in row and is_number(row.get("value"))]
    last = [row for row in rows if row.get("kimg") == rows[-1].get("kimg")]
    return {str(row["name"]): row for row in sorted(last, key=score_priority)}


def newest_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of these."""
    return {name: float(row["value"]) for name, row in newest_scores(rows).items()}


def format_scores(rows: Iterable[Mapping[str, Any]]) -> str:
    """These in a line: fd_pixels 0.2497  kid_pixels 0.000485."""
    return "  ".join(f"{name} {value:.4g}" for name, value in newest_values(rows).items())


def score_priority(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Which of several scores of one name and moment is shown where one is: that of all G makes (not truncated), of
    most images."""
    found = row.get("protocol")
    protocol = found if isinstance(found, Mapping) else {}
    fakes = protocol.get("fakes")
    return protocol.get("truncation") in (None, 1.0), fakes if is_number(fakes) else 0.0


def kimg_and_values(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """`(kimg, values)` of the rows that have a number under `key`; one that was not finite is nan."""
    kimg, values = [], []
    for row in rows:
        at, value = row.get("Progress/kimg", row.get("kimg")), row.get(key)
        if value is None and isinstance(lost := row.get("nonfinite"), list) and key in lost:
            value = math.nan
        if is_number(at) and math.isfinite(at) and is_number(value):
            kimg.append(float(at))
            values.append(float(value))
    return kimg, values


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one that a float holds, or would if it were finite."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023
    return isinstance(value, float)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """A file, open for appending, that no other process writes to meanwhile. One who waited for it may find that the
    file was replaced. (Where a file system knows no locks, there are none.)"""
    while True:
        with path.open("a+b") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(file, path):
                yield file
                return


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _exceeds(value: object, max_value: float) -> bool:
    return isinstance(value, int | float) and value > max_value


def _encode_row(row: Mapping[str, Any]) -> bytes:
    lost = list(row.get("nonfinite", ()))
    plain = {key: _to_json_value(value, key, lost) for key, value in row.items() if key != "nonfinite"}
    if lost:
        plain["nonfinite"] = lost
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _to_json_value(value: Any, key: str, nonfinite_keys: list[str]) -> Any:
    """`value` as JSON has it; the keys of floats that JSON lacks (nan, inf) are added to `lost`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        nonfinite_keys.append(key)
        return None
    if isinstance(value, Mapping):
        return {str(name): _to_json_value(item, f"{key}.{name}", nonfinite_keys) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item, f"{key}.{place}", nonfinite_keys) for place, item in enumerate(value)]
    raise TypeError(f"{key}: a {type(value).__name__} is no plain value; make it a number or a string first")


def _iter_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        row = _parse_row(line)
        if row is not None:
            yield line if line.endswith(b"\n") else line + b"\n", row
        elif line.endswith(b"\n") and line.strip():
            raise UsageError(
                f"{path}, line {number}: not a JSON object: {line[:60].decode(errors='replace').strip()!r}; "
                "mend or delete that line"
            )


def _parse_row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _repair_tail(file: BinaryIO) -> None:
    """Let `file`, open for appending, end with a whole line: what a crash left would spoil the next one."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return
    file.seek(0)
    start = file.read().rfind(b"\n") + 1
    file.seek(start)
    if _parse_row(file.read()) is None:
        file.truncate(start)
    else:
        file.write(b"\n")
