"""Groups of a player's parameters in its optimizer, as views of its flat vector, and the freezing of groups."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from paragan.comm.flat_params import FlatParams


class ParameterGroup(Protocol):
    """Some parameters of a player.

    names              : of the parameters in the network
    options            : of their group in the optimizer, such as lr
    freeze_from_images : after so many images they do not change; None: they always do
    """

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def options(self) -> Mapping[str, float]: ...
    @property
    def freeze_from_images(self) -> float | None: ...


class GroupedParameters:
    """The flat vector of a player, divided among the groups of its optimizer.

    Args:
        net: the network, whose parameters are in `flat`.
        flat: the vectors.
        groups: every parameter belongs to one.
    """

    def __init__(self, net: nn.Module, flat: FlatParams, groups: Sequence[ParameterGroup]):
        names = {id(p): name for name, p in net.named_parameters()}
        self._flat = flat
        self._groups = groups
        self._owners = [
            next(i for i, group in enumerate(groups) if names[id(p)] in group.names) for p in flat.parameters
        ]
        self._spans = list(self._contiguous_spans())
        self._freezing = [
            (groups[i].freeze_from_images, span) for i, span in self._spans if groups[i].freeze_from_images is not None
        ]

    def _contiguous_spans(self) -> Generator[tuple[int, slice]]:
        """Yield (group, slice of the flat vector), padding included, for every run of parameters of one group."""
        ends = [*(start for start, _ in self._flat.slices[1:]), len(self._flat.params)]
        for owner, numbers in itertools.groupby(range(len(ends)), key=self._owners.__getitem__):
            first, *others = numbers
            yield owner, slice(self._flat.slices[first][0], ends[others[-1] if others else first])

    @property
    def spans(self) -> list[list[slice]]:
        """Slices of the flat vector that belong to each group."""
        return [[span for owner, span in self._spans if owner == i] for i in range(len(self._groups))]

    def for_optimizer(self, elementwise: bool) -> list[dict[str, Any]]:
        """Return the groups as torch's optimizers take them.

        Args:
            elementwise: parameters are contiguous slices of the flat vector; otherwise those of the network.
        """
        if elementwise:
            return self.with_options([[as_parameter(self._flat, span) for span in spans] for spans in self.spans])
        members: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for owner, p in zip(self._owners, self._flat.parameters):
            members[owner].append(p)
        return self.with_options(members)

    def with_options(self, members: Sequence[Sequence[nn.Parameter]]) -> list[dict[str, Any]]:
        """Return the groups with these parameters, as torch's optimizers take them."""
        return [{"params": list(part), **group.options} for part, group in zip(members, self._groups)]

    @contextlib.contextmanager
    def freezing(self, images: int) -> Generator[None]:
        """Take frozen parameters out of the gradient, and undo inside changes of them. images: seen before the step."""
        spans = [span for start, span in self._freezing if start is not None and images >= start]
        for span in spans:
            self._flat.grads[span].zero_()
        before = [self._flat.params[span].clone() for span in spans]
        yield
        for span, params in zip(spans, before):
            self._flat.params[span].copy_(params)


def as_parameter(flat: FlatParams, span: slice) -> nn.Parameter:
    """Return a slice of the flat vectors as a parameter with its gradient."""
    parameter = nn.Parameter(flat.params[span])
    parameter.grad = flat.grads[span]
    return parameter
