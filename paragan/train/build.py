"""Build a game from a run record: two networks, two players, their optimizers, and the objective.

Networks are initialised from the seed of the run alone, so every rank builds the same ones. Networks that cannot be
trained (shared parameters, lazy layers, layers that couple the images of a batch) are refused here, before a folder is
created. Networks and objectives of the user's own are tried on a few images (user_code_check.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paragan.comm.flat_params import bucket_bytes
from paragan.config.resolve import make_spec, resolve_optimizer
from paragan.config.run import AnyStrategy, Run
from paragan.config.sections import DeviceOptions
from paragan.config.user_code import UserObjective, check_nets, conditioning_input_of, is_user_defined, weight_clip_of
from paragan.config.validate import check_gradient_penalty, check_weight_clip
from paragan.core.devices import autocast_factory
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.game.compiled_pass import compile_pass
from paragan.game.ema import EMAConfig
from paragan.game.game import ConditioningFn, Game
from paragan.game.graph_capture import GraphRecorder
from paragan.game.late_start import LateStart
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.losses.adversarial import Adversarial, ConcatRealFake
from paragan.losses.distillation import DistilledObjective
from paragan.losses.distribution_matching import DistributionMatching, TaughtMatching
from paragan.losses.running_state import attach_state
from paragan.models.diffusion_teacher import load_denoiser, start_as_teacher
from paragan.models.teacher import Teacher
from paragan.nets import Spec
from paragan.nets.feature_discriminator import FeatureDiscriminator
from paragan.nets.lane_batch_norm import LaneBatchNorm, convert_batch_norm
from paragan.nets.memory_format import pad_channels, set_memory_format
from paragan.nets.spectral_norm import has_spectral_norm, power_iteration, train_mode
from paragan.optim.optimistic import get_wrapper
from paragan.optim.optimizers import LR_SCALINGS, DiscriminatorOptim, PlayerOptim, build_optimizer
from paragan.train.user_code_check import check_user_networks


@dataclass(frozen=True)
class Networks:
    """Two networks on their device, ready to become players.

    latent             : size of the latent that G takes (0: it takes `conditioning_input` instead)
    conditioning_input : what of a batch G is given, for image-to-image networks
    is_user_defined    : whether networks or objective are the user's own and have to be tried
    """

    g: nn.Module
    d: nn.Module
    latent: int
    conditioning_input: ConditioningFn | None = None
    is_user_defined: bool = False


def build_networks(run: Run, spec: Spec, device: torch.device) -> Networks:
    """Build the two networks, initialised from the seed of the run; torch's generator is left as it was.

    Raises:
        UsageError: the networks do not fit the images, or are not modules.
    """
    check_nets(run.nets, spec)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        g = run.nets.generator(spec)
        d = run.nets.discriminator(spec)
        if run.d_features.network:
            d = FeatureDiscriminator(d, run.d_features, spec)
    conditioning_input = conditioning_input_of(run.nets)
    has_user_code = is_user_defined(run.nets, run.objective)
    if has_user_code:
        for role, net in (("generator", g), ("discriminator", d)):
            if not isinstance(net, nn.Module):
                raise UsageError(f"{run.nets.name}.{role}: returned {type(net).__name__}. Return an nn.Module")
    if isinstance(run.objective, DistributionMatching) and run.distill_from:
        start_as_teacher(g, d, load_denoiser(Path(run.distill_from), spec)[0])
    latent = 0 if conditioning_input else run.nets.latent
    return to_device(run.device, Networks(g, d, latent, conditioning_input, has_user_code), device)


def to_device(options: DeviceOptions, networks: Networks, device: torch.device) -> Networks:
    """Move the networks to a device, in the memory format that the options ask for."""
    for name, net in (("G", networks.g), ("D", networks.d)):
        _check_materialized(net)
        _check_saveable(net)
        if any(tensor.device != device for tensor in (*net.parameters(), *net.buffers())):
            net.to(device=device)
        set_memory_format(net, options.memory_format_of(name))
        pad_channels(net, options.pad_channels)
    return networks


def _check_materialized(net: nn.Module) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name}: has no shape before its first pass. Give its layer its sizes, and use no nn.Lazy... layer"
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise UsageError(f"{name}: was made with expand, its numbers share memory and cannot be set. Use clone()")


def _check_saveable(net: nn.Module) -> None:
    for name, value in net.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            raise UsageError(
                f"{name}: is extra state ({type(value).__name__}), and files hold only tensors. Use a buffer instead "
                "of get_extra_state"
            )


def check_networks(run: Run, networks: Networks) -> None:
    """Refuse networks that cannot be trained as the run says; convert batch normalisation to normalise over a lane.

    Raises:
        UsageError: naming the field or the layer.
    """
    if networks.conditioning_input and (run.g_batch or run.batch) != run.batch:
        raise UsageError(f"--g_batch {run.g_batch}: G is given the images of the batch. Leave --g_batch out")
    if networks.conditioning_input and run.distill_from:
        raise UsageError(f"distill_from={run.distill_from}: teaches a G that takes latents, and this one takes data")
    shared = {id(p) for p in networks.g.parameters()} & {id(p) for p in networks.d.parameters()}
    if shared:
        raise UsageError(
            f"nets={run.nets.name}: G and D share {len(shared)} parameters, and each trains its own. "
            "Copy the shared layers"
        )
    check_weight_clip(run, has_spectral_norm(networks.d))
    unconverted = [name for net in (networks.g, networks.d) for name in convert_batch_norm(net)]
    if unconverted and run.device.lanes_per_pass != 1:
        raise UsageError(
            f"{unconverted[0]}: normalises over the batch in a way that lanes cannot see. "
            "Use --device.lanes_per_pass=1 (lane by lane)"
        )
    check_gradient_penalty(run, any(isinstance(layer, LaneBatchNorm) for layer in networks.d.modules()))
    if run.strategy.replicas_drift:
        _check_not_synchronised(run.strategy.name, networks)
    for name, layer in networks.g.named_modules():
        if isinstance(layer, LaneBatchNorm) and layer.running_mean is None:
            raise UsageError(
                f"{name}: keeps no running statistics, so a sample would depend on the others of its batch. "
                "Use track_running_stats=True"
            )


def _check_not_synchronised(strategy_name: str, networks: Networks) -> None:
    """Raise UsageError for a buffer that all ranks must sum in every step."""
    for role, net in (("G", networks.g), ("D", networks.d)):
        for name, module in net.named_modules():
            if hasattr(module, "synchronised") and getattr(module, "needs_all_ranks", True):
                raise UsageError(
                    f"--strategy={strategy_name}: {name or type(module).__name__} of {role} has buffers that all "
                    "ranks sum in every step, and here ranks train players of their own. Use --strategy=sync "
                    "--strategy.sync_period=1, or a quantizer without such buffers (--nets.quantizer=fsq)"
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
    """Build the player of a network: its flat parameters and optimizer, as the run says.

    Args:
        name: "G" or "D".
        batch: images of one of its steps, over all lanes.
        weight_clip: limit of D's weights, where the objective clips them (Wasserstein).
    """
    train_mode(net)
    section = name.lower()
    player_optim = resolve_optimizer(section, player_optim, run.strategy)
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
        max_norm=player_optim.max_norm,
        groups=player_optim.select_parameters(section, trained_parameters(net)),
        weight_clip=weight_clip,
        bucket_bytes=bucket_bytes(run.strategy.wire, single_bucket=run.strategy.uses_single_bucket),
        fragments=run.strategy.num_fragments,
        track_update_norm=run.health.enabled,
    )
    _check_dtype(player, run.strategy)
    return player


def trained_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a network that are not frozen, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def _check_dtype(player: Player, strategy: AnyStrategy) -> None:
    """Raise UsageError if the exchange or the optimizer cannot compute with numbers of the dtype of the parameters."""
    dtype = player.flat.params.dtype
    kind = str(dtype).removeprefix("torch.")
    wire = strategy.wire
    if wire.lossy and dtype != torch.float32 and not strategy.uses_single_bucket:
        raise UsageError(f"--strategy.wire={wire.name}: {player.name} has {kind} parameters. Use --strategy.wire=exact")
    eps = player.optimizer.param_groups[0].get("eps")
    if eps and not torch.tensor(eps, dtype=dtype):
        smallest = torch.finfo(dtype).smallest_normal
        raise UsageError(
            f"--{player.name.lower()}.optimizer.eps={eps:g}: is 0 in {kind}, the dtype of the parameters of "
            f"{player.name}. Use {smallest:.1g} or more"
        )


def make_teacher(run: Run, dataset: Dataset, device: torch.device) -> Teacher:
    """Load the generators that a run is distilled from.

    Raises:
        UsageError: they make other images, or are of other classes.
    """
    return Teacher.load(
        Path(run.distill_from), make_spec(run.data, dataset), run.nets.latent, dataset.classes, device, run.nets
    )


def make_objective(run: Run, dataset: Dataset, device: torch.device) -> Objective:
    """Make the objective of a run, with the distance to its teacher if it has one."""
    if isinstance(run.objective, DistributionMatching):
        spec = make_spec(run.data, dataset)
        if run.distill_from:
            teacher, _ = load_denoiser(Path(run.distill_from), spec, device)
        else:  # a run whose cost is counted
            with torch.random.fork_rng():
                torch.manual_seed(run.seed)
                teacher = run.nets.generator(spec).to(device)
        return TaughtMatching(run.objective, teacher)
    if not isinstance(run.objective, Adversarial):
        return UserObjective(run.objective)
    objective = ConcatRealFake(run.objective) if run.device.concat_real_fake is True else run.objective
    if not run.distill_from or not run.distill_weight:
        return objective
    return DistilledObjective(objective, make_teacher(run, dataset, device), run.distill_weight)


def make_late_start(run: Run) -> LateStart:
    """Return when D starts; never, if the objective does not train it."""
    if not getattr(run.objective, "trains_d", True):
        return LateStart.never()
    return LateStart(round(1000 * run.d.start_kimg), round(1000 * run.d.weight_warm_up_kimg))


def make_recorder_factory(run: Run, device: torch.device) -> Callable[[], GraphRecorder | None]:
    """Return a function that makes the recorder of a turn's passes, or None if `device.capture_passes` is off.

    Raises:
        UsageError: the objective is the user's own: it does not say which penalties a step has.
    """
    if not run.device.capture_passes:
        return lambda: None
    objective = run.objective
    if not isinstance(objective, Adversarial):
        raise UsageError("device.capture_passes=true: records the passes of built-in objectives only. Leave it out")
    if device.type == "cpu":
        # a compiled pass rounds differently, so it is used from the first pass on: a resumed run repeats it
        return lambda: GraphRecorder(objective.penalties_due, compile_pass, warmup_passes=0)
    return lambda: GraphRecorder(objective.penalties_due)


def build_game(run: Run, networks: Networks, dataset: Dataset, device: torch.device) -> Game:
    """Build the game of a run from its networks.

    Raises:
        UsageError: the networks or the objective cannot be trained as the run says.
    """
    check_networks(run, networks)
    adversarial = run.objective if isinstance(run.objective, Adversarial) else None
    objective = adversarial or UserObjective(run.objective)
    attach_state(objective.make_state(run.batch), networks.d)
    attach_state(objective.make_g_state(networks.g), networks.g)
    if run.device.compile:  # but not what is differentiated twice
        if not (adversarial and adversarial.path_length):
            networks.g.compile()
        if not run.objective.second_order:
            networks.d.compile()

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
        late_start=make_late_start(run),
        uses_torch_rng=getattr(run.nets, "uses_torch_rng", False),
        field_shapes=dataset.fields,
        primary=dataset.main_field or "images",
    )
    if not networks.is_user_defined:
        _check_recorded_numbers(run.device, game)
        return _sharing_forward(game, run.device)
    buffers_before = _named_buffers(game)
    game = check_user_networks(
        game,
        dataset,
        run.lanes,
        run.device.lanes_per_pass != 1,
        adversarial.required_d_conditioning if adversarial else "",
    )
    _check_recorded_numbers(run.device, game)
    if not run.device.capture_passes:
        return _sharing_forward(game, run.device)
    for name, buffer in _named_buffers(game).items():
        if buffers_before.get(name) is not buffer:
            raise UsageError(
                f"device.capture_passes=true: a forward pass replaces {name}. Write into it (add_), or leave it out"
            )
    return game


def _sharing_forward(game: Game, options: DeviceOptions) -> Game:
    """Return the game with one forward pass of G in a round, if both turns run G on the same input to the same end."""
    repeats = (
        game.conditioning_input is not None
        and game.d_steps == 1
        and not game.uses_torch_rng
        and not game.objective.latent_perturbation
        and not has_spectral_norm(game.g.net)  # its power iteration comes between the two turns
    )
    return replace(game, shares_forward=repeats and not options.lanes_per_pass and not options.capture_passes)


def _check_recorded_numbers(options: DeviceOptions, game: Game) -> None:
    if options.capture_passes and game.uses_torch_rng:
        raise UsageError(
            "device.capture_passes=true: would record the random numbers that these networks draw. Leave it out"
        )


def _named_buffers(game: Game) -> dict[str, torch.Tensor]:
    return {f"{name} of {p.name}": buffer for p in game.players for name, buffer in p.net.named_buffers()}


def lr_schedule(run: Run, player_optim: PlayerOptim) -> Callable[[int], float]:
    """Return images seen after a step -> factor on a player's learning rate.

    Where the batch grows (`ramp`), the rate follows it by the player's `lr_scaling`. It is 0 before D starts.
    """
    start = round(1000 * player_optim.start_kimg) if isinstance(player_optim, DiscriminatorOptim) else 0
    of_training = player_optim.lr_schedule(run.total_images - start)

    def schedule(images: int) -> float:
        return of_training(images - start) if images > start or not start else 0.0

    if not run.ramp:
        return schedule
    scaling = LR_SCALINGS[player_optim.lr_scaling]
    return lambda images: schedule(images) * scaling(run.batch_at(images - 1) / run.batch)
