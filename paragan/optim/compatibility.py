"""Whether an optimizer can train a game here: it is tried on a few parameters when its record is built."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.optim import state_io

SHAPES = ((48, 4), (4,), (3, 2, 3, 3), ())  # of the parameters
WEIGHT_SHIFT, DIVERGED_ABOVE = 0.5, 1e4
ALTERNATIVES = "adabelief, radam, lion and lamb can"


@cache
def check_optimizer(optimizer: Any) -> None:
    """Unusable where an optimizer (a frozen record) cannot step on gradients alone, not go on exactly from what a
    checkpoint has of it, or not go on from where others have moved its weights."""
    if not hasattr(optimizer, "lr"):
        raise UsageError("it has no learning rate that could be set")
    if optimizer.name == "scionlight":
        raise UsageError("it keeps its momentum in the gradients, which are zeroed before every step; use scion")
    try:
        ToyProblem(optimizer)
    except ValueError as error:  # its constructor says what is wrong with an argument
        raise UsageError(str(error)) from error
    except Exception as error:
        raise UsageError(f"it cannot be built ({type(error).__name__}: {error}); {ALTERNATIVES}") from error
    try:
        with torch.random.fork_rng(devices=()):
            ToyProblem(optimizer).run_steps(1)  # imports what it needs, with whatever warnings they have
            with warnings.catch_warnings():
                warnings.filterwarnings("error", module="pytorch_optimizer")  # many say in a warning what they lack
                reason = incompatibility(optimizer)
    except state_io.UnsupportedStateError as error:
        raise UsageError(f"what it keeps cannot be in a checkpoint ({error})") from error
    except Exception as error:
        raise UsageError(f"it cannot train a game ({type(error).__name__}: {error}); {ALTERNATIVES}") from error
    if reason:
        raise UsageError(reason)


def incompatibility(optimizer: Any) -> str:
    """Why not, or nothing."""
    whole, before, after = (ToyProblem(optimizer) for _ in range(3))
    torch.manual_seed(0)
    whole.run_steps(11, reuse_grad_buffer=True)  # as a network's flat vector is: zeroed, then filled
    before.run_steps(7)
    torch.manual_seed(1)
    after.resume_from(before)
    after.run_steps(4)
    if not all((p.abs() < DIVERGED_ABOVE).all() for p in whole.parameters):
        return "with these fields weights run away in a few steps; try a smaller lr"
    kept = state_io.to_tensors(after.optimizer).values()
    if hasattr(whole.optimizer, "train") and hasattr(whole.optimizer, "eval"):
        return "it keeps the weights to use apart from those it steps, and G's average follows the latter"
    if not all(torch.equal(p, q) for p, q in zip(whole.parameters, after.parameters)):
        return "it does not go on exactly from what a checkpoint has of it"
    if any(tensor.dtype in (torch.int8, torch.uint8) for tensor in kept):
        return "it keeps numbers in 8 bits, of which no mean over ranks can be taken"
    left, moved = ToyProblem(optimizer), ToyProblem(optimizer)
    for trial, shift in ((left, 0.0), (moved, WEIGHT_SHIFT)):
        trial.run_steps(3, constant_gradients=True)
        trial.shift_weights(shift)
        trial.run_steps(1, constant_gradients=True)
    if any((q - p - WEIGHT_SHIFT).abs().median() > WEIGHT_SHIFT / 2 for p, q in zip(left.parameters, moved.parameters)):
        return "it finds weights from what it has summed up, not from where they are: others may not move them"
    return ""


class ToyProblem:
    """A few parameters, an optimizer of them, and gradients that follow from where they are, or from the step alone."""

    def __init__(self, optimizer: Any):
        draw, layouts = torch.Generator().manual_seed(0), {4: torch.channels_last}
        values = [torch.randn(shape, generator=draw) for shape in SHAPES]
        layout = [layouts.get(v.dim(), torch.contiguous_format) for v in values]
        self.parameters = [nn.Parameter(v.contiguous(memory_format=form)) for v, form in zip(values, layout)]
        self.optimizer: torch.optim.Optimizer = optimizer.build(self.parameters)
        self.steps = 0

    def run_steps(self, steps: int, reuse_grad_buffer: bool = False, constant_gradients: bool = False) -> None:
        for _ in range(steps):
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 1.0  # as `Player.prepare` does
            for p in self.parameters:
                gradient = self._gradient(p, constant_gradients)
                p.grad = p.grad.zero_().add_(gradient) if reuse_grad_buffer and p.grad is not None else gradient
            self.optimizer.step()

    def _gradient(self, p: Tensor, constant_gradients: bool) -> Tensor:
        at = torch.arange(p.numel()).view(p.shape) if constant_gradients else p.detach()
        return torch.sin(3.0 * at + self.steps)

    def shift_weights(self, shift: float) -> None:
        with torch.no_grad():
            for p in self.parameters:
                p += shift

    def resume_from(self, other: ToyProblem) -> None:
        with torch.no_grad():
            for p, q in zip(self.parameters, other.parameters):
                p.copy_(q)
        self.steps = other.steps
        kept = {name: tensor.clone() for name, tensor in state_io.to_tensors(other.optimizer).items()}
        state_io.from_tensors(self.optimizer, kept)
