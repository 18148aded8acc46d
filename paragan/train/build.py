"""TODO: docstring of paragan/train/build.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paragan.comm.flat_params import bucket_bytes
from paragan.config.resolve import make_spec, resolve_optimizer
from paragan.config.run import Run
from paragan.config.user_code import UserObjective, check_nets, conditioning_input_of, is_user_defined, weight_clip_of
from paragan.config.validate import check_gradient_penalty, check_weight_clip
from paragan.core.devices import autocast_factory
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.game.compiled_pass import compile_pass
from paragan.game.ema import EMAConfig
from paragan.game.game import ConditioningFn, Game
from paragan.game.graph_capture import GraphRecorder
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.losses.adversarial import Adversarial, ConcatRealFake
from paragan.losses.distillation import DistilledObjective
from paragan.losses.running_state import attach_state
from paragan.models.teacher import Teacher
from paragan.nets import Spec
from paragan.nets.lane_batch_norm import LaneBatchNorm, convert_batch_norm
from paragan.nets.memory_format import pad_channels, set_memory_format
from paragan.nets.spectral_norm import has_spectral_norm, power_iteration, train_mode
from paragan.optim.optimistic import get_wrapper
from paragan.optim.optimizers import LR_SCALINGS, PlayerOptim, build_optimizer
from paragan.train.user_code_check import check_user_networks


@dataclass(frozen=True)
class Networks:
    """Two networks on their device, ready to become players, and the size of the latent G takes, or what of a hand it
    is given instead. own: whether they have to be tried."""

    g: nn.Module
    d: nn.Module
    latent: int
    conditioning_input: ConditioningFn | None = None
    is_user_defined: bool = False


def build_networks(run: Run, spec: Spec, device: torch.device) -> Networks:
    """The two networks, initialised from the run's seed whatever else has drawn random numbers."""
    check_nets(run.nets, spec)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        g, d = run.nets.generator(spec), run.nets.discriminator(spec)
    given, own = conditioning_input_of(run.nets), is_user_defined(run.nets, run.objective)
    for role, net in (("generator", g), ("discriminator", d)) if own else ():
        if not isinstance(net, nn.Module):
            raise UsageError(f"{run.nets.name}.{role} gives {type(net).__name__}, no nn.Module")
    return to_device(run, Networks(g, d, 0 if given else run.nets.latent, given, own), device)


def to_device(run: Run, networks: Networks, device: torch.device) -> Networks:
    """The two networks on the device, in the layout the run asks for."""
    for name, net in (("G", networks.g), ("D", networks.d)):
        _check_materialized(net)
        _check_saveable(net)
        if any(tensor.device != device for tensor in (*net.parameters(), *net.buffers())):
            net.to(device=device)
        set_memory_format(net, run.device.memory_format_of(name))
        pad_channels(net, run.device.pad_channels)
    return networks


def _check_materialized(net: nn.Module) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape before its first pass: give its layer its sizes (no nn.Lazy... layer)"
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise UsageError(f"numbers of {name} share memory (expand), and none could be filled in: clone it")


def _check_saveable(net: nn.Module) -> None:
    for name, value in net.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            raise UsageError(
                f"{name} is extra state ({type(value).__name__}), and files hold tensors alone: keep it in a buffer, "
                "without get_extra_state"
            )


def check_networks(run: Run, networks: Networks) -> None:
    """Networks that cannot be trained as the run says; what normalises over the batch is made to see lanes."""
    if networks.conditioning_input and (run.g_batch or run.batch) != run.batch:
        raise UsageError(f"--g_batch {run.g_batch}: G is given the images of the batch, so leave --g_batch out")
    if networks.conditioning_input and run.distill_from:
        raise UsageError(f"teacher={run.distill_from} teaches a G that is given latents, not data")
    shared = {id(p) for p in networks.g.parameters()} & {id(p) for p in networks.d.parameters()}
    if shared:
        raise UsageError(
            f"G and D share {len(shared)} parameters: each network moves its own, so copy the shared layers"
        )
    check_weight_clip(run.objective, has_spectral_norm(networks.d))
    unconverted = [name for net in (networks.g, networks.d) for name in convert_batch_norm(net)]
    if unconverted and run.device.lanes_per_pass != 1:
        raise UsageError(
            f"{unconverted[0]} normalises over the batch in a way lanes cannot see; use --device.lanes_per_pass=1 (lane by lane)"
        )
    check_gradient_penalty(run.objective, any(isinstance(layer, LaneBatchNorm) for layer in networks.d.modules()))
    for name, layer in networks.g.named_modules():
        if isinstance(layer, LaneBatchNorm) and layer.running_mean is None:
            raise UsageError(
                f"{name} of G keeps no running statistics, so a sample would depend on those made with it: "
                "set track_running_stats=True"
            )


def build_player(
    run: Run,
    name: str,
    net: nn.Module,
    player_optim: PlayerOptim,
    batch: int,
    ema: EMAConfig | None = None,
    weight_clip: float | None = None,
) -> Player:
    """A network that moves as the run says."""
    train_mode(net)
    player_optim = resolve_optimizer(player_optim, run.strategy)
    player = Player(
        name,
        net,
        lambda parameters: build_optimizer(
            player_optim.optimizer, parameters, get_wrapper(player_optim.optimizer_wrapper, player_optim.extrapolation)
        ),
        elementwise=player_optim.optimizer.elementwise,
        lane_batch=batch // run.lanes,
        ema=ema,
        lr_factor=lr_schedule(run, player_optim),
        pre_step=power_iteration,
        weight_clip=weight_clip,
        bucket_bytes=bucket_bytes(run.strategy.wire),
        track_update_norm=run.health.enabled,
    )
    if run.strategy.wire.lossy and player.flat.params.dtype != torch.float32:
        kind = str(player.flat.params.dtype).removeprefix("torch.")
        raise UsageError(f"{name} has {kind} parameters, which only --strategy.wire=exact carries")
    return player


def make_teacher(run: Run, dataset: Dataset, device: torch.device) -> Teacher:
    """The generators that a run learns from. Unusable where it cannot."""
    return Teacher.load(
        Path(run.distill_from), make_spec(run, dataset), run.nets.latent, dataset.classes, device, run.nets
    )


def make_objective(run: Run, dataset: Dataset, device: torch.device) -> Objective:
    """What the players of a run want."""
    if not isinstance(run.objective, Adversarial):
        return UserObjective(run.objective)
    objective = ConcatRealFake(run.objective) if run.device.concat_real_fake is True else run.objective
    if not run.distill_from or not run.distill_weight:
        return objective
    return DistilledObjective(objective, make_teacher(run, dataset, device), run.distill_weight)


def make_recorder_factory(run: Run, device: torch.device) -> Callable[[], GraphRecorder | None]:
    """What plays the passes of a turn. Unusable where an objective of one's own does not tell one kind of step from
    another."""
    if not run.device.capture_passes:
        return lambda: None
    objective = run.objective
    if not isinstance(objective, Adversarial):
        raise UsageError("--device.capture_passes=true records the passes of our own objectives only: leave it out")
    if device.type == "cpu":
        return lambda: GraphRecorder(
            objective.penalties_due, compile_pass, warmup_passes=0
        )  # what is compiled rounds otherwise: a resume goes on
    return lambda: GraphRecorder(objective.penalties_due)


def build_game(run: Run, networks: Networks, dataset: Dataset, device: torch.device) -> Game:
    """Players, objective and label source of a run."""
    check_networks(run, networks)
    adversarial = run.objective if isinstance(run.objective, Adversarial) else None
    if adversarial:
        attach_state(adversarial.make_state(run.batch), networks.d)
    if run.device.compile:
        for net in (networks.g,) if run.objective.second_order else (networks.g, networks.d):
            net.compile()

    game = Game(
        g=build_player(run, "G", networks.g, run.g, run.g_batch or run.batch, run.ema),
        d=build_player(run, "D", networks.d, run.d, run.batch, weight_clip=weight_clip_of(run.objective) or None),
        objective=make_objective(run, dataset, device),
        latent=networks.latent,
        labels=dataset.labels if run.data.labels else None,
        g_lane_batch=(run.g_batch or run.batch) // run.lanes,
        d_lane_batch=run.batch // run.lanes,
        d_steps=run.d_steps,
        autocast=autocast_factory(device, run.device.precision),
        make_recorder=make_recorder_factory(run, device),
        conditioning_input=networks.conditioning_input,
        shape=dataset.shape,
    )
    if not networks.is_user_defined:
        return game
    before = _named_buffers(game)
    game = check_user_networks(
        game,
        dataset,
        run.lanes,
        run.device.lanes_per_pass != 1,
        adversarial.required_d_conditioning if adversarial else "",
    )
    if game.uses_torch_rng and run.device.capture_passes:
        raise UsageError(
            "--device.capture_passes=true records what a pass draws, and these networks draw by themselves (dropout)"
        )
    moved = next((name for name, buffer in _named_buffers(game).items() if before.get(name) is not buffer), "")
    if moved and run.device.capture_passes:
        raise UsageError(
            f"--device.capture_passes=true: a forward pass replaces {moved}; write into it (add_), or leave it false"
        )
    return game


def _named_buffers(game: Game) -> dict[str, torch.Tensor]:
    return {f"{name} of {p.name}": buffer for p in game.players for name, buffer in p.net.named_buffers()}


def lr_schedule(run: Run, player_optim: PlayerOptim) -> Callable[[int], float]:
    """images seen after a step -> factor on a player's learning rate, which follows the batch by the player's rule."""
    rate = player_optim.lr_schedule(run.total_images)
    if not run.ramp:
        return rate
    return lambda images: rate(images) * LR_SCALINGS[player_optim.lr_scaling](run.batch_at(images - 1) / run.batch)
