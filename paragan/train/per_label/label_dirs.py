"""Where a label of a run per label is, and its seed.

labels/0003       not being trained
labels/0003.2     trained by who took it the second time
labels/seeds.json of labels that are trained again
"""

from __future__ import annotations

import json
from pathlib import Path

from paragan.core.errors import UsageError
from paragan.models.model import label_dir
from paragan.train.run_dir import RunDir

SEEDS_FILE = Path("labels", "seeds.json")


def leased_label_dir(folder: Path, label: int, lease_number: int) -> Path:
    """Where a label is while it is trained by who took it the number-th time."""
    final = label_dir(folder / "labels", label)
    return final.with_name(f"{final.name}.{lease_number}")


def find_label_dir(folder: Path, label: int) -> Path | None:
    """Where a label is now, if it was begun: done, or of those that were taken the one that has come furthest."""
    final = label_dir(folder / "labels", label)
    if final.is_dir():
        return final
    begun = [p for p in final.parent.glob(f"{final.name}.*") if p.suffix[1:].isdecimal() and p.is_dir()]
    return max(begun, key=lambda p: (RunDir(p).trained_images, int(p.suffix[1:])), default=None)


def label_seed(folder: Path, label: int, default: int) -> int:
    """The seed of a label's game."""
    return int(read_label_seeds(folder).get(str(label), default))


def read_label_seeds(folder: Path) -> dict[str, int]:
    path = folder / SEEDS_FILE
    try:
        return {str(label): int(seed) for label, seed in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}; remove it, and labels have the seeds of the run") from error
