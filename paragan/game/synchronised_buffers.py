"""Buffers of a module to which its forward passes add, summed over lanes and ranks once a step.

A module declares them by name:

    class Quantizer(nn.Module):
        synchronised = ("counts", "sums")

        def forward(self, x): ...  # in training mode adds to self.counts and self.sums, in place

        def apply_synchronised(self): ...  # optional; once a step, when they hold the sums over all lanes and ranks

What a pass adds has to be a sum over its rows: which lanes share a pass, and which rank owns them, then has no effect.
Outside the trainer nothing is intercepted, and a plain loop calls `apply_synchronised` after its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError

ATTRIBUTE = "_synchronised_buffers"  # of a module, in which it has its SynchronisedBuffers


class SynchronisedBuffers:
    """Takes the changes of declared buffers out of every forward pass, and applies their sum once a step.

    Has the interface of a `BatchCoupled` layer. Within a step every pass sees the buffers as the step found them.

    tracking : whether changes are counted: in the forward pass of a turn
    moments  : [m] the changes of this step, of all buffers

    Args:
        module: declares `synchronised`.
        name: of the module, for messages.
        dtype: of `moments`.

    Raises:
        UsageError: a declared buffer does not exist.
    """

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype):
        self.module = module
        self.name = name
        self.names: tuple[str, ...] = tuple(getattr(module, "synchronised"))  # noqa: B009 - no attribute of nn.Module
        buffers = dict(module.named_buffers(recurse=False))
        missing = [buffer for buffer in self.names if buffer not in buffers]
        if missing:
            names = ", ".join(buffers) or "names of buffers, made with register_buffer"
            raise UsageError(f"{name}: synchronised names {missing[0]!r}, which is no buffer. Use {names}")
        self.lane_batch: int | None = None
        self.tracking = False
        sizes = [buffers[buffer].numel() for buffer in self.names]
        self.moments = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(buffers.values())).device)
        self._saved: dict[str, tuple[Tensor, Tensor]] = {}  # by name: the buffer, and a copy of its values
        former = vars(module).get(ATTRIBUTE)
        if isinstance(former, SynchronisedBuffers):  # of a player that trained the network before
            former._remove_hooks()
        setattr(module, ATTRIBUTE, self)
        self._hooks = (
            module.register_forward_pre_hook(self._save),
            module.register_forward_hook(self._restore, always_call=True),
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _save(self, module: nn.Module, inputs: Any) -> None:
        buffers = {name: module.get_buffer(name) for name in self.names}
        self._saved = {name: (buffer, buffer.clone()) for name, buffer in buffers.items()}

    @torch.no_grad()
    def _restore(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for (name, (buffer, value)), change in zip(self._saved.items(), self._split_moments()):
            if self.tracking:
                change += (module.get_buffer(name) - value).to(change.dtype)
            buffer.copy_(value)
            setattr(module, name, buffer)  # the pass may have replaced it
        self._saved = {}

    def _split_moments(self) -> list[Tensor]:
        """Return the parts of `moments`, in the shapes of the buffers."""
        buffers = [self.module.get_buffer(name) for name in self.names]
        parts: Sequence[Tensor] = torch.split(self.moments, [buffer.numel() for buffer in buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, buffers)]

    def fill(self, value: float) -> None:
        """Set all elements of the buffers."""
        for name in self.names:
            self.module.get_buffer(name).fill_(value)

    def values(self) -> list[Tensor]:
        """Return a copy of the buffers."""
        return [self.module.get_buffer(name).clone() for name in self.names]

    @torch.no_grad()
    def apply_moments(self) -> None:
        """Add the changes to the buffers, zero them, and let the module use the sums."""
        for name, change in zip(self.names, self._split_moments()):
            buffer = self.module.get_buffer(name)
            buffer += change.to(buffer.dtype)
        self.moments.zero_()
        if apply := getattr(self.module, "apply_synchronised", None):
            apply()


def find_synchronised(net: nn.Module, dtype: torch.dtype) -> list[SynchronisedBuffers]:
    """Return the declared buffers of all modules of a network; `dtype` is that of their sums."""
    modules: list[tuple[str, nn.Module]] = list(net.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    declaring = [(name, module) for name, module in modules if hasattr(module, "synchronised")]
    return [SynchronisedBuffers(module, name or type(module).__name__, dtype) for name, module in declaring]
