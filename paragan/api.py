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

from paragan.comm.process_group import of_one
from paragan.comm.world import Place, World
from paragan.config.batch_scaling import WARM_UP_STEPS, tuned
from paragan.config.resolve import load_images, resolve
from paragan.config.run import Run
from paragan.config.sections import Data, Device, Evaluation
from paragan.config.user_code import AnyObjective
from paragan.config.validate import validate
from paragan.core.devices import pick_device
from paragan.core.errors import Failed, Unusable
from paragan.core.schema import build, override, plain, record
from paragan.core.types import Verdict
from paragan.data.dataset import Images
from paragan.eval.evaluate import Protocol, Score
from paragan.eval.features import inception_path
from paragan.game.ema import Decay
from paragan.game.game import Given
from paragan.losses.adversarial import Adversarial
from paragan.nets import Spec
from paragan.optim.optimizers import Adam, Rule, Side
from paragan.optim.policies import described, policy, stated, written
from paragan.plan.profile.profile import Profile, profile_from, written_profile
from paragan.plan.profile.profile_cache import structure_of
from paragan.plan.profile.profiler import Asked, profile_of
from paragan.strategies.sync import Sync
from paragan.train.averaged_model import averaged_sampler
from paragan.train.build import Pair, placed
from paragan.train.callbacks.log import refuse_nonfinite
from paragan.train.callbacks.scoring import check, score, summary
from paragan.train.console import Screen, describe
from paragan.train.loop import explained, play_round
from paragan.train.rank_agreement import together
from paragan.train.session import Session, assemble, set_threads

PROFILE_TIMEOUT_S = 300.0  # beyond what it was asked to take


@record
class Config:
    """What ScalingManager scales: a game whose settings are right for `base_bs` images a step.

    g, d           : optimizers with the learning rates for `base_bs`
    g_rule, d_rule : how a rate grows with the batch (linear, sqrt, none)
    warm_up_steps  : steps over which the rates grow from 0, for each doubling of the batch beyond base_bs
    scale_penalties: whether the weights of R1 and R2 follow the batch too
    latent         : size of z, where the generator has no attribute `latent` of its own
    about          : why it is as it is, a line each, said when ScalingManager starts
    """

    data: Data = Data(path="digits")
    max_steps: Annotated[int, Field(ge=1)] = 1000
    base_bs: Annotated[int, Field(ge=1)] = 64
    g: Side = Side(Adam(lr=2e-4, betas=(0.0, 0.9)))
    d: Side = Side(Adam(lr=2e-4, betas=(0.0, 0.9)))
    g_rule: Rule = "sqrt"
    d_rule: Rule = "sqrt"
    warm_up_steps: Annotated[int, Field(ge=0)] = WARM_UP_STEPS
    scale_penalties: bool = False
    objective: AnyObjective = Adversarial()
    d_steps: Annotated[int, Field(ge=1)] = 1
    average: Decay = Decay()
    strategy: Sync = Sync()
    latent: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0)] = 0
    evaluation: Evaluation = Evaluation()
    device: Device = Device()
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = 300.0
    about: tuple[str, ...] = ()


def with_policy(config: Config, name: str, bs: int, nets: str = "") -> Config:
    """A config whose players learn by a named policy (ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan-gp, dcgan)
    at a total batch of `bs`: `g`, `d`, `d_steps` and the objective of a policy that has one are replaced, and any of
    them can be again. Networks are yours: what a policy says of them is among the reasons, and not done. nets: "sngan"
    where D is like SN-GAN's."""
    chosen = policy(name, bs, nets=nets)
    objective = {field: value for field, value in chosen.settings.items() if field.startswith("objective.")}
    others = {field: value for field, value in chosen.settings.items() if field not in objective}
    laid = config.objective
    if objective:
        if not isinstance(laid, Adversarial):
            raise Unusable(f"policy {name} sets {stated(objective)}, and config.objective is your own: leave one out")
        laid = build(Adversarial, override({"objective": plain(laid)}, written(objective))["objective"])
    about = (
        f"G {described(chosen.g)}",
        f"D {described(chosen.d)}",
        *([f"also sets {stated(objective)}"] if objective else []),
        *([f"leaves to the networks, which are yours: {stated(others)}"] if others else []),
        *chosen.reasons,
    )
    return dataclasses.replace(
        config,
        g=chosen.g,
        d=chosen.d,
        d_steps=chosen.d_steps,
        objective=laid,
        base_bs=bs,
        about=tuple(f"policy {name}: {line}" for line in about),
    )


@record
class Theirs:
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

    def __init__(self, generator: Any, discriminator: Any, given: Given | None = None):
        self.given = given
        self.generator, self.discriminator = _Generator(generator), _Discriminator(discriminator)
        self.latent: int | None = getattr(generator, "latent", None)


class _Player(nn.Module):
    """A user's network or `model_fn` object, as a module."""

    def __init__(self, given: Any, role: str):
        super().__init__()
        if not isinstance(given, nn.Module) and not hasattr(given, "model_fn"):
            raise Unusable(f"the {role} is neither an nn.Module nor an object with model_fn")
        self.layers = given if isinstance(given, nn.Module) else nn.ModuleDict(_layers(given))
        self.loose = nn.ParameterList(() if isinstance(given, nn.Module) else _parameters(given))
        self._call: Any = given.model_fn if hasattr(given, "model_fn") else given
        if not any(p.requires_grad for p in self.parameters()):
            raise Unusable(f"the {role} has no parameters to train; keep its layers as attributes, in __init__")


class _Generator(_Player):
    def __init__(self, given: Any):
        super().__init__(given, "generator")

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self._call(z, y)


class _Discriminator(_Player):
    def __init__(self, given: Any):
        super().__init__(given, "discriminator")

    def forward(self, x: Tensor, y: Tensor | None) -> Any:
        out = self._call(x, y)
        if isinstance(out, Verdict):
            return out._replace(logits=self._one_each(out.logits, x))
        logits = out[-1] if type(out) is tuple else out  # model_fn: (output, out_logit)
        return self._one_each(logits, x) if isinstance(logits, Tensor) else logits

    def _one_each(self, logits: Tensor, x: Tensor) -> Tensor:
        if logits.dim() == 0 or len(logits) != len(x):
            raise Unusable(f"the discriminator gives {list(logits.shape)} for {len(x)} images; logits are [{len(x)}]")
        return logits.flatten(1).mean(1) if logits.dim() > 1 else logits


def _layers(given: Any) -> dict[str, nn.Module]:
    """The layers a plain object keeps as attributes, also in lists and dictionaries, by where they are."""
    return {f"its_{name}": value for name, value in _held(given) if isinstance(value, nn.Module)}


def _parameters(given: Any) -> list[nn.Parameter]:
    return [value for _, value in _held(given) if isinstance(value, nn.Parameter)]


def _held(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
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
            yield from _held(item, path)


class ScalingManager:
    """Scales a game to a total batch and a number of logical workers, and plays it.

    config      : what is played, right for `config.base_bs`
    data        : what it is trained on, where that is not `config.data`: `paragan.from_arrays(x, labels)`
    bs          : the total batch, over all workers
    num_workers : logical workers (lanes), dealt to however many ranks there are: the same script gives the same
                  training on one machine, where they share a rank, and on 128

    Learning rates follow the rule of each network, a warm-up and the average's half-life the growth of the batch: what
    was chosen, and why, is printed (docs/scaling.md).
    Under torchrun or srun every process runs the same script.
    """

    def __init__(self, config: Config, bs: int, num_workers: int, data: Images | None = None):
        _refuse_other("config", config, Config, "paragan.Config(...)")
        if data is not None:
            _refuse_other("data", data, Images, "what paragan.from_arrays(x, labels) gives")
        self.config = config
        place = Place.from_environment()
        self.world = World.join(place, pick_device(config.device.kind, place.local_rank), config.timeout_s)
        self.screen = Screen(self.world.first)
        self.run = scaled(config, bs, num_workers)
        validate(self.run, self.world.size)
        if self.run.device.layout == "measured":
            raise Unusable('device.layout="measured" is for `paragan train`: set what `paragan plan --layout` names')
        set_threads(self.run, self.world)
        self.images: Images = data if data is not None else together(self.world, lambda: load_images(self.run), 1800.0)
        self.run = resolve(self.run, self.images)
        for line in self.run.about:
            self.screen.say(line)
        self._session: Session | None = None
        self._estimator: Estimator | None = None

    def train(self, gan: Estimator) -> dict[str, float]:
        """Play one round (`d_steps` steps of D, one of G) over all workers; every 100th is shown.

        Returns that line of statistics, {} in between.
        """
        session = self._session_of(gan)
        with explained(session):
            play_round(session)
            if session.clock.step % 100 and session.clock.step != 1:
                return {}
            line = session.stats.tick(session.clock.images, session.clock.step)
            refuse_nonfinite(line, "lower the learning rates of config.d and config.g, or add r1")
        self.screen.say(f"step {session.clock.step}  {session.clock.kimg:.1f} kimg  {describe(line)}")
        return line

    def profile(self, gan: Estimator, seconds: float = 30.0, **asked: Any) -> Profile:
        """What one worker does with these networks: measured on rank 0, with copies, or found where it was measured
        before. asked: other fields of `paragan.plan.worker.profiling.Asked`: batches, noise_kimg, again.

        `print(*lines(profile), sep="\\n")`, of `paragan.plan.worker.shown`, shows it.
        """
        _refuse_other("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        wanted = build(Asked, {"seconds": seconds, **asked})

        def measure() -> str:
            return written_profile(self._profiled(gan, wanted)) if self.world.first else ""

        told = together(self.world, measure, PROFILE_TIMEOUT_S + 10 * seconds)
        return profile_from(self.world.agree(told)[0], "profile")

    def _profiled(self, gan: Estimator, asked: Asked) -> Profile:
        latent = 0 if gan.given else gan.latent or self.config.latent

        def pair() -> Pair:
            try:
                g, d = copy.deepcopy(gan.generator), copy.deepcopy(gan.discriminator)
            except Exception as error:  # whatever a network holds
                raise Unusable(f"networks that cannot be copied have no profile: {error}") from error
            return placed(self.run, Pair(g, d, latent, gan.given, own=True), self.world.device)

        structure = structure_of(gan.generator, gan.discriminator)
        return profile_of(self.run, self.images, pair, self.world.device, asked, structure)[0]

    def eval(self, metric: str = "fid", count: int | None = None) -> Score:
        """Score the averaged generator, shared by all ranks. Without the 2015-12-05 Inception "fid" becomes the
        Fréchet distance in pixels, is said to, and is named `fd_pixels`: it is no FID."""
        if self._session is None:
            raise Unusable("eval comes after train: nothing was trained yet")
        weights = self._session.game.g.average
        if weights is None or not weights.params.isfinite().all():
            raise Failed("G has weights that are not finite: the game diverged, and there is nothing to score", True)
        wanted = self.run.evaluation
        features = wanted.features
        if str(metric).startswith("fid"):
            there = not self.images.numbers and (wanted.inception or inception_path().exists())
            metric, features = (metric, "inception") if there else ("fd", features)
            if not there:
                self.screen.say(f"no Inception weights: this is the Fréchet distance in {features}, not FID")
        about = {"count": wanted.count if count is None else count, "features": features}
        wanted = build(Evaluation, {"metrics": (metric,), "inception": wanted.inception, **about})
        check(wanted, self.images)
        batch_norm = "standing" if self._session.game.g.coupled else "none"
        with averaged_sampler(self._session, self.images) as sampler:
            protocol = Protocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
            scores = score(sampler, self.images, wanted, protocol, self.world.everyone)
        self.screen.say(summary(scores))
        return scores[0]

    def close(self) -> None:
        """Leave the other ranks in good order."""
        self._let_go()
        self.world.close()

    def __enter__(self) -> ScalingManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._let_go()
            self.world.abandon()

    def _let_go(self) -> None:
        """Send away those who read data ahead."""
        if self._session:
            self._session.lanes.close()

    def _session_of(self, gan: Estimator) -> Session:
        _refuse_other("gan", gan, Estimator, "paragan.Estimator(generator, discriminator)")
        if self._session is None:
            latent = 0 if gan.given else gan.latent or self.config.latent
            pair = Pair(gan.generator, gan.discriminator, latent, gan.given, own=True)
            pair = placed(self.run, pair, self.world.device)
            self._agree_on_weights(pair)
            self._session, self._estimator = assemble(self.run, self.world, self.images, pair), gan
        elif gan is not self._estimator:
            raise Unusable("this ScalingManager trains another Estimator already: make one for each")
        return self._session

    def _agree_on_weights(self, pair: Pair) -> None:
        """Everyone starts from rank 0's weights, whatever each process drew."""
        with torch.no_grad():
            for net in (pair.g, pair.d):
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.copy_(of_one(self.world.everyone, tensor, self.world.first))


@record
class _Size:
    """Images a step, and logical workers."""

    bs: Annotated[int, Field(ge=1)]
    num_workers: Annotated[int, Field(ge=1)]


def scaled(config: Config, bs: int, num_workers: int) -> Run:
    """The run of a config at a total batch of `bs`."""
    size = build(_Size, {"bs": bs, "num_workers": num_workers})
    nets: Any = Theirs()
    run = Run(
        recipe="estimator",
        data=config.data,
        nets=nets,
        objective=config.objective,
        g=dataclasses.replace(config.g, rule=config.g_rule),
        d=dataclasses.replace(config.d, rule=config.d_rule),
        d_steps=config.d_steps,
        average=config.average,
        strategy=config.strategy,
        batch=size.bs,
        lanes=size.num_workers,
        kimg=config.max_steps * size.bs * config.d_steps / 1000,
        seed=config.seed,
        evaluation=config.evaluation,
        device=_apart(config.device),
        timeout_s=config.timeout_s,
        about=config.about,
    )
    return tuned(run, config.base_bs, warm_up_steps=config.warm_up_steps, penalties=config.scale_penalties)


def _refuse_other(name: str, value: object, kind: type, works: str) -> None:
    if not isinstance(value, kind):
        raise Unusable(f"{name} is of {type(value).__name__}, and has to be {works}")


def _apart(device: Device) -> Device:
    """Reals and fakes in calls of their own where nothing else was asked for: a D of one's own may couple images."""
    return dataclasses.replace(device, one_call=False) if device.one_call == "auto" else device
