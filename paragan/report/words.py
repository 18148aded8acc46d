"""Numbers as a person reads them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

MINUS = "\N{MINUS SIGN}"
LONGEST = 200  # characters of one foreign value that a page shows


def number(value: float | None) -> str:
    """Four significant digits, whole above a thousand: 7.418, 0.00123, 12,346."""
    if value is None or not math.isfinite(value):
        return "not finite"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """The two largest units: 42.1 s, 3 min 5 s, 2 h 13 min, 4 d 7 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def value(item: Any) -> str:
    """One value of a protocol or of a run, whatever it is."""
    if isinstance(item, bool):
        return "yes" if item else "no"
    if item is None:
        return "none"
    if isinstance(item, int):
        return f"{item:,}"
    if isinstance(item, float):
        return f"{item:.6g}"
    text = ", ".join(map(value, item)) if isinstance(item, list | tuple) else str(item)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def entries(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a nested mapping: `("reference split", "train")`."""
    for key, item in mapping.items():
        name = f"{before} {key}".strip().replace("_", " ")
        if isinstance(item, Mapping):
            yield from entries(item, name)
        else:
            yield name[:LONGEST], value(item)
