"""Find the folder of a label of a per-label run, and its seed.

labels/0003       not being trained
labels/0003.2     being trained under its second lease
labels/seeds.json seeds of labels that are trained again
"""

from __future__ import annotations

import json
from pathlib import Path

from paragan.core.errors import UsageError
from paragan.models.per_label_layout import label_dir
from paragan.train.run_dir import RunDir

SEEDS_FILE = Path("labels", "seeds.json")


def leased_label_dir(folder: Path, label: int, lease_number: int) -> Path:
    """Return the folder of a label while it is trained under the lease of this number."""
    final = label_dir(folder / "labels", label)
    return final.with_name(f"{final.name}.{lease_number}")


def find_label_dir(folder: Path, label: int) -> Path | None:
    """Return the folder of a label: the finished one, or the one that was trained furthest; None if not started."""
    final = label_dir(folder / "labels", label)
    if final.is_dir():
        return final
    leased = [p for p in final.parent.glob(f"{final.name}.*") if p.suffix[1:].isdecimal() and p.is_dir()]
    return max(leased, key=lambda p: (RunDir(p).trained_images, int(p.suffix[1:])), default=None)


def label_seed(folder: Path, label: int, default: int) -> int:
    """Return the seed of a label."""
    return int(read_label_seeds(folder).get(str(label), default))


def read_label_seeds(folder: Path) -> dict[str, int]:
    """Return label -> seed, of labels that are trained again with another seed than that of the run."""
    path = folder / SEEDS_FILE
    try:
        return {str(label): int(seed) for label, seed in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}). Remove it to use the seeds of the run") from error
