"""One generator for all labels, distilled from those of a run per label: an ordinary run, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.comm.world import World
from paragan.config.resolve import load_images
from paragan.config.run import Run
from paragan.core.atomic_write import write_whole
from paragan.core.errors import Unusable
from paragan.core.schema import build, override, plain, read_yaml
from paragan.data.dataset import Images
from paragan.eval.evaluate import Protocol, Score
from paragan.models.model import bytes_of, load_model
from paragan.strategies.sync import Sync
from paragan.train.callbacks.scoring import score
from paragan.train.console import Screen
from paragan.train.run_dir import existing

NAME = "merge.json"


def student(per_label: Path, settings: Sequence[tuple[str, str]]) -> Run:
    """The run that learns from the run per label in a folder: its record, but one conditional game. settings: laid over
    it. Unusable where the folder holds another run."""
    folder = existing(per_label).absolute()
    run = build(Run, read_yaml(folder / "run.yaml"))
    if not run.per_label:
        raise Unusable(f"{folder} has one generator for all labels already: merge is for runs of --strategy per-label")
    run = dataclasses.replace(run, strategy=Sync(), init_from="", teacher=str(folder))
    return build(Run, override(plain(run), settings))


@dataclass(frozen=True)
class Side:
    """One of the two models that are compared."""

    folder: Path
    kimg: float
    bytes: int
    scores: Sequence[Score]

    def to_json(self) -> dict[str, Any]:
        scores = [one.to_json() for one in self.scores]
        return {"folder": str(self.folder), "kimg": self.kimg, "bytes": self.bytes, "scores": scores}


def compare(run: Run, folder: Path, world: World, screen: Screen) -> None:
    """Measure the model of a finished merge and the one per label that it learnt from in the same way, all ranks
    together; show both side by side, and write them to merge.json."""
    images = load_images(run)
    screen.say(f"scoring {run.evaluation.count:,} fakes of {run.teacher} and of {folder}")
    before, after = (_measured(path, run, images, world) for path in (Path(run.teacher), folder))
    if not world.first:
        return
    told = {"teacher_weight": run.teacher_weight, "per_label": before.to_json(), "merged": after.to_json()}
    write_whole(folder / NAME, json.dumps(told, indent=1).encode())
    for line in table(before, after):
        screen.say(line)


def _measured(folder: Path, run: Run, images: Images, world: World) -> Side:
    model = load_model(folder, world.device, run.nets, images)
    protocol = Protocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=run.seed)
    wanted = run.evaluation
    scores = score(model.sampler, images, wanted, protocol, world.everyone) if wanted.metrics else []
    return Side(folder, model.kimg, bytes_of(folder), scores)


def table(before: Side, after: Side) -> list[str]:
    """Both side by side."""
    rows = [("", "per label", "merged")]
    rows += [(a.name, f"{a.value:.4g}", f"{b.value:.4g}") for a, b in zip(before.scores, after.scores, strict=True)]
    rows += [
        ("kimg", f"{before.kimg:g}", f"{after.kimg:g}"),
        ("bytes of G", f"{before.bytes:,}", f"{after.bytes:,}"),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}" for name, a, b in rows]
