"""The state of an optimizer and the average of a player, of which each rank keeps its own part only.

ZeRO stage 1 (Rajbhandari et al. 2020): the owner of a part gets the sum of its gradient (comm/reduce_scatter.py), each
rank steps its part, and all gather the parameters (comm/flat_shards.py). In a checkpoint everything is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paragan.comm.flat_shards import FlatShards
from paragan.comm.process_group import Group
from paragan.game.ema import EMA
from paragan.game.parameter_groups import as_parameter
from paragan.game.trained_parameters import Optimizer


class ShardedEMA(EMA):
    """The average of the parameters that this rank owns.

    params : [owned], one piece after another
    """

    def __init__(self, average: EMA, shards: FlatShards):
        self._shards = shards
        self._span = slice(0, len(average.params))
        self._owned = shards.pieces(self._span)
        super().__init__(torch.cat([average.params[piece] for piece in self._owned]))

    @property
    def _parts(self) -> list[tuple[slice, Tensor]]:
        """Each piece of the flat vector with its part of `params`."""
        ends = itertools.accumulate(piece.stop - piece.start for piece in self._owned)
        return [(piece, self.params[end - piece.stop + piece.start : end]) for piece, end in zip(self._owned, ends)]

    @torch.no_grad()
    def update(self, params: Tensor, decay: float) -> None:
        for piece, average in self._parts:
            average.lerp_(params[piece].to(average.dtype), 1 - decay)

    def copy_to(self, params: Tensor) -> None:
        """Write the average into the flat vector, whole. All ranks call this."""
        assert params is self._shards.flat.params
        for piece, average in self._parts:
            params[piece] = average
        self._shards.gather_params()

    def full_vector(self, is_receiver: bool = True) -> Tensor | None:
        """Return the average [total] in the memory of the host; None for other ranks. All ranks call this."""
        return self._shards.gather([average for _, average in self._parts], self._span, is_receiver)

    def is_finite(self) -> bool:
        """Return whether the numbers of all ranks are finite. All ranks call this."""
        broken = self.params.isfinite().all().logical_not().float()[None]
        self._shards.group.all_reduce_sum(broken).wait()
        return not broken.any()


class ShardedState:
    """The optimizer state of the parameters that this rank owns.

    Args:
        shards: what it owns.
        spans: slices of the flat vector that are parameters of the whole optimizer, by group.
        step_group: the ranks that step together; counts what is sent in a step.
    """

    def __init__(self, shards: FlatShards, spans: Sequence[Sequence[slice]], step_group: Group):
        self.shards = shards
        self.step_group = step_group
        self._step_shards = FlatShards(shards.flat, step_group)
        self._spans = list(itertools.chain(*spans))
        self._pieces = [shards.pieces(span) for span in self._spans]
        self._group_sizes = [len(group) for group in spans]

    def parameters(self) -> list[list[nn.Parameter]]:
        """Return the owned pieces as parameters of an optimizer, by group."""
        pieces = iter(self._pieces)
        owned = [itertools.chain(*itertools.islice(pieces, size)) for size in self._group_sizes]
        return [[as_parameter(self.shards.flat, piece) for piece in group] for group in owned]

    @torch.no_grad()
    def take_state(self, optimizer: Optimizer, full: Optimizer) -> None:
        """Take over this rank's part of the state of an optimizer of whole spans."""
        owned = iter([p for group in optimizer.param_groups for p in group["params"]])
        parameters = [p for group in full.param_groups for p in group["params"]]
        for parameter, span, pieces in zip(parameters, self._spans, self._pieces, strict=True):
            for piece in pieces:
                p = next(owned)
                for key, value in full.state.get(parameter, {}).items():
                    part = value
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        part = value[piece.start - span.start : piece.stop - span.start]
                    optimizer.state[p][key] = part.clone() if isinstance(part, Tensor) else part
        for group, full_group in zip(optimizer.param_groups, full.param_groups, strict=True):
            group.update({key: value for key, value in full_group.items() if key != "params"})

    def gather_state(self, tensors: Mapping[str, Tensor], is_receiver: bool) -> dict[str, Tensor]:
        """Return named tensors of the optimizer as those of an optimizer of whole spans. All ranks call this.

        Args:
            tensors: of this rank (optim/state_io.py): "0/exp_avg" belongs to the first piece.
            is_receiver: whether this rank wants them; others get nothing.
        """
        whole = {name: value for name, value in tensors.items() if name.startswith("group")}
        of_piece: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            owner, _, key = name.partition("/")
            if name not in whole:
                of_piece.setdefault(int(owner), {})[key] = value
        first = 0
        for number, (span, pieces) in enumerate(zip(self._spans, self._pieces)):
            states = [of_piece.get(first + i, {}) for i in range(len(pieces))]
            first += len(pieces)
            for key, value in sorted(states[0].items()):  # in one order on all ranks
                if value.shape == (pieces[0].stop - pieces[0].start,):
                    value = self.shards.gather([state[key] for state in states], span, is_receiver)
                if value is not None:
                    whole[f"{number}/{key}"] = value
        return whole if is_receiver else {}

    def gather_params(self) -> None:
        """Give all ranks the parameters of every owner, after a step. All ranks call this."""
        self._step_shards.gather_params()
