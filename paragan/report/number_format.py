"""Numbers, durations, sizes and settings as text."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

MINUS = "\N{MINUS SIGN}"
BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
MAX_VALUE_CHARS = 200  # of one value on a page


def format_number(value: float | None) -> str:
    """Format with four significant digits, as an integer from 1000 on: 7.418, 0.00123, 12,346."""
    if value is None or not math.isfinite(value):
        return "not finite"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", MINUS)


def format_duration(seconds: float) -> str:
    """Format with the two largest units: 42.1 s, 3 min 5 s, 2 h 13 min, 4 d 7 h."""
    if not math.isfinite(seconds):
        return "not finite"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_value(item: Any) -> str:
    """Format any value of a protocol or of a run, in at most MAX_VALUE_CHARS characters."""
    if isinstance(item, bool):
        return "yes" if item else "no"
    if item is None:
        return "none"
    if isinstance(item, int):
        return f"{item:,}"
    if isinstance(item, float):
        return f"{item:.6g}"
    text = ", ".join(map(format_value, item)) if isinstance(item, list | tuple) else str(item)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def flat_labels(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a nested mapping with readable names: `("reference split", "train")`."""
    for name, text in flat_items(mapping, prefix):
        yield name.replace(".", " ").replace("_", " "), text


def flat_items(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a nested mapping with dotted names: `("g.optimizer.lr", "0.001")`."""
    for key, item in mapping.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping):
            yield from flat_items(item, name)
        else:
            yield name[:MAX_VALUE_CHARS], format_value(item)


def format_bytes(num_bytes: float) -> str:
    """Format an amount of data: 812 bytes, 1.25 MB, 3.4 GB."""
    if not math.isfinite(num_bytes):
        return "not finite"
    unit, scale = next((unit for unit in BYTE_UNITS if abs(num_bytes) >= unit[1]), BYTE_UNITS[-1])
    return f"{format_number(num_bytes / scale)} {unit}"
