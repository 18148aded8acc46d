"""Workers of a run per label: how the processes of a launcher find its folder, and part."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paragan.comm.world import Place, World
from paragan.config.resolve import load_images, spec_of
from paragan.config.run import Run
from paragan.core.errors import Unusable
from paragan.core.schema import build, differences, plain, read_yaml
from paragan.data.dataset import Images
from paragan.models.model import begin_per_label
from paragan.models.model_files import read_config
from paragan.models.sampler import Prior
from paragan.strategies.per_label_wcgan import PerLabel
from paragan.train.callbacks.sample_images import draw_reals
from paragan.train.console import Screen
from paragan.train.per_label.jobs import jobs, rare, told
from paragan.train.per_label.lease_queue import Leases
from paragan.train.per_label.worker import POOLED, Worker, had
from paragan.train.rank_agreement import refuse_disagreement, refuse_unshared, together
from paragan.train.run_dir import RunFolder, Wanted, join
from paragan.train.session import refuse_start, set_threads
from paragan.train.trainer import LOAD_TIMEOUT_S, resolved

BUDGET = ("kimg", "strategy.minutes")  # how long each game is, so that all workers have to know it alike


def train_labels(run: Run, place: Place, device: torch.device, wanted: Wanted, reasons: Sequence[str]) -> Path:
    """Work on a run per label until it is done, as one of any number of processes: where it is. They meet to find the
    folder, and exchange nothing afterwards, but for the ranks of one label. reasons: said first, a line each."""
    screen = Screen(place.rank == 0)
    world = World.join(place, device, run.timeout_s)
    with left_if_broken(world):
        set_threads(run, world)
        images = together(world, lambda: load_images(run), LOAD_TIMEOUT_S)
        run = together(world, lambda: resolved(run, images))
        refuse_disagreement(run, world)
        path = Path(world.agree(together(world, lambda: _enter(run, images, wanted, world)))[0])
        refuse_unshared(path, world)
        found, strategy = jobs(run, images, path), run.per_label
        assert strategy is not None
        team = strategy.team(world.rank, world.size, len(found))
        together(world, lambda: _fit(run, strategy, len(team)))
    for line in (*reasons, *images.describe().splitlines(), f"run folder {path}", told(found), rare(strategy, images)):
        if line:
            screen.say(line)
    with world.leave_with(team) as mine:
        Worker(run, images, found, path, mine, screen).work()
    return path


@contextlib.contextmanager
def left_if_broken(world: World) -> Iterator[None]:
    """Inside, whatever goes wrong ends this rank's part in the world; else it stays."""
    try:
        yield
    except BaseException as error:
        world.__exit__(type(error), error, None)
        raise


def _fit(run: Run, strategy: PerLabel, ranks: int) -> bool:
    """Unusable where so many ranks cannot play a label together."""
    if ranks > run.lanes:
        raise Unusable(f"{ranks} ranks of a label cannot share --lanes {run.lanes}: use --strategy.ranks={run.lanes}")
    strategy.within.check(ranks)
    return True


def _enter(run: Run, images: Images, wanted: Wanted, world: World) -> str:
    """Rank 0 finds or makes the folder, and what all workers need in it."""
    if not world.first:
        return "."
    found = jobs(run, images, Path())  # nothing is made for what could not begin
    spec = replace(spec_of(run, images), classes=0)  # of a label's networks
    folder = join(wanted, run, lambda path: finished(path, images), lambda: refuse_start(run, spec))
    path = folder.path
    try:
        _probe(path)
        _agree_on_budget(folder, run)
        model = path / "model"
        prior, classes = Prior.of(images.labels, len(images.classes)), images.classes
        counts = [job.of for job in sorted(found, key=lambda job: job.label)]
        _refuse_other_images(model, images, run)
        begin_per_label(model, spec_of(run, images), prior, classes, data=images.fingerprint, images=counts)
        draw_reals(images, path, nets=run.nets)
    except OSError as error:
        raise Unusable(f"{path} cannot be written: {error.strerror}; give another --run-dir or --outdir") from error
    return str(path)


def _refuse_other_images(model: Path, images: Images, run: Run) -> None:
    """Generators belong to the images they were trained on: other ones may have other labels."""
    if not (model / "config.json").exists():
        return
    former = read_config(model)
    if former.get("data") != images.fingerprint:
        raise Unusable(f"--data {run.data.told} holds other images than those that {model.parent} is trained on")


def _probe(path: Path) -> None:
    """OSError where nothing can be written."""
    mark = path / f".probe-{secrets.token_hex(8)}"
    mark.write_bytes(bytes(4096))
    mark.unlink()


def finished(path: Path, images: Images) -> bool:
    """Whether nothing is left to do in a folder."""
    try:
        run = build(Run, read_yaml(path / "run.yaml"))
        entries, found = Leases(path / "queue", 1.0).entries(), jobs(run, images, path)
    except Unusable:
        return True
    of = {job.name: e.number for job in found if (e := entries.get(job.name)) and e.state == "done" and had(job, e)}
    last = entries.get(POOLED)
    return last is not None and last.state == "done" and len(of) == len(found) and last.about.get("of") == of


def _agree_on_budget(folder: RunFolder, run: Run) -> None:
    """Another budget than before is everybody's: refused while somebody works with the former."""
    former = folder.record() or {}
    other = [d for d in differences(former, plain(run)) if d[0] in BUDGET]
    if not other:
        return
    assert run.per_label is not None
    leases = Leases(folder.path / "queue", run.per_label.lease_s)
    for entry in leases.entries().values():
        if leases.busy(entry):
            name, before, now = other[0]
            raise Unusable(
                f"{folder.path} is being trained by {entry.worker} with {name}={before}, not {now}: give the same, or "
                "stop the others first"
            )
    folder.write_record(run)
