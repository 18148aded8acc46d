"""Write checkpoints, and the model beside them, while a run trains.

Weights and losses are checked to be finite first, so no checkpoint holds a broken state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paragan.config.resolve import make_spec
from paragan.config.run import to_saved_dict
from paragan.core.errors import Diverged
from paragan.core.schema import to_dict
from paragan.data.dataset import Dataset
from paragan.models.bn_recalibration import recalibrated_bn
from paragan.models.model import make_model_config, remove_model, save_model
from paragan.models.sampler import LabelPrior
from paragan.train.averaged_model import averaged_networks, make_source
from paragan.train.callbacks.log import LogCallback
from paragan.train.checkpoint import Checkpoints
from paragan.train.loggers.logger import Logger
from paragan.train.session import Session, has_crossed_kimg

MODEL_FOLDER = "model"


@dataclass
class CheckpointCallback:
    """Saves checkpoints, and the model beside them."""

    folder: Path
    checkpoints: Checkpoints
    dataset: Dataset
    log: LogCallback
    logger: Logger = field(default_factory=Logger)
    _saved_step: int = -1

    def __call__(self, session: Session) -> None:
        if has_crossed_kimg(session, session.run.output.checkpoint_kimg) or session.clock.is_done:
            self.save(session)

    def is_saved(self, session: Session) -> bool:
        """Return True if the checkpoint and model/ are of this step."""
        return self._saved_step == session.clock.step

    def forget_saved_step(self) -> None:
        """Save this step again when asked: a rank that was lost may have left the checkpoint incomplete."""
        self._saved_step = -1

    def save(self, session: Session, suffix: str = "") -> Path | None:
        """Write a checkpoint of this step, unless there is one, and the model. All ranks call this.

        Args:
            suffix: appended to the name; a checkpoint with one is not found on resume, and the model is not written.

        Returns:
            The checkpoint, or None if this step was saved before.

        Raises:
            Diverged: losses or weights are not finite.
            RunError: the checkpoint could not be written.
        """
        clock = session.clock
        if self.is_saved(session) and not suffix:
            return None
        if session.role.drain:
            session.role.drain()
        self.log.check_finite(session.stats.mean_losses())
        self._check_finite_weights(session)
        metadata = {
            "run": to_saved_dict(session.run),
            "data": self.dataset.fingerprint,
            "threads": torch.get_num_threads(),
            "rollbacks": clock.rollbacks,
        }
        position = {"step": clock.step, "images": clock.images, "seconds": round(clock.seconds, 3)}
        path = self.checkpoints.save(session.game.players, position, metadata, session.role, suffix)
        self._saved_step = clock.step
        if not suffix:
            if session.world.is_main:
                self.logger.on_checkpoint(path, clock.images)
            self.write_model(session)
        return path

    def _check_finite_weights(self, session: Session) -> None:
        """Raise Diverged on all ranks if a player of any rank has weights that are not finite."""
        is_broken = torch.stack([p.flat.params.isfinite().all().logical_not() for p in session.game.players])
        num_broken = is_broken.float().cpu()
        session.world.all_ranks.all_reduce_sum(num_broken).wait()
        for player, count in zip(session.game.players, num_broken.tolist()):
            if count:
                raise Diverged(
                    f"{player.name} has weights that are not finite at {session.clock.kimg:.1f} kimg; "
                    f"nothing was written, {self.log.latest_checkpoint_message()}",
                    same_on_all_ranks=True,
                )

    def replace_model(self, session: Session) -> None:
        """Write model/ as the session is now; remove it if no round was played."""
        if session.clock.step:
            self.write_model(session)
        elif session.world.is_main:
            remove_model(self.folder / MODEL_FOLDER)

    def write_model(self, session: Session, name: str = MODEL_FOLDER, **extra: Any) -> None:
        """Write the averaged generator and the discriminator as a model folder.

        All ranks call this; they take part where rank 0 does not have both players.

        Args:
            extra: further entries of its config.json.
        """
        if session.role.main_has_all_players and not session.world.is_main:
            return
        game = session.game
        run = session.run
        classes = self.dataset.classes if game.labels is not None else ()
        config = make_model_config(
            run.nets,
            make_spec(run.data, self.dataset),
            LabelPrior.from_labels(game.labels, len(classes)),
            classes,
            recipe=run.recipe,
            kimg=session.clock.kimg,
            half_life_kimg=run.ema.half_life_kimg,
            batch_norm="standing" if game.g.batch_coupled_layers else "none",
            data=self.dataset.fingerprint,
            **({"encoding": to_dict(self.dataset.encoding)} if self.dataset.encoding else {}),
            **extra,
        )
        source = make_source(session, self.dataset)
        with averaged_networks(session), recalibrated_bn(game.g, source, game.labels, run.seed) as g:
            if session.world.is_main:
                save_model(self.folder / name, g, game.d.net, config)
                if name == MODEL_FOLDER:
                    self.logger.on_model(self.folder / name, session.clock.images)
