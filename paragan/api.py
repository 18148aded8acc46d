"""The Python interface of the ParaGAN paper (Fig. 5), with the names of the figure.

    scale_mgr = pg.ScalingManager(config=cfg, bs=2048, num_workers=128)
    gan = pg.Estimator(Generator(), Discriminator())
    for step in cfg.max_steps:
        scale_mgr.train(gan)
    scale_mgr.eval(metric="fid")

Under torchrun or srun every process runs the same script.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import yaml
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import broadcast_bits
from paragan.comm.world import World
from paragan.config.batch_scaling import WARM_UP_STEPS_PER_DOUBLING, scale_to_batch
from paragan.config.resolve import fill_strategy_defaults, make_spec
from paragan.config.run import AnyStrategy, Run
from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions
from paragan.config.user_code import AnyObjective, user_code_digest
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
from paragan.plan.select.choose import choose_new_strategy
from paragan.plan.select.choose_batch import choose_batch
from paragan.plan.tune.layout_tuner import decide_new_layout
from paragan.strategies.sync import Sync
from paragan.train.averaged_model import averaged_sampler
from paragan.train.build import Networks, build_networks, to_device
from paragan.train.callbacks.log import check_finite
from paragan.train.callbacks.scoring import check_evaluation, format_score_summary, score
from paragan.train.console import RunConsole, format_stats
from paragan.train.loop import play_round, report_errors
from paragan.train.prepare import prepare_on_all_ranks
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.session import Session, build_session, set_threads

PROFILE_EXTRA_TIMEOUT_S = 300.0  # beyond the requested seconds
BATCH_FACTORS = (1, 2, 4, 8, 16)  # of base_bs, from which an open batch is chosen


class Steps(int):
    """A number of steps that can be iterated, as in the figure: `for step in cfg.max_steps`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self))


yaml.SafeDumper.add_representer(Steps, yaml.SafeDumper.represent_int)


@config_class
class Config:
    """Settings of a game for `base_bs` images per step, which ScalingManager scales to another batch.

    data            : the data set
    max_steps       : length of the run, in steps of G
    base_bs         : the batch that the settings are for
    g, d            : optimizers, with learning rates for `base_bs`
    g_lr_scaling    : how the learning rate of G follows the batch: linear, sqrt or none
    d_lr_scaling    : the same for D
    warm_up_steps   : steps of learning-rate warm-up, for each doubling of the batch beyond base_bs
    scale_penalties : whether the weights of R1 and R2 follow the batch too
    objective       : losses and penalties
    d_steps         : steps of D for each step of G
    ema             : the average of G's weights
    strategy        : how ranks cooperate: any strategy of one game by name ("gossip"), with fields ({"name": "gossip",
                      "rounds": 2}), or "auto": chosen by measurements
    latent          : size of z, unless the generator has an attribute `latent`
    seed            : of all random numbers
    evaluation      : defaults of `ScalingManager.eval`
    device          : where and how to compute; with tune="measured" the fastest settings are chosen by measurements
    timeout_s       : of an exchange between ranks
    reasons         : reasons for these settings, a line each; printed when ScalingManager starts
    """

    data: DataOptions = DataOptions(path="digits")
    max_steps: Annotated[int, Field(ge=1), AfterValidator(Steps)] = Steps(1000)
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
    strategy: AnyStrategy = Sync()
    latent: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0)] = 0
    evaluation: EvaluationOptions = EvaluationOptions()
    device: DeviceOptions = DeviceOptions()
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = 300.0
    reasons: tuple[str, ...] = ()


def with_policy(config: Config, name: str, bs: int, nets: str = "") -> Config:
    """Return the config with the optimizer settings of a paper, for a total batch of `bs`.

    `g`, `d` and `d_steps` are replaced, and the objective if the policy has one. What a policy requires of the networks
    is only listed in the reasons, since the networks are yours.

    Args:
        name: ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan-gp, dcgan, dposg or dqgan.
        nets: "sngan" if D is like that of SN-GAN.
    """
    policy = get_policy(name, bs, nets=nets)
    objective_settings = {field: value for field, value in policy.settings.items() if field.startswith("objective.")}
    net_settings = {field: value for field, value in policy.settings.items() if field not in objective_settings}
    objective = config.objective
    if objective_settings:
        if not isinstance(objective, Adversarial):
            raise UsageError(
                f"policy {name}: sets {to_cli_line(objective_settings)}, but config.objective is your own. Use one"
            )
        data = apply_overrides({"objective": to_dict(objective)}, to_cli_args(objective_settings))
        objective = from_dict(Adversarial, data["objective"])
    reasons = [f"G {describe_optim(policy.g)}", f"D {describe_optim(policy.d)}"]
    if objective_settings:
        reasons.append(f"also sets {to_cli_line(objective_settings)}")
    if net_settings:
        reasons.append(f"leaves to your networks: {to_cli_line(net_settings)}")
    reasons += policy.reasons
    return dataclasses.replace(
        config,
        g=policy.g,
        d=policy.d,
        d_steps=policy.d_steps,
        objective=objective,
        base_bs=bs,
        reasons=tuple(f"policy {name}: {line}" for line in reasons),
    )


@config_class
class EstimatorNets:
    """The networks of an `Estimator` in a run. What is measured before training are copies of them.

    structure : a digest of the networks and their source files, for what is cached; empty before they are known
    """

    name: str = "estimator"
    latent: int = 1
    structure: str = ""

    @staticmethod
    def of(gan: Estimator, latent: int) -> EstimatorNets:
        """Return the networks of an Estimator, whose latents have this size unless it has its own."""
        structure = f"{structure_digest(gan.generator, gan.discriminator)} {gan.source_digest}"
        nets = EstimatorNets(latent=gan.latent or latent, structure=structure)
        vars(nets)["estimator"] = gan  # no field: it is in no file
        return nets

    @property
    def conditioning_input(self) -> ConditioningFn | None:
        gan: Estimator | None = vars(self).get("estimator")
        return gan.conditioning_input if gan else None

    def generator(self, spec: Spec) -> nn.Module:
        return self._copy("generator")

    def discriminator(self, spec: Spec) -> nn.Module:
        return self._copy("discriminator")

    def _copy(self, role: str) -> nn.Module:
        network: _UserNetwork = getattr(vars(self)["estimator"], role)
        trainable = network.find_trainable()
        try:
            copied = copy.deepcopy(network)
        except Exception as error:  # user code may raise anything
            raise UsageError(f"{role}: the networks cannot be copied: {error}") from error
        for name, p in copied.named_parameters():
            p.requires_grad_(name in trainable)
        return copied


class Estimator:
    """A generator and a discriminator.

    Args:
        generator: an `nn.Module`, (z [N, latent], y [N] or None) -> images [N, C, H, W] in [-1, 1]; or, as in the
            paper, an object with `model_fn(latent_var, y)` that has its layers as attributes.
        discriminator: an `nn.Module`, (x, y) -> logits [N], or an object with `model_fn(x, y) -> output, out_logit`.
            Logits with more dimensions (of a patch discriminator, [N, 1, H, W]) are averaged for each image before
            the loss. Other outputs, such as a `DiscriminatorOutput`, reach the objective unchanged.
        conditioning_input: what G gets instead of z, from a batch of reals, row by row (for an autoencoder
            `lambda real: real.images`).
    """

    def __init__(self, generator: Any, discriminator: Any, conditioning_input: ConditioningFn | None = None):
        self.conditioning_input = conditioning_input
        self.generator = _UserGenerator(generator)
        self.discriminator = _UserDiscriminator(discriminator)
        self.latent: int | None = getattr(generator, "latent", None)
        self.source_digest = user_code_digest(generator, discriminator)


class _UserNetwork(nn.Module):
    """A user's network or `model_fn` object, as a module."""

    def __init__(self, network: Any, role: str):
        super().__init__()
        if not isinstance(network, nn.Module) and not hasattr(network, "model_fn"):
            raise UsageError(f"{role}: is neither an nn.Module nor an object with model_fn. Use a torch.nn.Module")
        is_module = isinstance(network, nn.Module)
        self.layers = network if is_module else nn.ModuleDict(_collect_layers(network))
        self.loose_parameters = nn.ParameterList(() if is_module else _collect_parameters(network))
        self._call: Any = network.model_fn if hasattr(network, "model_fn") else network
        self._trainable: set[str] = set()
        if not self.find_trainable():
            raise UsageError(f"{role}: has no parameters to train. Store its layers as attributes, in __init__")

    def find_trainable(self) -> set[str]:
        """Return the names of the parameters that are trained; those found before, if all are frozen between turns."""
        found = {name for name, p in self.named_parameters() if p.requires_grad}
        self._trainable = found or self._trainable
        return self._trainable


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
        logits = out[-1] if type(out) is tuple else out  # (output, out_logit) of model_fn
        return self._one_logit_per_image(logits, x) if isinstance(logits, Tensor) else logits

    def _one_logit_per_image(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.dim() == 0 or len(logits) != len(x):
            raise UsageError(
                f"discriminator: returned {list(logits.shape)} for {len(x)} images. Return logits of [{len(x)}]"
            )
        return logits.flatten(1).mean(1) if logits.dim() > 1 else logits


def _collect_layers(network: Any) -> dict[str, nn.Module]:
    """Return the modules in the attributes of an object, also in lists and dictionaries, by their path."""
    return {f"user_{name}": value for name, value in _iter_members(network) if isinstance(value, nn.Module)}


def _collect_parameters(network: Any) -> list[nn.Parameter]:
    return [value for _, value in _iter_members(network) if isinstance(value, nn.Parameter)]


def _iter_members(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of modules and parameters in the attributes, lists and dictionaries of an object."""
    members: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list | tuple):
        members = dict(enumerate(value))
    elif not name:
        members = vars(value)
    for key, item in members.items():
        path = f"{name}_{key}".strip("_").replace(".", "_")
        if isinstance(item, nn.Module | nn.Parameter):
            yield path, item
        elif isinstance(item, list | tuple | dict):
            yield from _iter_members(item, path)


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
    """

    def __init__(self, config: Config, bs: int | str, num_workers: int, dataset: Dataset | None = None):
        _check_type("config", config, Config, "paragan.Config(...)")
        if dataset is not None:
            _check_type("dataset", dataset, Dataset, "what paragan.from_arrays(x, labels) returns")
        self.config = config
        launch_info = LaunchInfo.from_environment()
        device = pick_device(config.device.kind, launch_info.local_rank)
        self.world = World.join(launch_info, device, config.timeout_s)
        self.console = RunConsole(self.world.is_main)
        self._num_workers = num_workers
        self._batch_is_open = bs == "auto"
        self._layout_is_open = config.device.tune == "measured"
        first_batch = config.base_bs if bs == "auto" else bs
        self.run = build_scaled_run(config, first_batch, num_workers)
        set_threads(self.run.device, self.world)
        prepared = prepare_on_all_ranks(self.run, self.world, dataset, check_parts=False)
        self.run = prepared.run
        self.dataset: Dataset = prepared.dataset
        if not self._batch_is_open:
            for line in self.run.reasons:
                self.console.print(line)
        self._session: Session | None = None
        self._estimator: Estimator | None = None

    @property
    def has_open_settings(self) -> bool:
        """Whether batch, strategy or layout still have to be decided from a profile."""
        return self._batch_is_open or self._layout_is_open or self.run.strategy.auto_request is not None

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
        return line

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
            set_threads(self.run.device, self.world)
            self._layout_is_open = False

    def _run_of(self, gan: Estimator) -> Run:
        """Return the run with copies of the networks of an Estimator."""
        return dataclasses.replace(self.run, nets=EstimatorNets.of(gan, self.config.latent))

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
        weights = self._session.game.g.ema
        if weights is None or not weights.params.isfinite().all():
            raise RunError("G has weights that are not finite: the game diverged", True)
        defaults = self.run.evaluation
        features = defaults.features
        if str(metric).startswith("fid"):
            if not self.dataset.is_array and (defaults.inception or inception_path().exists()):
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
        return scores[0]

    def close(self) -> None:
        """Stop reading data, complete what is in flight, and leave the other ranks."""
        self._stop_prefetching()
        if self._session and self._session.role.drain:
            self._session.role.drain()
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
        if self._session:
            self._session.lanes.close()

    def _get_session(self, gan: Estimator) -> Session:
        _check_type("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        if self._session is None:
            if self.has_open_settings:
                self.profile(gan)
            latent = 0 if gan.conditioning_input else gan.latent or self.config.latent
            networks = Networks(gan.generator, gan.discriminator, latent, gan.conditioning_input, is_user_defined=True)
            networks = to_device(self.run.device, networks, self.world.device)
            self._broadcast_weights(networks)
            with _restore_trainable_on_error(gan):
                self._session = build_session(self.run, self.world, self.dataset, networks)
            self._estimator = gan
        elif gan is not self._estimator:
            raise UsageError("ScalingManager: already trains another Estimator. Use a ScalingManager for each")
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


@config_class
class _ScaledSize:
    """Validated arguments of ScalingManager: images per step, and virtual workers."""

    bs: Annotated[int, Field(ge=1)]
    num_workers: Annotated[int, Field(ge=1)]


def build_scaled_run(config: Config, bs: int | str, num_workers: int) -> Run:
    """Return the run of a config, scaled to a total batch of `bs` on `num_workers` lanes."""
    if config.strategy.per_label:
        raise UsageError(
            "strategy=per-label: trains a game for every label, and an Estimator is one game. Use sync, quantized, "
            "gossip or async, or `paragan train custom --nets=module:Class --strategy per-label`"
        )
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
        strategy=config.strategy.without_rank_loss(),
        batch=size.bs,
        lanes=size.num_workers,
        kimg=config.max_steps * size.bs * config.d_steps / 1000,
        seed=config.seed,
        evaluation=config.evaluation,
        device=_resolve_device(config.device),
        timeout_s=config.timeout_s,
        reasons=config.reasons,
    )
    return scale_to_batch(
        run, config.base_bs, warm_up_steps=config.warm_up_steps, scale_penalties=config.scale_penalties
    )


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name}: is of type {type(value).__name__}. Use {expected}")


def _resolve_device(device: DeviceOptions) -> DeviceOptions:
    """Return the options until a layout is measured.

    D is called separately on reals and fakes unless configured otherwise: a user's D may mix the images of a batch.
    """
    concat_real_fake = False if device.concat_real_fake == "auto" else device.concat_real_fake
    return dataclasses.replace(device, concat_real_fake=concat_real_fake, tune="rules")
