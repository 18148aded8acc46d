"""Train one label of a per-label run again, or replace its model; the others are not touched (`paragan label`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from paragan.config.run import Run
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.models.model import install_label_model, load_model, parse_labels
from paragan.models.model_files import find_model_dir
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import Sampler
from paragan.nets import Spec
from paragan.train.per_label.label_dirs import SEEDS_FILE, find_label_dir, label_seed, read_label_seeds
from paragan.train.per_label.lease_queue import LeaseEntry, LeaseQueue
from paragan.train.run_dir import require_run_dir
from paragan.train.saved_run import load_run

_NEXT_STEP = "repeat the command that trained it to continue, and to score all labels again (--run-dir {})"


def retrain(path: Path, label_text: str, seed: int | None) -> list[str]:
    """Put labels back into the queue, with another seed.

    What was trained stays beside it, and in the model until there is something new.

    Args:
        label_text: labels, as the user wrote them.
        seed: for all of them; None for a new one each.

    Returns:
        Lines that say what was done.
    """
    folder, run, lease_queue, classes = _open_per_label_run(path)
    lines: list[str] = []
    for label in parse_labels(label_text, classes):
        entry = _require_idle(lease_queue, label)
        trained_dir = find_label_dir(folder, label)
        seeds = read_label_seeds(folder)
        new_seed = seed
        if new_seed is None:
            new_seed = label_seed(folder, label, run.seed + label) + len(classes)
        atomic_write_bytes(folder / SEEDS_FILE, json.dumps(seeds | {str(label): new_seed}).encode())
        lines.append(f"label {label} ({classes[label]}) waits to be trained with seed {new_seed}")
        if trained_dir:
            final = label_dir(folder / "labels", label)
            former = final.with_name(f"{final.name}.former-{entry.lease_number if entry else 0}")
            trained_dir.rename(former)
            lines.append(f"what was trained before is in {former}")
        _set_state(lease_queue, label, entry, "free", retrain_seed=new_seed)
    return [*lines, _NEXT_STEP.format(folder)]


def replace_label(path: Path, label_text: str, replacement: Path) -> list[str]:
    """Use another model as the generator of a label. Returns lines that say what was done.

    Raises:
        UsageError: it makes other images, or several labels are named.
    """
    folder, run, lease_queue, classes = _open_per_label_run(path)
    label, *more = parse_labels(label_text, classes)
    if more:
        raise UsageError(f"--replace-with {replacement}: is for one label, and {label_text} are several. Name one")
    model = load_model(replacement, nets=run.nets)
    label_spec = dataclasses.replace(load_model(folder, nets=run.nets).spec, classes=0)
    if model.spec != label_spec or not isinstance(model.sampler, Sampler):
        raise UsageError(
            f"--replace-with {replacement}: makes {_describe_spec(model.spec)}, and a label of {folder} has "
            f"{_describe_spec(label_spec)}"
        )
    entry = _require_idle(lease_queue, label)
    source = find_model_dir(replacement)
    install_label_model(folder / "model", label, source)
    _set_state(lease_queue, label, entry, "done", replaced=str(source.absolute()), images=0, seconds=0.0)
    return [f"label {label} ({classes[label]}) is {source} from now on; {_NEXT_STEP.format(folder)}"]


def _open_per_label_run(path: Path) -> tuple[Path, Run, LeaseQueue, tuple[str, ...]]:
    """Return the folder, the run, the queue and the classes. Raises UsageError if the run has another strategy."""
    folder = require_run_dir(path)
    run = load_run(folder)
    if not run.per_label:
        raise UsageError(f"{folder}: no run of --strategy per-label, but of {run.strategy.name}")
    lease_queue = LeaseQueue(folder / "queue", run.per_label.lease_s)
    return folder, run, lease_queue, load_model(folder, nets=run.nets).classes


def _require_idle(lease_queue: LeaseQueue, label: int) -> LeaseEntry | None:
    """Return the last entry of a label in the queue. Raises UsageError if a worker may be training it."""
    entry = lease_queue.entry(f"{label:04d}")
    if entry and lease_queue.is_busy(entry):
        raise UsageError(f"label {label}: is being trained by {entry.worker}. Wait, or stop it first")
    return entry


def _set_state(lease_queue: LeaseQueue, label: int, entry: LeaseEntry | None, state: str, **metadata: Any) -> None:
    lease = lease_queue.acquire(f"{label:04d}", entry.lease_number if entry else 0, {"label": label})
    if lease is None:
        raise UsageError(f"label {label}: was taken by a worker just now. Wait, or stop it first")
    lease.release(state, **metadata)


def _describe_spec(spec: Spec) -> str:
    classes = f" of {spec.classes} classes" if spec.classes else ", unconditional"
    if spec.array_shape:
        return f"arrays {list(spec.array_shape)}{classes}"
    return f"images of {spec.resolution} px with {spec.channels} channels{classes}"
