"""Summarize rows of benchmarks/comm/clock.py: seconds and bytes to a score, by strategy and link."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.lib.timing import format_table

BASELINE = "sync"
GAME = ("game", "hosts", "pace_ms", "images_per_host")
SETTING = (*GAME, "link")
Row = Mapping[str, Any]
SECONDS, SENT_BYTES = 2, 3  # in a point of a curve: kimg, fd, seconds, bytes of the busiest host, of all hosts


def summarize_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, for every setting and way, [lowest, median, highest] over its seeds.

    target            : the final Fréchet distance of the worst seed of `sync` (null: it was not trained), on any link:
                        links do not change what it computes. Other ways may train on more images to reach it
    seconds_to_target : until a score is no worse than the target; null: a seed never reaches it
    bytes_to_target   : sent until then by the host that sends most
    error             : measured over predicted seconds, less 1
    """
    targets = {
        game: max((row["fd"] for row in of_game if row["way"] == BASELINE), default=None)
        for game, of_game in group(rows, GAME).items()
    }
    return [
        line
        for setting in group(rows, SETTING).values()
        for line in summarize_setting(setting, targets[tuple(setting[0][name] for name in GAME)])
    ]


def summarize_setting(rows: Sequence[Row], target: float | None) -> Iterator[dict[str, Any]]:
    for (way, kimg), mine in group(rows, ("way", "kimg")).items():
        line: dict[str, Any] = {name: mine[0][name] for name in SETTING}
        line |= {"way": way, "kimg": kimg, "seeds": len(mine)}
        line |= {"target": target, "valid": all(row["valid"] for row in mine)}
        line |= {name: spread([row[name] for row in mine]) for name in ("fd", "seconds", "sent_bytes")}
        line["error"] = spread([row["seconds"] / row["expected_s"] - 1 for row in mine])
        if target is not None:
            points = [first_within(row["curve"], target) for row in mine]
            line["seconds_to_target"] = spread([point[SECONDS] if point else math.inf for point in points])
            line["bytes_to_target"] = spread([point[SENT_BYTES] if point else math.inf for point in points])
        yield line


def first_within(curve: Sequence[Sequence[float]], target: float) -> Sequence[float] | None:
    """Return the first point of a curve whose score is no worse than the target, if there is one."""
    return next((point for point in curve if point[1] <= target), None)


def group(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of these fields, in the order in which they come first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def spread(values: Sequence[float]) -> list[float | None]:
    """Return lowest, median and highest; None in place of infinity, which JSON has not."""
    return [v if math.isfinite(v) else None for v in (min(values), statistics.median(values), max(values))]


def format_summary(lines: Sequence[Row]) -> str:
    """Format the summary: a table, and the way that reaches the target first on every link."""
    head = ("way", "game", "hosts", "link", "pace ms", "kimg", "fd", "seconds", "to target", "MB", "to target", "")
    cells = [
        (
            *(line["way"], line["game"], line["hosts"], line["link"], f"{line['pace_ms']:g}", f"{line['kimg']:g}"),
            *(format_spread(line["fd"]), format_spread(line["seconds"])),
            *(format_spread(line.get("seconds_to_target")), format_spread(line["sent_bytes"], 1e-6)),
            *(format_spread(line.get("bytes_to_target"), 1e-6), "" if line["valid"] else "INVALID: too slow a machine"),
        )
        for line in lines
    ]
    errors = sorted(abs(line["error"][1]) for line in lines)
    prediction = f"error of predicted seconds: median {statistics.median(errors):.1%}, largest {errors[-1]:.1%}"
    return "\n".join([format_table(head, cells), "", *describe_choices(lines), prediction])


def describe_choices(lines: Sequence[Row]) -> Iterator[str]:
    """Yield a line for every setting: the ways by seconds and by bytes to the target, the first three of each."""
    for setting, ways in group(lines, SETTING).items():
        for name, unit, scale in (("seconds_to_target", "s", 1.0), ("bytes_to_target", "MB", 1e-6)):
            reached = [w for w in ways if w["valid"] and w.get(name) and w[name][1] is not None]
            best = sorted(reached, key=lambda w: w[name][1])[:3]
            if best:
                ranking = ", ".join(f"{w['way']} {scale * w[name][1]:.3g} {unit}" for w in best)
                yield f"{setting[0]}, {setting[1]} hosts, {setting[-1]}: {ranking}"


def format_spread(values: Sequence[float | None] | None, scale: float = 1.0) -> str:
    if values is None:
        return "-"
    low, median, high = ("never" if v is None else f"{scale * v:.4g}" for v in values)
    return median if low == high else f"{median} [{low}, {high}]"
