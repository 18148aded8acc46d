"""`ScalingManager`: trains an `Estimator` in the user's own loop, on all ranks of the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paragan.api.estimator import Estimator, EstimatorNets
from paragan.api.field_names import with_python_names
from paragan.api.game_config import Config
from paragan.api.scaled_run import build_scaled_run
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import broadcast_bits
from paragan.comm.world import World
from paragan.config.resolve import fill_strategy_defaults, make_spec
from paragan.config.run import Run, to_saved_dict
from paragan.config.sections import EvaluationOptions
from paragan.core.devices import pick_device
from paragan.core.errors import RunError, UsageError
from paragan.core.schema import from_dict
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import EvalProtocol, Score
from paragan.eval.features import inception_path
from paragan.plan.profile.profile import Profile, parse_profile, profile_to_yaml
from paragan.plan.profile.profiler import ProfileOptions, profile_run
from paragan.plan.select.choose import choose_new_strategy
from paragan.plan.select.choose_batch import choose_batch
from paragan.plan.tune.layout_tuner import decide_new_layout
from paragan.strategies.sync import Sync
from paragan.train.averaged_model import averaged_sampler
from paragan.train.build import Networks, build_networks, to_device
from paragan.train.callbacks.log import check_finite
from paragan.train.callbacks.scoring import check_evaluation, format_score_summary, score, successful_values
from paragan.train.console import RunConsole, format_stats
from paragan.train.loggers.create_logger import LoggerEntry, check_loggers
from paragan.train.loggers.logger import Logger, RunInfo
from paragan.train.loggers.logger_set import LoggerSet
from paragan.train.loop import play_round, report_errors
from paragan.train.prepare import prepare_on_all_ranks
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.session import Session, build_session, set_process_options

PROFILE_EXTRA_TIMEOUT_S = 300.0  # beyond the requested seconds
_world_numbers = itertools.count()  # of the managers of this process
BATCH_FACTORS = (1, 2, 4, 8, 16)  # of base_bs, from which an open batch is chosen


class ScalingManager:
    """Scales a config to a total batch, and trains it on all ranks of the launcher.

    Learning rates follow `g_lr_scaling` and `d_lr_scaling`; the warm-up and the half-life of the average follow the
    batch. The chosen values are printed with reasons (docs/batch_scaling.md).

    What is left open is decided from a profile of one worker, by `profile` or before the first round: the batch with
    `bs="auto"`, the strategy and its wire with `config.strategy="auto"`, precision and memory layout with
    `config.device.tune="measured"`.

    Args:
        config: the game, with settings for `config.base_bs`.
        bs: total batch, over all workers; "auto": one of 1, 2, 4, 8 and 16 times `config.base_bs`.
        num_workers: virtual workers (lanes), shared out over the ranks there are. The same script gives the same
            training on one rank, which owns all of them, and on `num_workers` ranks.
        dataset: the data, instead of `config.data`: `paragan.from_arrays(x, labels)`.
        loggers: get statistics and scores: names as in `--output.loggers`, or `paragan.Logger` objects.
    """

    @with_python_names()
    def __init__(
        self,
        config: Config,
        bs: int | str,
        num_workers: int,
        dataset: Dataset | None = None,
        loggers: Sequence[LoggerEntry] = (),
    ):
        _check_type("config", config, Config, "paragan.Config(...)")
        if dataset is not None:
            _check_type("dataset", dataset, Dataset, "what paragan.from_arrays(x, labels) returns")
        check_loggers(loggers)
        self.config = config
        self._logger_entries = loggers
        self._logger = Logger()
        launch_info = LaunchInfo.from_environment()
        device = pick_device(config.device.kind, launch_info.local_rank)
        self.world = World.join(launch_info, device, config.timeout_s, number=next(_world_numbers))
        self.console = RunConsole(self.world.is_main)
        self._num_workers = num_workers
        self._batch_is_open = bs == "auto"
        self._layout_is_open = config.device.tune == "measured"
        first_batch = config.base_bs if bs == "auto" else bs
        self.run = build_scaled_run(config, first_batch, num_workers)
        set_process_options(self.run.device, self.world)
        prepared = prepare_on_all_ranks(self.run, self.world, dataset, check_parts=False)
        self.run = prepared.run
        self.dataset: Dataset = prepared.dataset
        if not self._batch_is_open:
            for line in self.run.reasons:
                self.console.print(line)
        self._session: Session | None = None
        self._is_closed = False
        self._estimator: Estimator | None = None

    @property
    def has_open_settings(self) -> bool:
        """Whether batch, strategy or layout still have to be decided from a profile."""
        return self._batch_is_open or self._layout_is_open or self.run.strategy.auto_request is not None

    @with_python_names()
    def train(self, gan: Estimator) -> dict[str, float]:
        """Play one round: `d_steps` steps of D, one step of G.

        Returns the statistics of every 100th round, which are also printed; otherwise {}.
        """
        session = self._get_session(gan)
        with report_errors(session):
            play_round(session)
            if session.clock.step % 100 and session.clock.step != 1:
                return {}
            if session.role.barrier:
                session.role.barrier()
            line = session.stats.tick(session.clock.images, session.clock.step)
            check_finite(line, "lower the learning rates of config.d and config.g, or add r1")
        self.console.print(f"step {session.clock.step}  {session.clock.kimg:.1f} kimg  {format_stats(line)}")
        self._logger.on_tick(line, session.clock.images)
        return line

    @with_python_names()
    def profile(self, gan: Estimator, seconds: float = 30.0, **options: Any) -> Profile:
        """Measure a worker with copies of these networks on rank 0, and decide what was left open, with reasons.

        Decided are batch, strategy and wire, precision and memory layout, each only if it is open (see the class). An
        earlier measurement of the same networks on the same device is used again.
        `paragan.plan.profile.table.format_profile` formats the profile.

        Args:
            seconds: about how long to measure.
            options: other fields of `paragan.plan.profile.profiler.ProfileOptions`: batches, noise_kimg, remeasure.
        """
        _check_type("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        if self._batch_is_open:
            options = {"batches": self._batches_to_measure(), **options}
        profile_options = from_dict(ProfileOptions, {"seconds": seconds, **options})

        def measure_on_rank0() -> str:
            return profile_to_yaml(self._measure_profile(gan, profile_options)) if self.world.is_main else ""

        text = on_all_ranks(self.world, measure_on_rank0, PROFILE_EXTRA_TIMEOUT_S + 10 * seconds)
        profile = parse_profile(self.world.all_gather_str(text)[0], "profile")
        if self.has_open_settings:
            self._decide_open_settings(gan, profile)
        return profile

    def _batches_to_measure(self) -> list[int]:
        """Return batches of one worker, from those of a lane to its part of the largest that may be chosen."""
        lane = self.run.batch // self.run.lanes
        largest = BATCH_FACTORS[-1] * self.run.batch // self.world.size // lane * lane
        return sorted({lane, self.run.batch, largest})

    def _measure_profile(self, gan: Estimator, options: ProfileOptions) -> Profile:
        nets = EstimatorNets.of(gan, self.config.latent)
        run = dataclasses.replace(self.run, nets=nets)
        if run.strategy.auto_request:
            run = fill_strategy_defaults(dataclasses.replace(run, strategy=Sync()))

        def copy_networks() -> Networks:
            return build_networks(run, make_spec(run.data, self.dataset), self.world.device)

        return profile_run(run, self.dataset, copy_networks, self.world.device, options, nets.structure)[0]

    def _decide_open_settings(self, gan: Estimator, profile: Profile) -> None:
        """Decide batch, strategy and layout, in this order. All ranks call this together."""
        if self._batch_is_open:
            batches = [self.config.base_bs * factor for factor in BATCH_FACTORS]
            batch, reason = choose_batch(self._run_of(gan), profile, self.world, batches)
            run = build_scaled_run(self.config, batch, self._num_workers)
            self.run = prepare_on_all_ranks(run, self.world, self.dataset, check_parts=False).run
            for line in (reason, *self.run.reasons):
                self.console.print(line)
            self._batch_is_open = False
        auto = self.run.strategy.auto_request
        if auto:
            run = choose_new_strategy(self._run_of(gan), auto, None, self.dataset, self.world, self.console)
            self.run = dataclasses.replace(run, nets=self.run.nets)
        if self._layout_is_open:
            run = decide_new_layout(self._run_of(gan), self.dataset, self.world, self.console)
            self.run = dataclasses.replace(run, nets=self.run.nets)
            set_process_options(self.run.device, self.world)
            self._layout_is_open = False

    def _run_of(self, gan: Estimator) -> Run:
        """Return the run with copies of the networks of an Estimator."""
        return dataclasses.replace(self.run, nets=EstimatorNets.of(gan, self.config.latent))

    @with_python_names()
    def eval(self, metric: str = "fid", count: int | None = None) -> Score:
        """Score the averaged generator, on all ranks together.

        Without the weights of the 2015-12-05 Inception, "fid" becomes the Fréchet distance in pixels: it is named
        `fd_pixels`, and the difference is printed.

        Args:
            metric: see docs/scores.md.
            count: number of fakes (default: `config.evaluation.count`).
        """
        if self._session is None:
            raise UsageError("eval: nothing was trained yet. Call train first")
        _check_still_trains(self._session)
        weights = self._session.game.g.ema
        if weights is None or not weights.is_finite():
            raise RunError("G has weights that are not finite: the game diverged", True)
        defaults = self.run.evaluation
        features = defaults.features
        if metric in ("fid", "fid50k_full"):
            if self.dataset.shows_images and (defaults.inception or inception_path().exists()):
                features = "inception"
            else:
                metric = "fd"
                self.console.print(f"no Inception weights: this is the Fréchet distance in {features}, not FID")
        fields = {
            "metrics": (metric,),
            "inception": defaults.inception,
            "count": defaults.count if count is None else count,
            "features": features,
        }
        evaluation = from_dict(EvaluationOptions, fields)
        check_evaluation(evaluation, self.dataset)
        if self._session.role.drain:
            self._session.role.drain()
        batch_norm = "standing" if self._session.game.g.batch_coupled_layers else "none"
        with averaged_sampler(self._session, self.dataset) as sampler:
            protocol = EvalProtocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
            scores = score(sampler, self.dataset, evaluation, protocol, self.world.all_ranks)
        self.console.print(format_score_summary(scores))
        self._logger.on_scores(successful_values(scores), self._session.clock.images)
        return scores[0]

    def close(self) -> None:
        """Stop reading data, complete what is in flight, hand the networks back, and leave the other ranks."""
        self._end_session()
        if self._session and self._session.role.drain:
            self._session.role.drain()
        self._logger.close()
        self.world.close()

    def __enter__(self) -> ScalingManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._end_session()
            self._logger.close(str(error) or type(error).__name__)
            self.world.abandon()

    def _end_session(self) -> None:
        """Stop reading data, and hand the networks back: their parameters require gradients again."""
        self._is_closed = True
        if not self._session:
            return
        self._session.lanes.close()
        for player in self._session.game.players:
            player.flat.release()

    def _get_session(self, gan: Estimator) -> Session:
        _check_type("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        if self._is_closed:
            raise UsageError("ScalingManager: is closed. Make a new one")
        if self._session is None:
            if self.has_open_settings:
                self.profile(gan)
            latent = 0 if gan.conditioning_input else gan.latent or self.config.latent
            g, d = gan.make_trainable()
            networks = Networks(g, d, latent, gan.conditioning_input, is_user_defined=True)
            networks = to_device(self.run.device, networks, self.world.device)
            self._broadcast_weights(networks)
            with _restore_trainable_on_error(gan):
                self._session = build_session(self.run, self.world, self.dataset, networks)
            self._estimator = gan
            if self.world.is_main:
                info = RunInfo(self.run.recipe, None, to_saved_dict(self.run))
                self._logger = LoggerSet(self._logger_entries, info, self.console.print, self.run.output.upload_s)
        elif gan is not self._estimator:
            raise UsageError("ScalingManager: already trains another Estimator. Use a ScalingManager for each")
        _check_still_trains(self._session)
        return self._session

    def _broadcast_weights(self, networks: Networks) -> None:
        """Start all ranks from the weights of rank 0."""
        with torch.no_grad():
            for net in (networks.g, networks.d):
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.copy_(broadcast_bits(self.world.all_ranks, tensor, self.world.is_main))


@contextlib.contextmanager
def _restore_trainable_on_error(gan: Estimator) -> Iterator[None]:
    """Leave the networks trainable after a UsageError, so that they can be trained once the mistake is corrected."""
    parameters = [p for net in (gan.generator, gan.discriminator) for p in net.parameters() if p.requires_grad]
    try:
        yield
    except UsageError:
        for p in parameters:
            p.requires_grad_(True)
        raise


def _check_still_trains(session: Session) -> None:
    """Raise UsageError if the networks are trained elsewhere since."""
    if not all(player.flat.holds_network for player in session.game.players):
        raise UsageError(
            "ScalingManager: something else has moved the parameters of its networks since, such as a later "
            "ScalingManager or `to`. Use the later one, or a new one"
        )


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name}: is of type {type(value).__name__}. Use {expected}")
