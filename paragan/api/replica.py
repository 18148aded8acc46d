"""A replica: modules that one optimizer moves, trained on many ranks in a loop of the user.

    paragan.join()
    gen = paragan.Replica(generator, opt_g, wire="int8", max_norm=1.0, ema=0.999)
    disc = paragan.Replica([mpd, msd], opt_d)
    for batch in loader:
        with disc.turn():
            loss_d(...).backward()
        with gen.turn():
            loss_g(...).backward()

The step of a replica takes the way of every step of the trainer (game/trained_parameters.py), with the exchange of the
same strategies. What a turn adds is what a loop of the user needs: it freezes the other replicas, sees which parameters
got a gradient, and tells the other ranks why it failed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paragan.api.guarded_params import ANY_NUMBER, GuardedParams
from paragan.api.joined_world import join, leave_after_failure
from paragan.api.replica_checks import (
    broadcast_state,
    check_exchange,
    check_parameters,
    check_same_networks,
    label_modules,
    parse_exchange,
)
from paragan.api.turn_summary import CHECKED_TURNS, TurnNumbers, TurnSummary, gradients_carry_marks, marks_of
from paragan.comm.compressed_allreduce import DeliverNonFinite
from paragan.comm.flat_params import bucket_bytes
from paragan.comm.process_group import CommunicationError
from paragan.comm.world import World
from paragan.core.errors import RunError, UsageError
from paragan.game.trained_parameters import Optimizer, TrainedParameters

_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()
_numbers = itertools.count()


class Replica(TrainedParameters):
    """Modules that one optimizer moves, and that ranks train together.

    The weights and buffers of rank 0 are given to all ranks. The modules are called as before, without a wrapper.

    modules   : a module, or several
    optimizer : any optimizer of torch; it holds all parameters of the modules that require gradients, and no others
    exchange  : how ranks agree: a strategy by its name and fields ("sync", "gossip", "sync+sync_period=8", "DQGAN"), a
                mapping of its fields as in run.yaml, or the strategy
    wire      : how gradients (or parameters, under gossip) are encoded; None: the wire of the strategy
    max_norm  : the gradient is clipped to this norm, after it was averaged; None: it is not
    ema       : the weight, in each turn, of the old moving average of the parameters; None: there is no average
    buffers   : after every turn, all ranks get the buffers of rank 0 ("first", as under DistributedDataParallel) or the
                mean of floating-point ones ("mean"); or every rank keeps its own ("own"). With "first" and "mean",
                those that a module declares as `synchronised` are summed over ranks
    world     : of `paragan.join()`; None: the world that it returns
    turns     : how many turns were completed
    number    : of this replica in its world, the same on all ranks

    Raises UsageError, naming the argument, if they do not fit together.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        exchange: str | Mapping[str, Any] | Any = "sync",
        wire: Any = None,
        max_norm: float | None = None,
        ema: float | None = None,
        buffers: str = "first",
        world: World | None = None,
    ):
        self.world = world or join()
        self.modules = (modules,) if isinstance(modules, nn.Module) else tuple(modules)
        self.label, module_labels = label_modules(self.modules)
        self.strategy = parse_exchange(exchange, wire, self.world)
        self.max_norm, self.ema, self.buffers = max_norm, ema, buffers
        self.turns = 0
        self._named_modules = list(zip(module_labels, self.modules))
        for replica in [replica for replica in _replicas if replica.optimizer is optimizer]:
            replica.release()
        others = {p for replica in _replicas for p in replica.trained}
        named = check_parameters(self._named_modules, self.label, optimizer, others)
        check_exchange(self.strategy, self.label, named, optimizer, max_norm, ema, buffers, self.world)
        self._all_parameters = [p for module in self.modules for p in module.parameters()]
        self._untrained = [
            (name, p) for name, p in self.named_tensors() if isinstance(p, nn.Parameter) and not p.requires_grad
        ]
        self._optimizer_size = sum(len(group["params"]) for group in optimizer.param_groups)
        with self.reporting_failures("the start"):
            check_same_networks(self.world, list(self.named_tensors()))
            broadcast_state(self.world, list(self.named_tensors()))
            self.number = int(self.world.all_gather_str(str(next(_numbers)))[0])
        size = bucket_bytes(self.strategy.wire, single_bucket=self.strategy.uses_single_bucket)
        kinds = dict.fromkeys((p.dtype, p.device) for _, p in named)
        has_marks = gradients_carry_marks(self.strategy, {dtype for dtype, _ in kinds}, self.world)
        flats = [
            GuardedParams(
                [(name, p) for name, p in named if (p.dtype, p.device) == kind],
                size,
                self.label,
                has_marks,
                self.strategy.num_fragments,
            )
            for kind in kinds
        ]
        super().__init__(flats, optimizer, has_average=ema is not None)
        self.guarded = flats
        self._frozen: list[Tensor] = []
        self._open_turn: ReplicaTurn | None = None
        exchange_of_rank = self.strategy.player_exchange(self, self.world, 1 / self.world.size)
        assert exchange_of_rank
        self.player_exchange = exchange_of_rank
        _replicas.add(self)
        layers = dict.fromkeys(layer for module in self.modules for layer in module.modules())
        self._layers_with_buffers = [layer for layer in layers if any(True for _ in layer.buffers(recurse=False))]
        self._is_stepping = False
        self.uses_average = False  # whether the modules have the averaged weights now
        self._step_hook = optimizer.register_step_pre_hook(_make_step_check(self))
        weakref.finalize(self, _release, flats, self._step_hook)

    @property
    def parts(self) -> tuple[nn.Module | Optimizer, ...]:
        """Return the modules and the optimizer, for `check_replicas`."""
        return (*self.modules, self.optimizer)

    @contextlib.contextmanager
    def turn(
        self, *, backwards: int | None = 1, weight: float = 1.0, scaler: torch.amp.GradScaler | None = None
    ) -> Generator[ReplicaTurn]:
        """Take one step: backward runs inside, and the optimizer steps at the end.

        Gradients are exchanged while backward runs. Forward runs inside too, unless backward is that of what this
        returns: `with gen.turn() as turn: turn.backward(loss)`. The other replicas are frozen inside, but for those
        whose turn is open too: turns inside each other are simultaneous, and also need that `backward`. A turn in which
        no rank runs backward takes no step. All ranks take the turns of all replicas in the same order.

        Args:
            backwards: how many backward passes there will be; their gradients are summed. None: any number; gradients
                are then exchanged at the end.
            weight: of this rank's gradient in the mean, such as the size of its batch.
            scaler: takes the step, for float16 under autocast. Call its `update` yourself.

        Raises:
            UsageError: this replica's turn is open already, or its modules or optimizer have changed.
            RunError: a rank has failed; names it, its turn and the reason.
        """
        self._check_turn(backwards, weight, scaler)
        is_counted = backwards is not None and len(self.guarded) == 1
        passes = backwards if backwards is not None and is_counted else ANY_NUMBER
        turn = ReplicaTurn(self, weight)
        exchange = self.player_exchange.exchange
        scale = 1.0
        if scaler is not None and self.strategy.wire.lossy:
            scale = scaler.get_scale()  # what the wire loses is kept in units of the gradient
            exchange = DeliverNonFinite(exchange)
        with self.reporting_failures(f"turn {self.turns}"), self._open(turn, backwards, scale):
            check_same_turn = TurnNumbers(self).check
            for flat in self.guarded:
                flat.before_exchange = check_same_turn
                flat.marks_of_turn = marks_of(self)
            if not self.shares_steps:
                check_same_turn()  # messages may leave before there is a gradient
            with self.exchanging(exchange, self.turns, passes):
                yield turn
                check_same_turn()
                for flat in self.guarded:
                    flat.check_untouched()
                self.mark_backward_done()
                summary = TurnSummary(self, weight)
            if summary.any_gradient():
                self._step(turn, summary, scaler, scale)
            else:
                self.abort_exchange()
            summary.set_buffers()
        self.turns += 1

    def _check_turn(self, backwards: int | None, weight: float, scaler: torch.amp.GradScaler | None) -> None:
        """Raise UsageError if a turn cannot begin."""
        if self.is_in_turn:
            raise UsageError(
                f"{self.label}: a turn begins inside another turn of the same replica. Close the first one, or use "
                "turn(backwards=2) for two passes of one step"
            )
        self.check_no_average()
        for other in _replicas:
            if other.is_in_turn and any(used for flat in other.guarded for used in flat.has_gradient):
                raise UsageError(
                    f"{self.label}: a turn begins inside a turn of {other.label} that has had a backward pass. Open "
                    "both before: `with disc.turn() as d, gen.turn() as g:`, or close the first one"
                )
        if backwards is not None and (not isinstance(backwards, int) or backwards < 1):  # pyright: ignore
            raise UsageError(f"backwards={backwards}: must be 1 or more. Use 1, or None if the number varies")
        if not 0 <= weight < math.inf:
            raise UsageError(f"weight={weight:g}: must be 0 or more. Use the number of samples of this rank's batch")
        takes_weights = self.strategy.sync_period == 1 and not self.strategy.requires_sgd
        if weight != 1 and self.world.size > 1 and not (self.shares_steps and takes_weights):
            period = self.strategy.sync_period
            name = self.strategy.name + (f"+sync_period={period}" if period > 1 else "")
            raise UsageError(
                f"weight={weight:g}: exchange={name} does not average the gradient of every turn. Leave weight out"
            )
        if scaler is not None and self.strategy.requires_sgd:
            raise UsageError(f"scaler: exchange={self.strategy.name} takes its own steps. Leave scaler out")
        if not all(flat.holds_network for flat in self.flats):
            raise UsageError(
                f"{self.label}: its parameters were moved after its Replica was made (to(), half(), .data=). Move them "
                "first"
            )
        if self.turns < CHECKED_TURNS or self.turns % CHECKED_TURNS == 0:  # it visits every module
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise UsageError if parameters were added, removed or moved since the replica was made."""
        current = [p for module in self.modules for p in module.parameters()]
        if len(current) != len(self._all_parameters) or any(a is not b for a, b in zip(current, self._all_parameters)):
            raise UsageError(
                f"{self.label}: parameters were added or replaced after its Replica was made, and would not be "
                "exchanged. Build the whole network first"
            )
        for name, p in self._untrained:
            if p.requires_grad:
                raise UsageError(
                    f"{name}: was frozen when its Replica was made, and its gradient would not be exchanged. Make the "
                    "Replica first, and freeze the parameter then"
                )
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._optimizer_size:
            raise UsageError(
                f"{self.label}: parameters were added to its optimizer after its Replica was made, and would not be "
                "exchanged. Build the whole optimizer first"
            )

    @contextlib.contextmanager
    def _open(self, turn: ReplicaTurn, backwards: int | None, scale: float) -> Generator[None]:
        """Let this replica take gradients inside, and freeze those that have no turn."""
        self._open_turn = turn
        try:
            for flat in self.guarded:
                share = self.player_exchange.weight * (turn.weight if self.shares_steps else 1) / scale
                flat.open(ANY_NUMBER if backwards is None else backwards, share)
            _update_frozen()
            yield
        finally:
            for flat in self.guarded:
                flat.close()
            self._open_turn = None
            _update_frozen()

    @torch.no_grad()
    def _step(self, turn: ReplicaTurn, summary: TurnSummary, scaler: torch.amp.GradScaler | None, scale: float) -> None:
        self.finish_exchange()
        for flat in self.flats:
            if summary.mean_factor * scale != 1:
                flat.grads.mul_(summary.mean_factor * scale)
        for p in summary.unused:
            p.grad = None
        if (self.turns + 1) % self.strategy.step_period:
            return
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            turn.grad_norm = nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self._is_stepping = True
        try:
            if scaler is not None:
                scaler.step(self.optimizer)
            else:
                self.optimizer.step()
        finally:
            self._is_stepping = False
        if self.ema is not None:
            self.update_average(self.ema)

    @contextlib.contextmanager
    def using_ema(self) -> Generator[None]:
        """Put the average in place of the parameters inside this context."""
        if self.ema is None:
            raise UsageError(f"{self.label}: has no average. Use Replica(..., ema=0.999)")
        self.check_no_average()
        self.uses_average = True
        try:
            with super().using_ema():
                yield
        finally:
            self.uses_average = False

    def check_no_average(self) -> None:
        """Raise UsageError inside `using_ema`, where a step would be lost, and a save would hold the average."""
        if self.uses_average:
            raise UsageError(f"{self.label}: its modules have the averaged weights now. Close using_ema() before")

    def release(self) -> None:
        """Give the modules and the optimizer back, as they are now: nothing is exchanged any more."""
        _replicas.discard(self)
        _release(self.guarded, self._step_hook)

    def check_step(self) -> None:
        """Raise UsageError if the optimizer steps now, unless the turn has called it."""
        if not self._is_stepping:
            raise UsageError(
                f"{self.label}: its optimizer is stepped by hand, and the turn takes the step. Leave step() out, or "
                "give the GradScaler that calls it to the turn"
            )

    @property
    def is_in_turn(self) -> bool:
        """Return whether a turn of this replica is open."""
        return self._open_turn is not None

    def freeze(self) -> None:
        """Let the parameters require no gradients until `unfreeze`."""
        if not self._frozen:
            self._frozen = [p for p in self.trained if p.requires_grad]
            for p in self._frozen:
                p.requires_grad_(False)

    def unfreeze(self) -> None:
        """Undo `freeze`."""
        for p in self._frozen:
            p.requires_grad_(True)
        self._frozen = []

    @property
    def trained(self) -> list[Tensor]:
        """Return the parameters that the optimizer moves."""
        return [p for flat in self.flats for p in flat.parameters]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of all modules, each once."""
        visited: set[Tensor] = set()
        for label, module in self._named_modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor not in visited:
                    visited.add(tensor)
                    yield f"{label} {name}", tensor

    def shared_buffers(self) -> list[Tensor]:
        """Return the buffers that are the same on all ranks after a turn."""
        if self.buffers == "own" or not self.shares_steps:
            return []
        buffers = dict.fromkeys(b for layer in self._layers_with_buffers for b in layer.buffers(recurse=False))
        summed = self.summed_buffers()
        return [b for b in buffers if self.buffers == "first" or b.is_floating_point() or b in summed]

    def summed_buffers(self) -> set[Tensor]:
        """Return the buffers that modules declare as `synchronised` (game/synchronised_buffers.py)."""
        names = ((layer, name) for layer in self._layers_with_buffers for name in getattr(layer, "synchronised", ()))
        return {layer.get_buffer(name) for layer, name in names}

    @property
    def may_differ(self) -> bool:
        """Return whether ranks may hold different weights."""
        return self.world.size > 1 and not self.shares_steps

    @property
    def has_equal_buffers(self) -> bool:
        """Return whether buffers are the same on all ranks after a turn."""
        return self.buffers != "own"

    @property
    def shares_steps(self) -> bool:
        """Return whether several ranks take every step together, so that they stay equal."""
        return self.player_exchange.team.size > 1

    @contextlib.contextmanager
    def reporting_lost_ranks(self, where: str) -> Generator[None]:
        """As `reporting_failures`, where what else goes wrong does so on all ranks, or is reported as it ends them."""
        try:
            yield
        except CommunicationError:
            with self.reporting_failures(where):
                raise

    @contextlib.contextmanager
    def reporting_failures(self, where: str) -> Generator[None]:
        """Tell the other ranks of a failure inside. The error of another rank becomes a RunError with its reason."""
        try:
            yield
        except BaseException as error:
            if self.world.size == 1:
                raise
            is_lost = isinstance(error, CommunicationError)
            reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            kind = CommunicationError if is_lost else RunError
            message = self.world.report_failure(kind(f"{where} of {self.label}: {reason}"))
            leave_after_failure(self.world)
            if is_lost:
                raise RunError(message) from error
            raise


class ReplicaTurn:
    """A turn that is open.

    grad_norm : [] the norm of the averaged gradient before it was clipped, after the turn; None: it is not clipped
    """

    def __init__(self, replica: Replica, weight: float):
        self._replica = replica
        self.weight = weight
        self.grad_norm: Tensor | None = None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward to the parameters of this turn's replica only: for turns that are open at once."""
        inputs = [p for p in self._replica.trained if p.requires_grad]
        loss.backward(inputs=inputs, **options)  # pyright: ignore[reportUnknownMemberType]


def _make_step_check(replica: Replica) -> Callable[..., None]:
    """Return a hook of the optimizer, which does not keep the replica in memory."""
    reference = weakref.ref(replica)

    def check_step(*_: object) -> None:
        current = reference()
        if current:
            current.check_step()

    return check_step


def _release(flats: Sequence[GuardedParams], step_hook: RemovableHandle) -> None:
    step_hook.remove()
    for flat in flats:
        flat.release()


def _update_frozen() -> None:
    """Freeze the replicas that have no turn, as long as another one has one."""
    num_turns = sum(replica.is_in_turn for replica in _replicas)
    for replica in _replicas:
        for flat in replica.guarded:
            flat.has_simultaneous = num_turns > 1
        if num_turns and not replica.is_in_turn:
            replica.freeze()
        else:
            replica.unfreeze()
