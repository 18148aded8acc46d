"""TODO: docstring of paragan/train/build.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paragan.comm.flat_params import bucket_bytes
from paragan.config.resolve import learning, spec_of
from paragan.config.run import Run
from paragan.config.user_code import OwnObjective, check_nets, clip_of, given_of, is_own
from paragan.config.validate import refuse_clip, refuse_mixed
from paragan.core.devices import autocast
from paragan.core.errors import Unusable
from paragan.data.dataset import Images
from paragan.game.compiled_pass import program
from paragan.game.ema import Decay
from paragan.game.game import Game, Given
from paragan.game.graph_capture import Recorder
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.losses.adversarial import Adversarial, OneCall
from paragan.losses.distillation import Distilled
from paragan.losses.running_state import attach
from paragan.models.teacher import Teacher
from paragan.nets import Spec
from paragan.nets.lane_batch_norm import LaneBatchNorm, convert
from paragan.nets.memory_format import align, lay
from paragan.nets.spectral_norm import normalised, power_iteration, train_mode
from paragan.optim.optimistic import wrapper
from paragan.optim.optimizers import RULES, Side, built
from paragan.train.user_code_check import tried


@dataclass(frozen=True)
class Pair:
    """Two networks on their device, ready to become players, and the size of the latent G takes, or what of a hand it
    is given instead. own: whether they have to be tried."""

    g: nn.Module
    d: nn.Module
    latent: int
    given: Given | None = None
    own: bool = False


def build_nets(run: Run, spec: Spec, device: torch.device) -> Pair:
    """The two networks, initialised from the run's seed whatever else has drawn random numbers."""
    check_nets(run.nets, spec)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        g, d = run.nets.generator(spec), run.nets.discriminator(spec)
    given, own = given_of(run.nets), is_own(run.nets, run.objective)
    for role, net in (("generator", g), ("discriminator", d)) if own else ():
        if not isinstance(net, nn.Module):
            raise Unusable(f"{run.nets.name}.{role} gives {type(net).__name__}, no nn.Module")
    return placed(run, Pair(g, d, 0 if given else run.nets.latent, given, own), device)


def placed(run: Run, pair: Pair, device: torch.device) -> Pair:
    """The two networks on the device, in the layout the run asks for."""
    for name, net in (("G", pair.g), ("D", pair.d)):
        _refuse_unfilled(net)
        _refuse_unsaved(net)
        if any(tensor.device != device for tensor in (*net.parameters(), *net.buffers())):
            net.to(device=device)
        lay(net, run.device.layout_of(name))
        align(net, run.device.pad_channels)
    return pair


def _refuse_unfilled(net: nn.Module) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise Unusable(f"{name} has no shape before its first pass: give its layer its sizes (no nn.Lazy... layer)")
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise Unusable(f"numbers of {name} share memory (expand), and none could be filled in: clone it")


def _refuse_unsaved(net: nn.Module) -> None:
    for name, value in net.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            raise Unusable(
                f"{name} is extra state ({type(value).__name__}), and files hold tensors alone: keep it in a buffer, "
                "without get_extra_state"
            )


def refuse_unfit(run: Run, pair: Pair) -> None:
    """Networks that cannot be trained as the run says; what normalises over the batch is made to see lanes."""
    if pair.given and (run.g_batch or run.batch) != run.batch:
        raise Unusable(f"--g_batch {run.g_batch}: G is given the images of the batch, so leave --g_batch out")
    if pair.given and run.teacher:
        raise Unusable(f"teacher={run.teacher} teaches a G that is given latents, not data")
    shared = {id(p) for p in pair.g.parameters()} & {id(p) for p in pair.d.parameters()}
    if shared:
        raise Unusable(f"G and D share {len(shared)} parameters: each network moves its own, so copy the shared layers")
    refuse_clip(run.objective, normalised(pair.d))
    unconverted = [name for net in (pair.g, pair.d) for name in convert(net)]
    if unconverted and run.device.merge != 1:
        raise Unusable(
            f"{unconverted[0]} normalises over the batch in a way lanes cannot see; use --device.merge=1 (lane by lane)"
        )
    refuse_mixed(run.objective, any(isinstance(layer, LaneBatchNorm) for layer in pair.d.modules()))
    for name, layer in pair.g.named_modules():
        if isinstance(layer, LaneBatchNorm) and layer.running_mean is None:
            raise Unusable(
                f"{name} of G keeps no running statistics, so a sample would depend on those made with it: "
                "set track_running_stats=True"
            )


def build_player(
    run: Run,
    name: str,
    net: nn.Module,
    side: Side,
    batch: int,
    average: Decay | None = None,
    bound: float | None = None,
) -> Player:
    """A network that moves as the run says."""
    train_mode(net)
    side = learning(side, run.strategy)
    player = Player(
        name,
        net,
        lambda parameters: built(side.optimizer, parameters, wrapper(side.optimism, side.extrapolation)),
        elementwise=side.optimizer.elementwise,
        lane_batch=batch // run.lanes,
        average=average,
        rate=rate_of(run, side),
        iterate=power_iteration,
        bound=bound,
        bucket_bytes=bucket_bytes(run.strategy.wire),
        watched=run.health.watch,
    )
    if run.strategy.wire.lossy and player.flat.params.dtype != torch.float32:
        kind = str(player.flat.params.dtype).removeprefix("torch.")
        raise Unusable(f"{name} has {kind} parameters, which only --strategy.wire=exact carries")
    return player


def teacher_of(run: Run, images: Images, device: torch.device) -> Teacher:
    """The generators that a run learns from. Unusable where it cannot."""
    return Teacher.of(Path(run.teacher), spec_of(run, images), run.nets.latent, images.classes, device, run.nets)


def objective_of(run: Run, images: Images, device: torch.device) -> Objective:
    """What the players of a run want."""
    if not isinstance(run.objective, Adversarial):
        return OwnObjective(run.objective)
    objective = OneCall(run.objective) if run.device.one_call is True else run.objective
    if not run.teacher or not run.teacher_weight:
        return objective
    return Distilled(objective, teacher_of(run, images, device), run.teacher_weight)


def recorder_of(run: Run, device: torch.device) -> Callable[[], Recorder | None]:
    """What plays the passes of a turn. Unusable where an objective of one's own does not tell one kind of step from
    another."""
    if not run.device.graph:
        return lambda: None
    objective = run.objective
    if not isinstance(objective, Adversarial):
        raise Unusable("--device.graph=true records the passes of our own objectives only: leave it out")
    if device.type == "cpu":
        return lambda: Recorder(objective.kind, program, warm=0)  # what is compiled rounds otherwise: a resume goes on
    return lambda: Recorder(objective.kind)


def build_game(run: Run, pair: Pair, images: Images, device: torch.device) -> Game:
    """Players, objective and label source of a run."""
    refuse_unfit(run, pair)
    adversarial = run.objective if isinstance(run.objective, Adversarial) else None
    if adversarial:
        attach(adversarial.kept(run.batch), pair.d)
    if run.device.compile:
        for net in (pair.g,) if run.objective.second_order else (pair.g, pair.d):
            net.compile()

    game = Game(
        g=build_player(run, "G", pair.g, run.g, run.g_batch or run.batch, run.average),
        d=build_player(run, "D", pair.d, run.d, run.batch, bound=clip_of(run.objective) or None),
        objective=objective_of(run, images, device),
        latent=pair.latent,
        labels=images.labels if run.data.labels else None,
        g_lane=(run.g_batch or run.batch) // run.lanes,
        d_lane=run.batch // run.lanes,
        d_steps=run.d_steps,
        autocast=autocast(device, run.device.precision),
        recorder=recorder_of(run, device),
        given=pair.given,
        shape=images.shape,
    )
    if not pair.own:
        return game
    before = _buffers(game)
    game = tried(game, images, run.lanes, run.device.merge != 1, adversarial.conditioning if adversarial else "")
    if game.restless and run.device.graph:
        raise Unusable("--device.graph=true records what a pass draws, and these networks draw by themselves (dropout)")
    moved = next((name for name, buffer in _buffers(game).items() if before.get(name) is not buffer), "")
    if moved and run.device.graph:
        raise Unusable(f"--device.graph=true: a forward pass replaces {moved}; write into it (add_), or leave it false")
    return game


def _buffers(game: Game) -> dict[str, torch.Tensor]:
    return {f"{name} of {p.name}": buffer for p in game.players for name, buffer in p.net.named_buffers()}


def rate_of(run: Run, side: Side) -> Callable[[int], float]:
    """images seen after a step -> factor on a player's learning rate, which follows the batch by the player's rule."""
    rate = side.rate(run.images)
    if not run.ramp:
        return rate
    return lambda images: rate(images) * RULES[side.rule](run.batch_at(images - 1) / run.batch)
