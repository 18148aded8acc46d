"""Measure what an installation of the package without extras takes on disk, of this checkout and of another one.

    python -m benchmarks.speed.install_size --reference ../before [--json F]

Counts the installed files of every package that `dependencies` of pyproject.toml names, and of those that these need.
All must be installed in this environment, which may have others.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.lib.timing import describe_machine, format_table, save_json


def required_packages(requirements: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the packages that these requirements bring, by name."""
    sizes: dict[str, int] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    remaining = [Requirement(text) for text in requirements]
    while remaining:
        requirement = remaining.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in visited:
            continue
        visited.add(key)
        package = distribution(name)
        paths = (Path(str(file.locate())) for file in package.files or ())
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())
        for text in package.requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                remaining.append(needed)
    return sizes


def base_requirements(checkout: Path) -> list[str]:
    """Return `dependencies` of a checkout's pyproject.toml."""
    return tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["dependencies"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--current", type=Path, default=Path(__file__).parents[2], metavar="DIR", help="this one")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    sizes = {
        name: required_packages(base_requirements(checkout))
        for name, checkout in (("before", options.reference), ("after", options.current))
    }
    totals = {name: {"bytes": sum(packages.values()), "packages": len(packages)} for name, packages in sizes.items()}
    all_sizes = sizes["before"] | sizes["after"]
    names = sorted(all_sizes, key=all_sizes.__getitem__, reverse=True)
    rows = [[name, *(f"{packages.get(name, 0) / 1e6:.1f}" for packages in sizes.values())] for name in names]
    print(format_table(["package", "before, MB", "after, MB"], rows))
    print(totals)
    save_json(options.json, {"machine": describe_machine(), "totals": totals, "packages": sizes})


if __name__ == "__main__":
    main()
