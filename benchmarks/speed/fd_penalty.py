"""R1 and R2 by finite differences beside the exact ones: `python -m benchmarks.speed.fd_penalty [--json F]`.

Speed: a turn of D with R1 and R2, relativistic loss, of DCGAN at 64 px, R3GAN at 32 px and BigGAN at 32 px (narrow,
small batches of random images), without a penalty, with the exact ones and with finite differences, in turns; float32,
one process. `--precision bf16` times bf16.

Agreement: on a D that was trained for some rounds, estimates of E |grad D|^2 on a batch of reals: the mean and
deviation of their ratio to the exact value, over draws of the noise, and the cosine of the penalties' gradients with
respect to D's weights, of one draw and of the mean; by sigma, in float32 and in bf16.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import cached

from benchmarks.lib.session_fixture import make_endless_run, make_session, random_dataset
from benchmarks.lib.timing import (
    StepsFn,
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.core.types import Batch, run_discriminator
from paragan.data.dataset import Dataset
from paragan.game.turn import play_turns, start_exchanges
from paragan.losses.penalties import finite_difference_penalty, grad_norm_squared
from paragan.train.loop import play_round
from paragan.train.session import Session

# name: (recipe, resolution, settings)
NETWORKS = {
    "DCGAN, 64 px": ("folder", 64, ("nets=dcgan", "nets.width=32", "batch=16")),
    "R3GAN, 32 px": ("r3gan-cifar10", 32, ("nets.width=32", "batch=8")),
    "BigGAN, 32 px": ("biggan-cifar10", 32, ("nets.width=16", "batch=16")),
}
COMMON = ("lanes=2", "objective.loss=relativistic", "d_steps=1", "g_batch=0")
FORMS = {
    "none": ("objective.r1=0", "objective.r2=0"),
    "exact": ("objective.r1=0.1", "objective.r2=0.1"),
    "finite differences": ("objective.r1=0.1", "objective.r2=0.1", "objective.r1_r2_method=finite_difference"),
}
SIGMAS = (0.01, 0.03, 0.1)
BLOCK_S = 1.0


def make_d_turn_fn(session: Session) -> StepsFn:
    """Return a function that plays turns of D on one batch."""
    turns = session.role.round[0]
    session.lanes.next_micro_batches()

    def play() -> None:
        start_exchanges((turns,), 0)
        play_turns(turns, session.lanes.micro_batches, 0, session.run.batch, session.run.batch)

    return repeat_fn(play)


def time_turns(recipe: str, images: Dataset, settings: tuple[str, ...], precision: str, rounds: int) -> Times:
    """Time D's turn with every form of the penalties."""
    device = (f"device.precision={precision}",)
    turns = {
        name: make_d_turn_fn(make_session(make_endless_run(recipe, images, *settings, *form, *device), images))
        for name, form in FORMS.items()
    }
    return interleave(turns, rounds=rounds, steps=count_steps(BLOCK_S, turns["exact"]))


def penalty_and_gradient(session: Session, batch: Batch, sigma: float | None) -> tuple[float, Tensor]:
    """Return E |grad D|^2 (sigma None: exact, else an estimate), and its gradient with respect to D's weights."""
    d = session.game.d.net
    parameters = [p for p in d.parameters() if p.requires_grad]
    x = batch.images.detach().clone().requires_grad_(sigma is None)
    with cached():
        logits = run_discriminator(d, x, batch.labels).logits
        if sigma is None:
            value = grad_norm_squared(logits, x)
        else:
            value = finite_difference_penalty(d, batch, logits, sigma, "finite difference/real")
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    flat = [p.new_zeros(p.numel()) if g is None else g.flatten() for p, g in zip(parameters, gradients)]
    return float(value.detach()), torch.cat(flat)


def compare(session: Session, draws: int, sigma: float, bf16: bool) -> dict[str, float]:
    """Compare the exact penalty, in float32, with its estimate."""
    (batch,) = session.lanes.next_micro_batches()
    session.game.d.net.requires_grad_(True)
    exact, exact_gradient = penalty_and_gradient(session, batch, None)
    values: list[float] = []
    gradients: list[Tensor] = []
    for draw in range(draws):
        rng = replace(batch.rng, position=batch.rng.position + draw)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value, gradient = penalty_and_gradient(session, replace(batch, rng=rng), sigma)
        values.append(value)
        gradients.append(gradient)
    session.game.d.net.requires_grad_(False)
    mean = torch.stack(gradients).mean(0)
    ratios = torch.tensor(values) / exact
    return {
        "ratio": float(ratios.mean()),
        "deviation of a draw": float(ratios.std()),
        "cosine of a draw": float(torch.stack([cosine(g, exact_gradient) for g in gradients]).mean()),
        "cosine": float(cosine(mean, exact_gradient)),
    }


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.double(), b.double(), dim=0)


def agreement(recipe: str, images: Dataset, settings: tuple[str, ...], rounds: int, draws: int) -> dict[str, Any]:
    """Return what `compare` says of a D that was trained for some rounds, by precision and sigma."""
    run = make_endless_run(recipe, images, *settings, *FORMS["exact"], "device.precision=float32")
    session = make_session(run, images)
    for _ in range(rounds):
        play_round(session)
    return {
        precision: {str(sigma): compare(session, draws, sigma, precision == "bf16") for sigma in SIGMAS}
        for precision in ("float32", "bf16")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="that are timed of every form (15)")
    parser.add_argument("--train-rounds", type=int, default=50, help="of the D whose penalties are compared (50)")
    parser.add_argument("--draws", type=int, default=64, help="of the noise, for the mean (64)")
    parser.add_argument("--precision", default="float32", help="of the turns that are timed (float32)")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    where = describe_machine() | {"threads": torch.get_num_threads()}
    print(format_machine(where))
    result: dict[str, Any] = {"machine": where, "precision": options.precision, "speed": {}, "agreement": {}}
    for name, (recipe, resolution, own) in NETWORKS.items():
        images = random_dataset(resolution, 3, 256)
        settings = (*COMMON, f"data.resolution={resolution}", *own)
        times = time_turns(recipe, images, settings, options.precision, options.rounds)
        result["speed"][name] = times.to_json("exact")
        rows = [[form, str(times.spread(form)), str(times.ratio(form, "exact"))] for form in FORMS]
        print(f"\n{name}\n{format_table(['a turn of D', 'ms', 'to exact'], rows)}")
        values = agreement(recipe, images, settings, options.train_rounds, options.draws)
        result["agreement"][name] = values
        head = ["sigma", *next(iter(values["float32"].values()))]
        for precision, by_sigma in values.items():
            rows = [[sigma, *(f"{x:.3f}" for x in figures.values())] for sigma, figures in by_sigma.items()]
            print(f"{precision}\n{format_table(head, rows)}")
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
