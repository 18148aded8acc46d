"""Check that an optimizer can train a game: it runs on a toy problem when its config is built.

An optimizer must step on gradients alone, continue exactly from a checkpoint of its tensors and numbers, and continue
from weights that an exchange has moved.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.optim import state_io

SHAPES = ((48, 4), (4,), (3, 2, 3, 3), ())  # of the toy problem's parameters
WEIGHT_SHIFT = 0.5
DIVERGED_ABOVE = 1e4
ALTERNATIVES = "Use adabelief, radam, lion or lamb"


@cache
def check_optimizer(optimizer: Any) -> None:
    """Raise `UsageError` if an optimizer config cannot train a game; the message gives the reason."""
    if not hasattr(optimizer, "lr"):
        raise UsageError(f"lr: this optimizer has no learning rate. {ALTERNATIVES}")
    if optimizer.name == "scionlight":
        raise UsageError(
            "state: it stores its momentum in the gradients, which are zeroed before every step. Use scion"
        )
    try:
        ToyProblem(optimizer)
    except ValueError as error:  # the message names the invalid argument
        raise UsageError(str(error)) from error
    except Exception as error:
        raise UsageError(f"it cannot be built ({type(error).__name__}: {error}). {ALTERNATIVES}") from error
    try:
        with torch.random.fork_rng(devices=()):
            ToyProblem(optimizer).run_steps(1)  # first imports may warn; those warnings do not count
            with warnings.catch_warnings():
                warnings.filterwarnings("error", module="pytorch_optimizer")  # many warn about what they need
                reason = incompatibility(optimizer)
    except state_io.UnsupportedStateError as error:
        raise UsageError(f"state: a checkpoint cannot hold it ({error}). {ALTERNATIVES}") from error
    except Exception as error:
        raise UsageError(f"it cannot train a game ({type(error).__name__}: {error}). {ALTERNATIVES}") from error
    if reason:
        raise UsageError(reason)


@cache
def check_groups(section: str, optimizer: Any) -> None:
    """Raise `UsageError` if an optimizer config cannot train parameters in groups with learning rates of their own.

    Args:
        section: Of the run that has the optimizer.
        optimizer: Its config.
    """
    try:
        with torch.random.fork_rng(devices=()):
            problem = ToyProblem(optimizer, lr_factors=(1.0, 0.5))
            problem.run_steps(3)
            rates = [group["lr"] for group in problem.optimizer.param_groups]
            reason = "" if rates == [optimizer.lr, 0.5 * optimizer.lr] else "changes their learning rates"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise UsageError(
            f"{section}.optimizer={optimizer.name}: cannot train groups of parameters ({reason}). {ALTERNATIVES}"
        )


def incompatibility(optimizer: Any) -> str:
    """Return why an optimizer cannot train a game, or ""."""
    uninterrupted, before, after = (ToyProblem(optimizer) for _ in range(3))
    torch.manual_seed(0)
    uninterrupted.run_steps(11, reuse_grad_buffer=True)  # as a network's flat gradient: zeroed, then filled
    before.run_steps(7)
    torch.manual_seed(1)
    after.resume_from(before)
    after.run_steps(4)
    if not all((p.abs() < DIVERGED_ABOVE).all() for p in uninterrupted.parameters):
        return "with these fields weights diverge in a few steps. Use a smaller lr"
    if hasattr(uninterrupted.optimizer, "train") and hasattr(uninterrupted.optimizer, "eval"):
        return "it stores the weights to use apart from those that it steps, and G's EMA follows the latter"
    if not all(torch.equal(p, q) for p, q in zip(uninterrupted.parameters, after.parameters)):
        return "it does not continue exactly from a checkpoint"
    if any(tensor.dtype in (torch.int8, torch.uint8) for tensor in state_io.to_tensors(after.optimizer).values()):
        return "it stores its state in 8 bits, which cannot be averaged over ranks"
    in_place, shifted = (ToyProblem(optimizer) for _ in range(2))
    for problem, shift in ((in_place, 0.0), (shifted, WEIGHT_SHIFT)):
        problem.run_steps(3, constant_gradients=True)
        problem.shift_weights(shift)
        problem.run_steps(1, constant_gradients=True)
    for p, q in zip(in_place.parameters, shifted.parameters):
        if (q - p - WEIGHT_SHIFT).abs().median() > WEIGHT_SHIFT / 2:
            return "it computes weights from its own sums and ignores changes made by exchanges"
    return ""


class ToyProblem:
    """A few parameters with an optimizer, and gradients that depend on the weights and the step or on the step only.

    Args:
        optimizer: Config of the optimizer.
        lr_factors: Of groups that divide the parameters; empty: there are no groups.
    """

    def __init__(self, optimizer: Any, lr_factors: tuple[float, ...] = ()):
        generator = torch.Generator().manual_seed(0)
        self.parameters: list[nn.Parameter] = []
        for shape in SHAPES:
            memory_format = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            value = torch.randn(shape, generator=generator)
            self.parameters.append(nn.Parameter(value.contiguous(memory_format=memory_format)))
        groups = [
            {"params": self.parameters[i :: len(lr_factors)], "lr": factor * optimizer.lr}
            for i, factor in enumerate(lr_factors)
        ]
        self.optimizer: torch.optim.Optimizer = optimizer.build(groups or self.parameters)
        self.steps = 0

    def run_steps(self, steps: int, reuse_grad_buffer: bool = False, constant_gradients: bool = False) -> None:
        """Run optimizer steps.

        Args:
            steps: Number of steps.
            reuse_grad_buffer: Write gradients into the same tensors in every step.
            constant_gradients: Let gradients depend on the step only, not on the weights.
        """
        for _ in range(steps):
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 1.0  # as `Player.prepare` does
            for p in self.parameters:
                gradient = self._gradient(p, constant_gradients)
                p.grad = p.grad.zero_().add_(gradient) if reuse_grad_buffer and p.grad is not None else gradient
            self.optimizer.step()

    def _gradient(self, p: Tensor, constant_gradients: bool) -> Tensor:
        x = torch.arange(p.numel()).view(p.shape) if constant_gradients else p.detach()
        return torch.sin(3.0 * x + self.steps)

    def shift_weights(self, shift: float) -> None:
        """Add a number to all weights, as an exchange might."""
        with torch.no_grad():
            for p in self.parameters:
                p += shift

    def resume_from(self, other: ToyProblem) -> None:
        """Take over weights, step and optimizer state, as from a checkpoint."""
        with torch.no_grad():
            for p, q in zip(self.parameters, other.parameters):
                p.copy_(q)
        self.steps = other.steps
        saved = {name: tensor.clone() for name, tensor in state_io.to_tensors(other.optimizer).items()}
        state_io.from_tensors(self.optimizer, saved)
