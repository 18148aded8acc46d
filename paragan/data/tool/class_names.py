"""Names of classes as names of folders: none leads out of its folder, and their order is that of the labels."""

from __future__ import annotations

from collections.abc import Sequence

_RESERVED = set('/\\:*?"<>|')  # by some file system or other
_LONGEST = 100  # bytes


def folder_names(classes: Sequence[str]) -> list[str]:
    """One for each class. Where the plain names would be equal, or sorted otherwise, all begin with their number."""
    plain = [plain_name(name) for name in classes]
    if plain == sorted(plain) and len({name.casefold() for name in plain}) == len(plain):
        return plain
    width = len(str(len(plain) - 1))
    return [_numbered(f"{number:0{width}d}", name) for number, name in enumerate(plain)]


def plain_name(name: str) -> str:
    """What of a name every file system takes as one visible folder; never empty."""
    kept = "".join(char if char.isprintable() and char not in _RESERVED else "_" for char in name)
    kept = kept.encode()[:_LONGEST].decode(errors="ignore").strip(" ")
    kept = "_" + kept[1:] if kept.startswith(".") else kept  # hidden files do not count
    return kept.rstrip(". ") or "_"


def _numbered(number: str, name: str) -> str:
    """Numbers themselves only get their zeros."""
    return number if name.isdecimal() and name.lstrip("0") == number.lstrip("0") else f"{number}-{name}"
