"""Numbers as a person reads them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

MINUS = "\N{MINUS SIGN}"
SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
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
    for name, text in fields(mapping, before):
        yield name.replace(".", " ").replace("_", " "), text


def fields(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The same by their dotted names: `("g.optimizer.lr", "0.001")`."""
    for key, item in mapping.items():
        name = f"{before}.{key}" if before else str(key)
        if isinstance(item, Mapping):
            yield from fields(item, name)
        else:
            yield name[:LONGEST], value(item)


def size(count: float) -> str:
    """Of bytes: 812 bytes, 1.25 MB, 3.4 GB."""
    if not math.isfinite(count):
        return "not finite"
    unit, scale = next((one for one in SIZES if abs(count) >= one[1]), SIZES[-1])
    return f"{number(count / scale)} {unit}"
