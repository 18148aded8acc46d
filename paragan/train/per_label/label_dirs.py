"""Where a label of a run per label is, and its seed.

labels/0003       not being trained
labels/0003.2     trained by who took it the second time
labels/seeds.json of labels that are trained again
"""

from __future__ import annotations

import json
from pathlib import Path

from paragan.core.errors import Unusable
from paragan.models.model import part
from paragan.train.run_dir import RunFolder

SEEDS = Path("labels", "seeds.json")


def taken(folder: Path, label: int, number: int) -> Path:
    """Where a label is while it is trained by who took it the number-th time."""
    final = part(folder / "labels", label)
    return final.with_name(f"{final.name}.{number}")


def found(folder: Path, label: int) -> Path | None:
    """Where a label is now, if it was begun: done, or of those that were taken the one that has come furthest."""
    final = part(folder / "labels", label)
    if final.is_dir():
        return final
    begun = [p for p in final.parent.glob(f"{final.name}.*") if p.suffix[1:].isdecimal() and p.is_dir()]
    return max(begun, key=lambda p: (RunFolder(p).images_seen, int(p.suffix[1:])), default=None)


def seed_of(folder: Path, label: int, default: int) -> int:
    """The seed of a label's game."""
    return int(seeds(folder).get(str(label), default))


def seeds(folder: Path) -> dict[str, int]:
    path = folder / SEEDS
    try:
        return {str(label): int(seed) for label, seed in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise Unusable(f"{path} cannot be read: {error}; remove it, and labels have the seeds of the run") from error
