"""One label of a run per label, trained again or replaced; the others are not touched."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from paragan.config.run import Run
from paragan.core.atomic_write import write_whole
from paragan.core.errors import Unusable
from paragan.core.schema import build, read_yaml
from paragan.models.model import load_model, model_folder, numbered, part, put_part
from paragan.models.sampler import Sampler
from paragan.nets import Spec
from paragan.train.per_label.label_dirs import SEEDS, found, seed_of, seeds
from paragan.train.per_label.lease_queue import Entry, Leases
from paragan.train.run_dir import existing

_GO_ON = "the command that trained it goes on with it, and scores all labels anew (--run-dir {})"


def again(path: Path, words: str, seed: int | None) -> list[str]:
    """Put labels back into the queue, with another seed; what was trained stays beside it, and in the model until there
    is something new. Returns what was done, a line each."""
    folder, run, classes = _opened(path)
    lines = list[str]()
    for label in numbered(words, classes):
        leases, entry = _free(folder, run, label)
        inside, known = found(folder, label), seeds(folder)
        new = seed if seed is not None else seed_of(folder, label, run.seed + label) + len(classes)
        write_whole(folder / SEEDS, json.dumps(known | {str(label): new}).encode())
        lines.append(f"label {label} ({classes[label]}) waits to be trained with seed {new}")
        if inside:
            final, number = part(folder / "labels", label), entry.number if entry else 0
            inside.rename(former := final.with_name(f"{final.name}.former-{number}"))
            lines.append(f"what was trained before is in {former}")
        _settle(leases, label, entry, "free", again=new)
    return [*lines, _GO_ON.format(folder)]


def replace(path: Path, words: str, by: Path) -> list[str]:
    """Let another model be the generator of a label. Unusable where it makes other images."""
    folder, run, classes = _opened(path)
    label, *more = numbered(words, classes)
    if more:
        raise Unusable(f"--by gives one label a model: {words} are several")
    model, whole = load_model(by, nets=run.nets), load_model(folder, nets=run.nets)
    wanted = dataclasses.replace(whole.spec, classes=0)
    if model.spec != wanted or not isinstance(model.sampler, Sampler):
        raise Unusable(f"--by {by} makes {_told(model.spec)}, and a label of {folder} has {_told(wanted)}")
    leases, entry = _free(folder, run, label)
    source = model_folder(by)
    put_part(folder / "model", label, source)
    _settle(leases, label, entry, "done", replaced=str(source.absolute()), images=0, seconds=0.0)
    return [f"label {label} ({classes[label]}) is {source} from now on; {_GO_ON.format(folder)}"]


def _opened(path: Path) -> tuple[Path, Run, tuple[str, ...]]:
    folder = existing(path)
    run = build(Run, read_yaml(folder / "run.yaml"))
    if not run.per_label:
        raise Unusable(f"{folder} is no run per label: its strategy is {run.strategy.name}")
    return folder, run, load_model(folder, nets=run.nets).classes


def _free(folder: Path, run: Run, label: int) -> tuple[Leases, Entry | None]:
    """The label's last word. Unusable where somebody may be training it."""
    assert run.per_label is not None
    leases = Leases(folder / "queue", run.per_label.lease_s)
    entry = leases.entry(f"{label:04d}")
    if entry and leases.busy(entry):
        raise Unusable(f"label {label} is being trained by {entry.worker}: wait, or stop it first")
    return leases, entry


def _settle(leases: Leases, label: int, entry: Entry | None, state: str, **about: Any) -> None:
    lease = leases.take(f"{label:04d}", entry.number if entry else 0, {"label": label})
    if lease is None:
        raise Unusable(f"label {label} was taken by a worker just now: wait, or stop it first")
    lease.end(state, **about)


def _told(spec: Spec) -> str:
    labelled = f" of {spec.classes} classes" if spec.classes else ", unconditional"
    if spec.values:
        return f"numbers {list(spec.values)}{labelled}"
    return f"images of {spec.resolution} px with {spec.channels} channels{labelled}"
