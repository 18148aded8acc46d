"""Check the arguments of a replica before anything changes, and give all ranks the same weights at the start."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paragan.comm.compression.compressors import parse_wire
from paragan.comm.process_group import broadcast_bits
from paragan.comm.replica_check import find_layout_difference
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, replace_fields
from paragan.plan.select.candidates import StrategyField, parse_strategy

Optimizer = torch.optim.Optimizer
NamedParameters = list[tuple[str, nn.Parameter]]


def label_modules(modules: Sequence[nn.Module]) -> tuple[str, list[str]]:
    """Return a name for a replica, by the classes of its modules, and one for each module.

    Raises:
        UsageError: there is no module, or something else.
    """
    if not modules:
        raise UsageError("modules: is empty. Use a module or a list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"modules: holds a {type(module).__name__}. Use a module or a list of modules")
        if isinstance(module, DistributedDataParallel):
            raise UsageError("modules: holds a DistributedDataParallel. Use its .module, and call that one")
    classes = [type(getattr(module, "_orig_mod", module)).__name__ for module in modules]
    labels: list[str] = []
    for i, name in enumerate(classes):
        labels.append(f"{name} {classes[: i + 1].count(name)}" if classes.count(name) > 1 else name)
    return " and ".join(labels), labels


def parse_exchange(exchange: Any, wire: Any, world: World) -> Any:
    """Return the strategy that says how ranks exchange a replica.

    Raises:
        UsageError: there is none of this name, its ranks have roles, or it does not run on so many ranks.
    """
    if isinstance(exchange, str):
        strategy = parse_strategy(exchange)
    elif isinstance(exchange, Mapping):
        strategy = from_dict(StrategyField, {"strategy": dict(exchange)}).strategy  # pyright: ignore
    else:
        strategy = exchange
    name = getattr(strategy, "name", type(strategy).__name__)
    if not hasattr(strategy, "player_exchange"):
        raise UsageError(f"exchange: is a {name}. Use the name of a strategy, such as sync or gossip")
    if wire is not None:
        strategy = replace_fields(strategy, {"wire": parse_wire(wire)})
    if strategy.per_label or strategy.auto_request or strategy.splits_ranks or strategy.reuses_fakes:
        raise UsageError(
            f"exchange={name}: gives ranks or turns other roles, which a loop of yours cannot play. Use paragan train, "
            "Estimator or ScalingManager for it, or exchange=sync, quantized or gossip"
        )
    if strategy.shard_optimizer:
        raise UsageError(
            f"exchange={name}: shard_optimizer=true needs an optimizer of parts of the parameters, and a Replica takes "
            "yours. Use shard_optimizer=false"
        )
    if strategy.max_message_delay:
        raise UsageError(
            f"exchange={name}: messages are under way between turns, and a loop of yours does not wait for them. Use "
            "exchange=gossip"
        )
    if strategy.has_outer_of_d:
        raise UsageError(f"exchange={name}: outer_d is for a D, and a replica is one player. Use outer")
    strategy = strategy.without_rank_loss()
    strategy.check(world.size)
    return strategy


def check_parameters(
    modules: Sequence[tuple[str, nn.Module]], label: str, optimizer: Optimizer, others: Container[Tensor]
) -> NamedParameters:
    """Return the parameters that the optimizer moves, by name, in the order of the modules: those that are not frozen.

    Args:
        modules: by their labels.
        label: of the replica.
        optimizer: its optimizer.
        others: parameters of other replicas, which these modules may share.

    Raises:
        UsageError: the optimizer holds others than the modules, or not all that require gradients.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"optimizer: is a {type(optimizer).__name__}. Use a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        need = "sparse gradients" if isinstance(optimizer, torch.optim.SparseAdam) else "several passes in a step"
        raise UsageError(f"optimizer: {type(optimizer).__name__} needs {need}. Use another one, such as Adam")
    names: dict[nn.Parameter, str] = {}
    for module_label, module in modules:
        for name, p in module.named_parameters():
            names.setdefault(p, f"{module_label} {name}")
    moved = {p: None for group in optimizer.param_groups for p in group["params"]}
    for p in moved:
        if p not in names:
            raise UsageError(
                f"optimizer: holds a parameter {list(p.shape)} that {label} has not. Give the modules that it belongs "
                "to, or leave it out of the optimizer"
            )
        if p in others:
            raise UsageError(
                f"{names[p]}: is moved by the optimizer of another replica too. Leave it out of one of the optimizers, "
                "or call release() of a replica that is not used any more"
            )
    missing = [name for p, name in names.items() if p.requires_grad and p not in moved and p not in others]
    if missing:
        others_too = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UsageError(
            f"{missing[0]}{others_too}: requires a gradient, and the optimizer of {label} does not hold it. Add it to "
            "the optimizer, or freeze it with requires_grad_(False)"
        )
    named = [(name, p) for p, name in names.items() if p in moved and p.requires_grad]
    for name, p in named:
        _check_parameter(name, p)
    return named


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if nn.parameter.is_lazy(p):
        raise UsageError(f"{name}: has no shape before its first pass. Run the network once before, or give its sizes")
    if not p.is_floating_point():
        raise UsageError(f"{name}: is {p.dtype}. Use a floating-point dtype")


def check_exchange(
    strategy: Any,
    label: str,
    named: NamedParameters,
    optimizer: Optimizer,
    max_norm: float | None,
    ema: float | None,
    buffers: str,
    world: World,
) -> None:
    """Raise UsageError if the options of a replica do not fit together."""
    if not named:
        raise UsageError(f"{label}: has no parameters to train. Give modules with parameters that require gradients")
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm={max_norm:g}: must be positive. Use 1, or None to clip nothing")
    if ema is not None and not 0 < ema < 1:
        raise UsageError(f"ema={ema:g}: must be between 0 and 1. Use 0.999, or None for no average")
    if buffers not in ("first", "mean", "own"):
        raise UsageError(f"buffers={buffers}: there is no such choice. Use first, mean or own")
    name, p = named[0]
    if world.size > 1 and p.device.type != world.device.type:
        raise UsageError(
            f"{name}: is on {p.device.type}, and the ranks communicate for {world.device.type}. Use "
            f"paragan.join(device={p.device.type!r}), or move the modules"
        )
    kinds = {p.dtype for _, p in named}
    if strategy.wire.lossy and world.size > 1 and kinds != {torch.float32}:
        other = next(name for name, p in named if p.dtype != torch.float32)
        raise UsageError(f"wire={strategy.wire.name}: {other} is not float32. Use wire=exact, or float32 parameters")
    if strategy.requires_sgd:
        _check_sgd(strategy, optimizer, max_norm, len(kinds))


def _check_sgd(strategy: Any, optimizer: Optimizer, max_norm: float | None, num_kinds: int) -> None:
    groups = optimizer.param_groups
    plain = all(not group.get(field) for group in groups for field in ("momentum", "weight_decay", "maximize"))
    if type(optimizer) is not torch.optim.SGD or not plain or len({group["lr"] for group in groups}) > 1:
        raise UsageError(
            f"exchange={strategy.name}: takes plain gradient steps of its own. Use torch.optim.SGD with one learning "
            "rate, without momentum and weight decay"
        )
    if max_norm is not None:
        raise UsageError(f"max_norm={max_norm:g}: exchange={strategy.name} takes its own steps. Leave max_norm out")
    if num_kinds > 1:
        raise UsageError(f"exchange={strategy.name}: parameters have several dtypes. Use one")


def check_same_networks(world: World, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise UsageError on all ranks if they hold other tensors than rank 0, by name, dtype and shape."""
    if world.size == 1:
        return
    difference = find_layout_difference(world.all_ranks, list(tensors))
    if difference:
        raise UsageError(f"ranks have different networks: {difference}. Build the same network on all ranks")


def broadcast_state(world: World, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    if world.size == 1:
        return
    with torch.no_grad():
        for _, tensor in tensors:
            tensor.copy_(broadcast_bits(world.all_ranks, tensor, world.is_main))
