"""One label of a run per label, trained again or replaced; the others are not touched."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from paragan.config.run import Run
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, read_yaml
from paragan.models.model import find_model_dir, install_label_model, label_dir, load_model, parse_labels
from paragan.models.sampler import Sampler
from paragan.nets import Spec
from paragan.train.per_label.label_dirs import SEEDS_FILE, find_label_dir, label_seed, read_label_seeds
from paragan.train.per_label.lease_queue import LeaseEntry, LeaseQueue
from paragan.train.run_dir import require_run_dir

_NEXT_STEP = "the command that trained it goes on with it, and scores all labels anew (--run-dir {})"


def retrain(path: Path, label_text: str, seed: int | None) -> list[str]:
    """Put labels back into the queue, with another seed; what was trained stays beside it, and in the model until there
    is something new. Returns what was done, a line each."""
    folder, run, classes = _open_per_label_run(path)
    lines = list[str]()
    for label in parse_labels(label_text, classes):
        leases, entry = _require_idle(folder, run, label)
        inside, known = find_label_dir(folder, label), read_label_seeds(folder)
        new = seed if seed is not None else label_seed(folder, label, run.seed + label) + len(classes)
        atomic_write_bytes(folder / SEEDS_FILE, json.dumps(known | {str(label): new}).encode())
        lines.append(f"label {label} ({classes[label]}) waits to be trained with seed {new}")
        if inside:
            final, number = label_dir(folder / "labels", label), entry.lease_number if entry else 0
            inside.rename(former := final.with_name(f"{final.name}.former-{number}"))
            lines.append(f"what was trained before is in {former}")
        _set_state(leases, label, entry, "free", again=new)
    return [*lines, _NEXT_STEP.format(folder)]


def replace_label(path: Path, label_text: str, replacement: Path) -> list[str]:
    """Let another model be the generator of a label. Unusable where it makes other images."""
    folder, run, classes = _open_per_label_run(path)
    label, *more = parse_labels(label_text, classes)
    if more:
        raise UsageError(f"--replace-with gives one label a model: {label_text} are several")
    model, whole = load_model(replacement, nets=run.nets), load_model(folder, nets=run.nets)
    wanted = dataclasses.replace(whole.spec, classes=0)
    if model.spec != wanted or not isinstance(model.sampler, Sampler):
        raise UsageError(
            f"--replace-with {replacement} makes {_describe_spec(model.spec)}, and a label of {folder} has {_describe_spec(wanted)}"
        )
    leases, entry = _require_idle(folder, run, label)
    source = find_model_dir(replacement)
    install_label_model(folder / "model", label, source)
    _set_state(leases, label, entry, "done", replaced=str(source.absolute()), images=0, seconds=0.0)
    return [f"label {label} ({classes[label]}) is {source} from now on; {_NEXT_STEP.format(folder)}"]


def _open_per_label_run(path: Path) -> tuple[Path, Run, tuple[str, ...]]:
    folder = require_run_dir(path)
    run = from_dict(Run, read_yaml(folder / "run.yaml"))
    if not run.per_label:
        raise UsageError(f"{folder} is no run per label: its strategy is {run.strategy.name}")
    return folder, run, load_model(folder, nets=run.nets).classes


def _require_idle(folder: Path, run: Run, label: int) -> tuple[LeaseQueue, LeaseEntry | None]:
    """The label's last word. Unusable where somebody may be training it."""
    assert run.per_label is not None
    leases = LeaseQueue(folder / "queue", run.per_label.lease_s)
    entry = leases.entry(f"{label:04d}")
    if entry and leases.is_busy(entry):
        raise UsageError(f"label {label} is being trained by {entry.worker}: wait, or stop it first")
    return leases, entry


def _set_state(lease_queue: LeaseQueue, label: int, entry: LeaseEntry | None, state: str, **metadata: Any) -> None:
    lease = lease_queue.acquire(f"{label:04d}", entry.lease_number if entry else 0, {"label": label})
    if lease is None:
        raise UsageError(f"label {label} was taken by a worker just now: wait, or stop it first")
    lease.release(state, **metadata)


def _describe_spec(spec: Spec) -> str:
    labelled = f" of {spec.classes} classes" if spec.classes else ", unconditional"
    if spec.array_shape:
        return f"numbers {list(spec.array_shape)}{labelled}"
    return f"images of {spec.resolution} px with {spec.channels} channels{labelled}"
