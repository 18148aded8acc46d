"""A user's network, an `nn.Module` or an object with `model_fn`, as a module that a game can train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorOutput


class UserNetwork(nn.Module):
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
        if self.find_trainable():
            return
        if list(self.parameters()):
            raise UsageError(
                f"{role}: none of its parameters requires a gradient. Call close of the ScalingManager that trains it, "
                "or requires_grad_(True) of its layers"
            )
        raise UsageError(f"{role}: has no parameters to train. Store its layers as attributes, in __init__")

    def find_trainable(self) -> set[str]:
        """Return the names of the parameters that are trained; those found before, if all are frozen between turns."""
        found = {name for name, p in self.named_parameters() if p.requires_grad}
        self._trainable = found or self._trainable
        return self._trainable

    def unfreeze(self) -> None:
        """Let the parameters that are trained require gradients, which they do not between turns."""
        trainable = self.find_trainable()
        for name, p in self.named_parameters():
            if not nn.parameter.is_lazy(p):  # refused with its name later
                p.requires_grad_(name in trainable)


class UserGenerator(UserNetwork):
    def __init__(self, network: Any):
        super().__init__(network, "generator")

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        return self._call(z, y)


class UserDiscriminator(UserNetwork):
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
