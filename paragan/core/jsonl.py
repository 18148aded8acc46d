"""JSON Lines files such as stats.jsonl and metrics.jsonl: one JSON object a line, appended to.

JSON has no nan and no infinity: such a value is written as null, and its key is listed under "nonfinite".
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from paragan.core.atomic_write import atomic_write_bytes, name_full_disk
from paragan.core.errors import RunError, UsageError

Row = dict[str, Any]

LOCK_TIMEOUT_S = 60.0  # how long another process may hold the lock of a file
LOCK_POLL_S = 0.01


class JsonlFile:
    """The writer of a `stats.jsonl` or a `metrics.jsonl`.

    >>> stats = JsonlFile(run_dir / "stats.jsonl")
    >>> stats.truncate_after(1000)                                # resumed from the checkpoint of step 1000
    >>> stats.append({"Progress/step": 1010, "Loss/G/loss": math.nan})
    {"Progress/step": 1010, "Loss/G/loss": null, "nonfinite": ["Loss/G/loss"]}     <- the line

    It keeps no file open: a line has left this process when `append` returns. Several processes may write to one file;
    each locks it while it writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. Raises TypeError, naming the key, for a value that is not plain (a tensor, for example)."""
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write several lines, all or none."""
        lines = b"".join(map(_encode_row, rows))
        with name_full_disk(self.path), _locked(self.path) as file:
            _repair_tail(file)
            file.write(lines)

    def update_last(self, changes: Callable[[Row], Mapping[str, Any]]) -> None:
        """Update the last line, if there is one, with the keys that `changes(last_row)` returns."""
        if not self.path.exists():
            return
        with _locked(self.path):
            lines = list(_iter_rows(self.path))
            if lines:
                _, row = lines.pop()
                last_line = _encode_row({**row, **changes(row)})
                atomic_write_bytes(self.path, b"".join([*(line for line, _ in lines), last_line]))

    def truncate_after(self, max_value: float, key: str = "Progress/step") -> None:
        """Drop the rows whose `key` is above `max_value`; the others, also those without the key, keep their bytes.

        A resumed run then continues the file as if it had never been interrupted. Scores have no step:
        `truncate_after(kimg, key="kimg")`.
        """
        self.filter(lambda row: not _exceeds(row.get(key), max_value))

    def filter(self, predicate: Callable[[Row], bool]) -> None:
        """Drop the rows for which `predicate` is false; the others keep their bytes."""
        if not self.path.exists():
            return
        with _locked(self.path):
            remaining = b"".join(line for line, row in _iter_rows(self.path) if predicate(row))
            if remaining != self.path.read_bytes():
                atomic_write_bytes(self.path, remaining)


def read_jsonl(path: Path) -> list[Row]:
    """Return all rows; none if the file does not exist. A last line without a newline, left by a crash, is skipped.

    Raises:
        UsageError: another line is not a JSON object.
    """
    return [row for _, row in _iter_rows(path)] if path.exists() else []


def newest_scores(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of the last scored kimg, by score name; of several with one name the one of highest
    `score_priority`, and among equals the last."""
    rows = [row for row in rows if "name" in row and is_number(row.get("value"))]
    last = [row for row in rows if row.get("kimg") == rows[-1].get("kimg")]
    return {str(row["name"]): row for row in sorted(last, key=score_priority)}


def newest_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the values of `newest_scores`, by name."""
    return {name: float(row["value"]) for name, row in newest_scores(rows).items()}


def format_scores(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format `newest_values` as one line: "fd_pixels 0.2497  kid_pixels 0.000485"."""
    return "  ".join(f"{name} {value:.4g}" for name, value in newest_values(rows).items())


def score_priority(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the sort key of scores with one name and kimg: untruncated samples first, then the number of fakes."""
    protocol = row.get("protocol")
    if not isinstance(protocol, Mapping):
        protocol = {}
    fakes = protocol.get("fakes")
    return protocol.get("truncation") in (None, 1.0), fakes if is_number(fakes) else 0.0


def kimg_and_values(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return the kimg and the values of the rows that have a number under `key`; a value that was not finite is nan."""
    kimg, values = [], []
    for row in rows:
        row_kimg = row.get("Progress/kimg", row.get("kimg"))
        value = row.get(key)
        nonfinite_keys = row.get("nonfinite")
        if value is None and isinstance(nonfinite_keys, list) and key in nonfinite_keys:
            value = math.nan
        if is_number(row_kimg) and math.isfinite(row_kimg) and is_number(value):
            kimg.append(float(row_kimg))
            values.append(float(value))
    return kimg, values


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a float, or an integer (no bool) that a float can hold."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023
    return isinstance(value, float)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for appending and lock it against other writers, if its file system has locks.

    Another process may replace the file while this one waits for the lock: then it is opened again.

    Raises:
        RunError: another process held the lock for `LOCK_TIMEOUT_S`.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{path}: another process has locked it for {LOCK_TIMEOUT_S:g} s. End that process"
                    ) from None
                time.sleep(LOCK_POLL_S)
                continue
            except OSError:
                pass  # a file system without locks
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
    nonfinite_keys = list(row.get("nonfinite", ()))
    plain = {key: _to_json_value(value, key, nonfinite_keys) for key, value in row.items() if key != "nonfinite"}
    if nonfinite_keys:
        plain["nonfinite"] = nonfinite_keys
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _to_json_value(value: Any, key: str, nonfinite_keys: list[str]) -> Any:
    """Return `value` as JSON represents it; add the keys of floats that JSON lacks (nan, inf) to `nonfinite_keys`."""
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
        return [_to_json_value(item, f"{key}.{index}", nonfinite_keys) for index, item in enumerate(value)]
    raise TypeError(f"{key}: a {type(value).__name__} is not a plain value; make it a number or a string first")


def _iter_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        row = _parse_row(line)
        if row is not None:
            yield line if line.endswith(b"\n") else line + b"\n", row
        elif line.endswith(b"\n") and line.strip():
            raise UsageError(
                f"{path}, line {number}: not a JSON object: {line[:60].decode(errors='replace').strip()!r}; "
                "repair or delete that line"
            )


def _parse_row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _repair_tail(file: BinaryIO) -> None:
    """Remove a partial last line that a crash left in `file` (open for appending), or end it with a newline."""
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
