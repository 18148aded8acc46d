"""The interface of the ParaGAN paper (Fig. 5), as it is printed there.

scale_mgr = pg.ScalingManager(config=cfg, bs=2048, num_workers=128)
gan = pg.Estimator(Generator(), Discriminator())
for step in range(cfg.max_steps):
    scale_mgr.train(gan)
scale_mgr.eval(metric="fid")
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paragan.comm.process_group import broadcast_bits
from paragan.comm.world import LaunchInfo, World
from paragan.config.batch_scaling import WARM_UP_STEPS_PER_DOUBLING, scale_to_batch
from paragan.config.run import Run
from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions
from paragan.config.user_code import AnyObjective
from paragan.core.devices import pick_device
from paragan.core.errors import RunError, UsageError
from paragan.core.schema import apply_overrides, config_class, from_dict, to_dict
from paragan.core.types import DiscriminatorOutput
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import EvalProtocol, Score
from paragan.eval.features import inception_path
from paragan.game.ema import EMAConfig
from paragan.game.game import ConditioningFn
from paragan.losses.adversarial import Adversarial
from paragan.nets import Spec
from paragan.optim.optimizers import Adam, LrScaling, PlayerOptim
from paragan.optim.policies import describe_optim, get_policy, to_cli_args, to_cli_line
from paragan.plan.profile.profile import Profile, parse_profile, profile_to_yaml
from paragan.plan.profile.profile_cache import structure_digest
from paragan.plan.profile.profiler import ProfileOptions, profile_run
from paragan.strategies.sync import Sync
from paragan.train.averaged_model import averaged_sampler
from paragan.train.build import Networks, to_device
from paragan.train.callbacks.log import check_finite
from paragan.train.callbacks.scoring import check_evaluation, format_score_summary, score
from paragan.train.console import RunConsole, format_stats
from paragan.train.loop import play_round, report_errors
from paragan.train.prepare import prepare_on_all_ranks
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.session import Session, build_session, set_threads

PROFILE_EXTRA_TIMEOUT_S = 300.0  # beyond what it was asked to take


@config_class
class Config:
    """What ScalingManager scales: a game whose settings are right for `base_bs` images a step.

    g, d           : optimizers with the learning rates for `base_bs`
    g_rule, d_rule : how a rate grows with the batch (linear, sqrt, none)
    warm_up_steps  : steps over which the rates grow from 0, for each doubling of the batch beyond base_bs
    scale_penalties: whether the weights of R1 and R2 follow the batch too
    latent         : size of z, where the generator has no attribute `latent` of its own
    about          : why it is as it is, a line each, said when ScalingManager starts
    """

    data: DataOptions = DataOptions(path="digits")
    max_steps: Annotated[int, Field(ge=1)] = 1000
    base_bs: Annotated[int, Field(ge=1)] = 64
    g: PlayerOptim = PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.9)))
    d: PlayerOptim = PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.9)))
    g_lr_scaling: LrScaling = "sqrt"
    d_lr_scaling: LrScaling = "sqrt"
    warm_up_steps: Annotated[int, Field(ge=0)] = WARM_UP_STEPS_PER_DOUBLING
    scale_penalties: bool = False
    objective: AnyObjective = Adversarial()
    d_steps: Annotated[int, Field(ge=1)] = 1
    ema: EMAConfig = EMAConfig()
    strategy: Sync = Sync()
    latent: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0)] = 0
    evaluation: EvaluationOptions = EvaluationOptions()
    device: DeviceOptions = DeviceOptions()
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = 300.0
    reasons: tuple[str, ...] = ()


def with_policy(config: Config, name: str, bs: int, nets: str = "") -> Config:
    """A config whose players learn by a named policy (ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan-gp, dcgan)
    at a total batch of `bs`: `g`, `d`, `d_steps` and the objective of a policy that has one are replaced, and any of
    them can be again. Networks are yours: what a policy says of them is among the reasons, and not done. nets: "sngan"
    where D is like SN-GAN's."""
    chosen = get_policy(name, bs, nets=nets)
    objective = {field: value for field, value in chosen.settings.items() if field.startswith("objective.")}
    others = {field: value for field, value in chosen.settings.items() if field not in objective}
    laid = config.objective
    if objective:
        if not isinstance(laid, Adversarial):
            raise UsageError(
                f"policy {name} sets {to_cli_line(objective)}, and config.objective is your own: leave one out"
            )
        laid = from_dict(
            Adversarial, apply_overrides({"objective": to_dict(laid)}, to_cli_args(objective))["objective"]
        )
    about = (
        f"G {describe_optim(chosen.g)}",
        f"D {describe_optim(chosen.d)}",
        *([f"also sets {to_cli_line(objective)}"] if objective else []),
        *([f"leaves to the networks, which are yours: {to_cli_line(others)}"] if others else []),
        *chosen.reasons,
    )
    return dataclasses.replace(
        config,
        g=chosen.g,
        d=chosen.d,
        d_steps=chosen.d_steps,
        objective=laid,
        base_bs=bs,
        reasons=tuple(f"policy {name}: {line}" for line in about),
    )


@config_class
class EstimatorNets:
    """Stands for the networks of an `Estimator`, which are no part of a record."""

    name: str = "estimator"
    latent: int = 1

    def generator(self, spec: Spec) -> nn.Module:
        raise NotImplementedError("an Estimator brings its own")

    discriminator = generator


class Estimator:
    """A generator and a discriminator.

    Either `nn.Module`s, called as G(z [N, latent], y [N] or None) -> images [N, C, H, W] in [-1, 1] and
    D(x, y) -> logits [N]; or objects with `model_fn(latent_var, y)` and `model_fn(x, y) -> output, out_logit`,
    as the paper writes them, that keep their layers as attributes. Logits of more dimensions (a patch
    discriminator's [N, 1, H, W]) are averaged to one for each image before the loss. What else D gives (a named
    tuple, such as a `Verdict`) reaches the objective as it is.

    given : what of a hand of reals G gets in place of z, row by row (an autoencoder: `lambda real: real.images`)
    """

    def __init__(self, generator: Any, discriminator: Any, conditioning_input: ConditioningFn | None = None):
        self.conditioning_input = conditioning_input
        self.generator, self.discriminator = _UserGenerator(generator), _UserDiscriminator(discriminator)
        self.latent: int | None = getattr(generator, "latent", None)


class _UserNetwork(nn.Module):
    """A user's network or `model_fn` object, as a module."""

    def __init__(self, network: Any, role: str):
        super().__init__()
        if not isinstance(network, nn.Module) and not hasattr(network, "model_fn"):
            raise UsageError(f"the {role} is neither an nn.Module nor an object with model_fn")
        self.layers = network if isinstance(network, nn.Module) else nn.ModuleDict(_collect_layers(network))
        self.loose_parameters = nn.ParameterList(() if isinstance(network, nn.Module) else _collect_parameters(network))
        self._call: Any = network.model_fn if hasattr(network, "model_fn") else network
        if not any(p.requires_grad for p in self.parameters()):
            raise UsageError(f"the {role} has no parameters to train; keep its layers as attributes, in __init__")


class _UserGenerator(_UserNetwork):
    def __init__(self, network: Any):
        super().__init__(network, "generator")

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self._call(z, y)


class _UserDiscriminator(_UserNetwork):
    def __init__(self, network: Any):
        super().__init__(network, "discriminator")

    def forward(self, x: Tensor, y: Tensor | None) -> Any:
        out = self._call(x, y)
        if isinstance(out, DiscriminatorOutput):
            return out._replace(logits=self._one_logit_per_image(out.logits, x))
        logits = out[-1] if type(out) is tuple else out  # model_fn: (output, out_logit)
        return self._one_logit_per_image(logits, x) if isinstance(logits, Tensor) else logits

    def _one_logit_per_image(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.dim() == 0 or len(logits) != len(x):
            raise UsageError(f"the discriminator gives {list(logits.shape)} for {len(x)} images; logits are [{len(x)}]")
        return logits.flatten(1).mean(1) if logits.dim() > 1 else logits


def _collect_layers(network: Any) -> dict[str, nn.Module]:
    """The layers a plain object keeps as attributes, also in lists and dictionaries, by where they are."""
    return {f"its_{name}": value for name, value in _iter_members(network) if isinstance(value, nn.Module)}


def _collect_parameters(network: Any) -> list[nn.Parameter]:
    return [value for _, value in _iter_members(network) if isinstance(value, nn.Parameter)]


def _iter_members(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Modules and parameters in an object's attributes, lists and dictionaries."""
    inside: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    elif not name:
        inside = vars(value)
    for key, item in inside.items():
        path = f"{name}_{key}".strip("_").replace(".", "_")
        if isinstance(item, nn.Module | nn.Parameter):
            yield path, item
        elif isinstance(item, list | tuple | dict):
            yield from _iter_members(item, path)


class ScalingManager:
    """Scales a game to a total batch and a number of logical workers, and plays it.

    config      : what is played, right for `config.base_bs`
    data        : what it is trained on, where that is not `config.data`: `paragan.from_arrays(x, labels)`
    bs          : the total batch, over all workers
    num_workers : logical workers (lanes), dealt to however many ranks there are: the same script gives the same
                  training on one machine, where they share a rank, and on 128

    Learning rates follow the rule of each network, a warm-up and the average's half-life the growth of the batch: what
    was chosen, and why, is printed (docs/batch_scaling.md).
    Under torchrun or srun every process runs the same script.
    """

    def __init__(self, config: Config, bs: int, num_workers: int, dataset: Dataset | None = None):
        _check_type("config", config, Config, "paragan.Config(...)")
        if dataset is not None:
            _check_type("data", dataset, Dataset, "what paragan.from_arrays(x, labels) gives")
        self.config = config
        place = LaunchInfo.from_environment()
        self.world = World.join(place, pick_device(config.device.kind, place.local_rank), config.timeout_s)
        self.console = RunConsole(self.world.is_main)
        self.run = build_scaled_run(config, bs, num_workers)
        if self.run.device.tune == "measured":
            raise UsageError('device.tune="measured" is for `paragan train`: set what `paragan plan --tune` names')
        set_threads(self.run, self.world)
        prepared = prepare_on_all_ranks(self.run, self.world, dataset, check_parts=False)
        self.run = prepared.run
        self.dataset: Dataset = prepared.dataset
        for line in self.run.reasons:
            self.console.print(line)
        self._session: Session | None = None
        self._estimator: Estimator | None = None

    def train(self, gan: Estimator) -> dict[str, float]:
        """Play one round (`d_steps` steps of D, one of G) over all workers; every 100th is shown.

        Returns that line of statistics, {} in between.
        """
        session = self._get_session(gan)
        with report_errors(session):
            play_round(session)
            if session.clock.step % 100 and session.clock.step != 1:
                return {}
            line = session.stats.tick(session.clock.images, session.clock.step)
            check_finite(line, "lower the learning rates of config.d and config.g, or add r1")
        self.console.print(f"step {session.clock.step}  {session.clock.kimg:.1f} kimg  {format_stats(line)}")
        return line

    def profile(self, gan: Estimator, seconds: float = 30.0, **options: Any) -> Profile:
        """What one worker does with these networks: measured on rank 0, with copies, or found where it was measured
        before. asked: other fields of `paragan.plan.worker.profiling.Asked`: batches, noise_kimg, again.

        `print(*lines(profile), sep="\\n")`, of `paragan.plan.worker.shown`, shows it.
        """
        _check_type("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        wanted = from_dict(ProfileOptions, {"seconds": seconds, **options})

        def measure_on_rank0() -> str:
            return profile_to_yaml(self._measure_profile(gan, wanted)) if self.world.is_main else ""

        told = on_all_ranks(self.world, measure_on_rank0, PROFILE_EXTRA_TIMEOUT_S + 10 * seconds)
        return parse_profile(self.world.all_gather_str(told)[0], "profile")

    def _measure_profile(self, gan: Estimator, options: ProfileOptions) -> Profile:
        latent = 0 if gan.conditioning_input else gan.latent or self.config.latent

        def copy_networks() -> Networks:
            try:
                g, d = copy.deepcopy(gan.generator), copy.deepcopy(gan.discriminator)
            except Exception as error:  # whatever a network holds
                raise UsageError(f"networks that cannot be copied have no profile: {error}") from error
            return to_device(
                self.run, Networks(g, d, latent, gan.conditioning_input, is_user_defined=True), self.world.device
            )

        structure = structure_digest(gan.generator, gan.discriminator)
        return profile_run(self.run, self.dataset, copy_networks, self.world.device, options, structure)[0]

    def eval(self, metric: str = "fid", count: int | None = None) -> Score:
        """Score the averaged generator, shared by all ranks. Without the 2015-12-05 Inception "fid" becomes the
        Fréchet distance in pixels, is said to, and is named `fd_pixels`: it is no FID."""
        if self._session is None:
            raise UsageError("eval comes after train: nothing was trained yet")
        weights = self._session.game.g.ema
        if weights is None or not weights.params.isfinite().all():
            raise RunError("G has weights that are not finite: the game diverged, and there is nothing to score", True)
        wanted = self.run.evaluation
        features = wanted.features
        if str(metric).startswith("fid"):
            there = not self.dataset.is_array and (wanted.inception or inception_path().exists())
            metric, features = (metric, "inception") if there else ("fd", features)
            if not there:
                self.console.print(f"no Inception weights: this is the Fréchet distance in {features}, not FID")
        about = {"count": wanted.count if count is None else count, "features": features}
        wanted = from_dict(EvaluationOptions, {"metrics": (metric,), "inception": wanted.inception, **about})
        check_evaluation(wanted, self.dataset)
        batch_norm = "standing" if self._session.game.g.batch_coupled_layers else "none"
        with averaged_sampler(self._session, self.dataset) as sampler:
            protocol = EvalProtocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
            scores = score(sampler, self.dataset, wanted, protocol, self.world.all_ranks)
        self.console.print(format_score_summary(scores))
        return scores[0]

    def close(self) -> None:
        """Leave the other ranks in good order."""
        self._stop_prefetching()
        self.world.close()

    def __enter__(self) -> ScalingManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._stop_prefetching()
            self.world.abandon()

    def _stop_prefetching(self) -> None:
        """Send away those who read data ahead."""
        if self._session:
            self._session.lanes.close()

    def _get_session(self, gan: Estimator) -> Session:
        _check_type("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        if self._session is None:
            latent = 0 if gan.conditioning_input else gan.latent or self.config.latent
            pair = Networks(gan.generator, gan.discriminator, latent, gan.conditioning_input, is_user_defined=True)
            pair = to_device(self.run, pair, self.world.device)
            self._broadcast_weights(pair)
            self._session, self._estimator = build_session(self.run, self.world, self.dataset, pair), gan
        elif gan is not self._estimator:
            raise UsageError("this ScalingManager trains another Estimator already: make one for each")
        return self._session

    def _broadcast_weights(self, networks: Networks) -> None:
        """Everyone starts from rank 0's weights, whatever each process drew."""
        with torch.no_grad():
            for net in (networks.g, networks.d):
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.copy_(broadcast_bits(self.world.all_ranks, tensor, self.world.is_main))


@config_class
class _ScaledSize:
    """Images a step, and logical workers."""

    bs: Annotated[int, Field(ge=1)]
    num_workers: Annotated[int, Field(ge=1)]


def build_scaled_run(config: Config, bs: int, num_workers: int) -> Run:
    """The run of a config at a total batch of `bs`."""
    size = from_dict(_ScaledSize, {"bs": bs, "num_workers": num_workers})
    nets: Any = EstimatorNets()
    run = Run(
        recipe="estimator",
        data=config.data,
        nets=nets,
        objective=config.objective,
        g=dataclasses.replace(config.g, lr_scaling=config.g_lr_scaling),
        d=dataclasses.replace(config.d, lr_scaling=config.d_lr_scaling),
        d_steps=config.d_steps,
        ema=config.ema,
        strategy=config.strategy,
        batch=size.bs,
        lanes=size.num_workers,
        kimg=config.max_steps * size.bs * config.d_steps / 1000,
        seed=config.seed,
        evaluation=config.evaluation,
        device=_separate_real_fake(config.device),
        timeout_s=config.timeout_s,
        reasons=config.reasons,
    )
    return scale_to_batch(
        run, config.base_bs, warm_up_steps=config.warm_up_steps, scale_penalties=config.scale_penalties
    )


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is of {type(value).__name__}, and has to be {expected}")


def _separate_real_fake(device: DeviceOptions) -> DeviceOptions:
    """Reals and fakes in calls of their own where nothing else was asked for: a D of one's own may couple images."""
    return dataclasses.replace(device, concat_real_fake=False) if device.concat_real_fake == "auto" else device
