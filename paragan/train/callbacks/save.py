"""TODO: docstring of paragan/train/callbacks/save.py"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.config.resolve import spec_of
from paragan.config.run import written
from paragan.core.errors import Diverged
from paragan.data.dataset import Images
from paragan.models.bn_recalibration import standing
from paragan.models.model import model_config, remove_model, save_model
from paragan.models.sampler import Prior
from paragan.train.averaged_model import evaluated, source_of
from paragan.train.callbacks.log import Log
from paragan.train.checkpoint import Checkpoints, network
from paragan.train.session import Session, every


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
