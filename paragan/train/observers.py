"""What looks on between rounds: each observer knows when it has something to do."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.aside import aside
from ..data.bad import Bad
from ..data.drawn import checked, drawn, how_many
from ..data.grid import grid, readable
from ..data.images import Images
from ..errors import Diverged
from ..report.records import Records
from . import lags
from .checkpoint import Checkpoints, network
from .consensus import consensus, evaluated
from .loop import Session
from .model import model_config, remove_model, save_model, standing
from .own import given_of, picture_of
from .progress import Screen
from .run import spec_of, written
from .sampler import Inputs, Latents, Merged, Prior, Sampler, to_numbers, to_uint8
from .watch import Watch

GRID_SEED = 0


def every(session: Session, kimg: float) -> bool:
    """Whether the round just played crossed a multiple of `kimg`."""
    return session.clock.crossed(round(1000 * kimg))


def refuse_nonfinite(losses: Mapping[str, float], advice: str) -> None:
    """Diverged where a loss is not finite."""
    for name, value in losses.items():
        if name.startswith("Loss/") and not math.isfinite(value):
            raise Diverged(f"{name} is {value}: the game diverged; {advice}", everywhere=True)


@dataclass
class Log:
    """A line of stats every tick, the first after the first round; stops the run where a loss is not finite."""

    folder: Path
    screen: Screen
    standing: Callable[[], str]  # for messages: which checkpoint stands
    watch: Watch
    stats: Records = field(init=False)
    _written: int = -1
    _board: Any = None

    def __post_init__(self) -> None:
        self.stats = Records(self.folder / "stats.jsonl")

    def __call__(self, session: Session) -> None:
        if session.clock.step == 1 or every(session, session.run.output.tick_kimg) or session.clock.done:
            self.write(session)

    def write(self, session: Session) -> None:
        """End the tick here (once a step)."""
        if self._written == session.clock.step:
            return
        self._written = session.clock.step
        line = session.stats.tick(session.clock.images, session.clock.step) | consensus(session)
        line |= self.watch.signs(session)
        if session.world.first:
            decisions = session.lanes.decisions()
            self.stats.append(line | ({"Data/decisions": decisions} if decisions else {}))
            if session.role.teams:
                lags.record(self.folder, session.clock.step, session.stats.lags)
            self.screen.tick(line)
            for name, value in line.items():
                self.board.add_scalar(name, value, session.clock.images)
        self.watch(session, line)
        self.refuse_nonfinite(line)

    def refuse_nonfinite(self, losses: Mapping[str, float]) -> None:
        advice = f"{self.standing()}. Lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1"
        refuse_nonfinite(losses, advice)

    @property
    def board(self) -> Any:
        """TensorBoard's writer, made when first wanted: its import takes a second."""
        if self._board is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._board = SummaryWriter(str(self.folder))
        return self._board

    def close(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):  # of a full disk: stats.jsonl has it all
                self._board.close()


@dataclass
class BadFiles:
    """bad_files.txt: the images that this rank could not use, and why, as soon as a tick ends after they were met."""

    folder: Path
    images: Images
    _listed: int = 0

    def __call__(self, session: Session) -> None:
        bad = self.images.bad
        if bad is None or len(bad.reasons) == self._listed:
            return
        if session.clock.step <= 1 or every(session, session.run.output.tick_kimg) or session.clock.done:
            self.list(bad)

    def list(self, bad: Bad) -> None:
        """Add what is not there yet: another rank, or this run before it was stopped, may have met it."""
        path, lines = self.folder / "bad_files.txt", bad.lines()
        there = set(path.read_text("utf-8").splitlines()) if path.exists() else set()
        with path.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines if line not in there).encode())
        self._listed = len(lines)


@dataclass(frozen=True)
class Pictures:
    """Sample grids of the averaged generator, always from the same latents; the first after the first round."""

    folder: Path
    images: Images
    log: Log

    def __call__(self, session: Session) -> None:
        due = session.clock.step == 1 or every(session, session.run.output.fakes_kimg) or session.clock.done
        if due and (session.world.first or not session.role.first_has_all):
            self.draw(session)

    def draw(self, session: Session) -> None:
        run, path = session.run, self.folder / f"fakes{round(session.clock.kimg):06d}.png"
        with averaged_sampler(session, self.images) as sampler:
            if not session.world.first:
                return
            pictures = draw_fakes(sampler, run.nets, self.images, session.game.labels, path)
        self.log.board.add_images("fakes", pictures[:64], session.clock.images, dataformats="NHWC")


def draw_fakes(
    sampler: Sampler | Merged, nets: Any, images: Images, labels: np.ndarray | None, path: Path
) -> np.ndarray:
    """Write the picture of a sampler's images: a grid, or as their networks or their shape have it. Returns what is in
    it, [n, H, W, 3] uint8. labels : of the data, where G is told them."""
    if plain_grid(nets, images) or (isinstance(sampler, Merged) and not images.numbers):
        indices, wanted, columns = layout(labels)
        fakes = sampler.images(indices, wanted, GRID_SEED).permute(0, 2, 3, 1).numpy()
        save_grid(fakes, columns, path)
        return fakes if fakes.shape[-1] == 3 else fakes.repeat(3, axis=-1)
    shown = range(how_many(images.shape))
    picture = pictured(nets, sampler.images(shown, sampler.labels(shown, GRID_SEED), GRID_SEED).numpy(), images)
    save_picture(picture, path)
    return picture[None]


def plain_grid(nets: Any, images: Images) -> bool:
    """Whether samples are shown as a grid of images, each from a latent."""
    return not images.numbers and picture_of(nets) is None and given_of(nets) is None


def pictured(nets: Any, made: np.ndarray, images: Images) -> np.ndarray:
    """Samples [n, ...] as their networks draw them, or by their shape; images that were made of images beside those.
    [H, W, 3] uint8."""
    reals = images.images[np.arange(len(made)) % len(images.images)]
    if not images.numbers:
        reals = reals.transpose(0, 3, 1, 2)
    if draw := picture_of(nets):
        return checked(draw(made, reals), nets.name)
    if images.numbers:
        return drawn(made, reals)
    pairs = np.stack([reals, made], 1).reshape(-1, *made.shape[1:]).transpose(0, 2, 3, 1)
    sheet = np.asarray(grid(pairs, 12, scale=readable(pairs)))
    return sheet if sheet.ndim == 3 else sheet[:, :, None].repeat(3, 2)


def save_picture(picture: np.ndarray, path: Path) -> None:
    with aside(path) as hidden:
        Image.fromarray(picture).save(hidden, format="png")


def draw_reals(images: Images, folder: Path, labelled: bool = True, nets: Any = None) -> None:
    """reals.png, in the layout of the fakes, once."""
    path = folder / "reals.png"
    if path.exists():
        return
    if not plain_grid(nets, images):
        reals = images.images[np.arange(how_many(images.shape)) % len(images.images)]
        save_picture(pictured(nets, reals if images.numbers else reals.transpose(0, 3, 1, 2), images), path)
        return
    labels = images.labels if labelled else None
    indices, wanted, columns = layout(labels)
    chosen = np.arange(len(indices)) % len(images.images)
    if wanted is not None and labels is not None:
        for label in np.unique(wanted):
            of_label, there = np.flatnonzero(labels == label), np.flatnonzero(wanted == label)
            chosen[there] = of_label[np.arange(len(there)) % len(of_label)]
    save_grid(images.images[chosen], columns, path)


def layout(labels: np.ndarray | None) -> tuple[list[int], np.ndarray | None, int]:
    """(sample indices, labels, columns) of a grid: a column a class that has images (the first 16), else 10 x 10."""
    if labels is None:
        return list(range(100)), None, 10
    shown = np.unique(labels)[:16].astype(np.int64)
    rows = max(6, min(10, 100 // len(shown)))
    return list(range(rows * len(shown))), np.tile(shown, rows), len(shown)


def save_grid(images: np.ndarray, columns: int, path: Path) -> None:
    aside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    grid(images, columns, scale=readable(images)).save(aside, format="png")
    aside.rename(path)


@contextlib.contextmanager
def averaged_sampler(session: Session, images: Images) -> Iterator[Sampler]:
    """The averaged generator of a session, with standing statistics, as a Sampler. Where ranks hold players of their
    own it is their mean, and all ranks enter together."""
    game = session.game
    classes = 0 if game.labels is None else int(game.labels.max()) + 1
    source = source_of(session, images)
    finish = to_numbers if images.numbers else to_uint8
    with evaluated(session), standing(game.g, source, game.labels, session.run.seed) as g:
        yield Sampler(g, source, Prior.of(game.labels, classes), session.world.device, finish=finish)


def source_of(session: Session, images: Images) -> Latents | Inputs:
    """What G makes its images from."""
    game = session.game
    return Inputs(images, game.given) if game.given else Latents(game.latent)


@dataclass
class Save:
    """Checkpoints, and the model beside them."""

    folder: Path
    checkpoints: Checkpoints
    images: Images
    log: Log
    _saved: int = -1

    def __call__(self, session: Session) -> None:
        if every(session, session.run.output.checkpoint_kimg) or session.clock.done:
            self.save(session)

    def wrote(self, session: Session) -> bool:
        """Whether model/ holds what the session now is."""
        return self._saved == session.clock.step

    def again(self) -> None:
        """Forget that this step was saved: not all ranks may have come so far."""
        self._saved = -1

    def save(self, session: Session, suffix: str = "") -> Path | None:
        """Write a checkpoint (once a step) of a state that was checked to be finite: where, or None if it was already.
        One with a suffix is not found by those who go on with the run."""
        clock = session.clock
        if self._saved == clock.step and not suffix:
            return None
        if session.role.settle:
            session.role.settle()
        self.log.refuse_nonfinite(session.stats.losses())
        self._refuse_nonfinite(session)
        record = {
            "run": written(session.run),
            "data": self.images.fingerprint,
            "threads": torch.get_num_threads(),
            "networks": {player.name: network(player) for player in session.game.players},
            "rollbacks": clock.rollbacks,
        }
        now = {"step": clock.step, "images": clock.images, "seconds": round(clock.seconds, 3)}
        path = self.checkpoints.save(session.game.players, now, record, session.role, suffix)
        self._saved = clock.step
        if not suffix:
            self.write_model(session)
        return path

    def _refuse_nonfinite(self, session: Session) -> None:
        flags = torch.stack([p.flat.params.isfinite().all().logical_not() for p in session.game.players])
        counts = flags.float().cpu()
        session.world.everyone.sum(counts).wait()
        for player, count in zip(session.game.players, counts.tolist()):
            if count:
                raise Diverged(
                    f"{player.name} has weights that are not finite at {session.clock.kimg:.1f} kimg; "
                    f"nothing was written, {self.log.standing()}",
                    everywhere=True,
                )

    def replace_model(self, session: Session) -> None:
        """Let model/ hold what the session now is; nothing of one that has not begun."""
        if session.clock.step:
            self.write_model(session)
        elif session.world.first:
            remove_model(self.folder / "model")

    def write_model(self, session: Session, name: str = "model", **more: Any) -> None:
        """more: what else its config.json says."""
        if session.role.first_has_all and not session.world.first:
            return
        game, run = session.game, session.run
        classes = self.images.classes if game.labels is not None else ()
        config = model_config(
            run.nets,
            spec_of(run, self.images),
            Prior.of(game.labels, len(classes)),
            classes,
            recipe=run.recipe,
            kimg=session.clock.kimg,
            half_life_kimg=run.average.half_life_kimg,
            batch_norm="standing" if game.g.coupled else "none",
            data=self.images.fingerprint,
            **more,
        )
        source = source_of(session, self.images)
        with evaluated(session), standing(game.g, source, game.labels, run.seed) as g:
            if session.world.first:
                save_model(self.folder / name, g, game.d.net, config)
