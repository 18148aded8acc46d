"""Named policies: different learning rates and steps for G and D, each from the paper that it is named after.

A policy replaces `g`, `d` and `d_steps` of a recipe; the user's own settings come after it. Some policies also set the
objective and fields of the networks, where their paper needs them. run.yaml holds the resulting values, not the name
of the policy, so resuming a run decides nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict
from paragan.optim.optimizers import DiscriminatorOptim, PlayerOptim, as_discriminator_optim, scale_lr, with_lr

MAX_LR_FACTOR = 4.0  # on a published learning rate: larger factors would be guesses


@dataclass(frozen=True)
class PaperSettings:
    """Settings of a paper.

    batch    : images per turn that the learning rates are for
    g        : fields of G's optimizer
    d        : fields of D's optimizer
    sources  : where each value is from, a line each
    d_steps  : steps of D for one of G
    common   : fields of `PlayerOptim` for both players
    settings : other settings, dotted fields of a run
    origin   : of the learning rates
    """

    batch: int
    g: Mapping[str, Any]
    d: Mapping[str, Any]
    sources: tuple[str, ...]
    d_steps: int = 1
    common: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: str = "as published"


@dataclass(frozen=True)
class Policy:
    """Values of a policy for one batch size.

    settings : other settings than `g`, `d` and `d_steps`, dotted fields of a run
    reasons  : where the values are from, a line each
    """

    g: PlayerOptim
    d: DiscriminatorOptim
    d_steps: int
    settings: Mapping[str, Any]
    reasons: tuple[str, ...]


def ttur(nets: str) -> PaperSettings:
    """Two time scales: D's learning rate is four times G's."""
    adam = {"name": "adam", "betas": (0.0, 0.9)}
    return PaperSettings(
        batch=256,
        g=adam | {"lr": 1e-4},
        d=adam | {"lr": 4e-4},
        sources=(
            "a rate of its own for each player: Heusel et al. 2017 (TTUR), section 2",
            "1e-4, 4e-4, betas (0, 0.9), one D step: Zhang et al. 2019 (SAGAN), sections 4.2 and 5; batch 256",
        ),
    )


def biggan(nets: str) -> PaperSettings:
    """Very large batches, low learning rates, two steps of D for one of G."""
    adam = {"name": "adam", "betas": (0.0, 0.999), "eps": 1e-6}
    return PaperSettings(
        batch=2048,
        g=adam | {"lr": 5e-5},
        d=adam | {"lr": 2e-4},
        d_steps=2,
        sources=(
            "5e-5, 2e-4, betas (0, 0.999), two D steps, batch 2048: Brock et al. 2019 (BigGAN), appendix C",
            "eps 1e-6: Brock's BigGAN-PyTorch, which with one D step has 1e-4 and 4e-4, at batch 64 as at 2048",
        ),
    )


def sngan(nets: str) -> PaperSettings:
    """Five steps of D for one of G, and learning rates that decay to 0."""
    adam = {"name": "adam", "lr": 2e-4, "betas": (0.0, 0.9)}
    return PaperSettings(
        batch=64,
        g=adam,
        d=adam,
        d_steps=5,
        common={"schedule": "linear"},
        sources=(
            "2e-4, betas (0, 0.9), five D steps, batch 64: Miyato et al. 2018 (SN-GAN), appendix B, residual nets",
            "linear decay from the first step on: their sngan_projection, configs/sn_cifar10_unconditional.yml",
        ),
    )


def paragan(nets: str) -> PaperSettings:
    """AdaBelief for G, Adam for D."""
    if nets in ("sngan", "sagan", "biggan", "biggan-deep", "contragan"):
        options = {"eps": 1e-16, "rectify": True}
        eps_reason = "1e-16 with rectification for SN-GAN and similar networks"
    else:
        options = {"eps": 1e-12}
        eps_reason = "1e-12 for a small GAN"
    return PaperSettings(
        batch=64,
        g={"name": "adabelief", "lr": 2e-4, "betas": (0.5, 0.999), **options},
        d={"name": "adam", "lr": 2e-4, "betas": (0.5, 0.999)},
        sources=(
            "AdaBelief for G with Adam for D: the best pair of Shi et al. 2024 (ParaGAN), as others report it",
            f"2e-4, betas (0.5, 0.999), eps {eps_reason}: AdaBelief's own repository (Zhuang et al. 2020), its table",
        ),
    )


def optimistic(nets: str) -> PaperSettings:
    """Optimistic Adam for both players, one step each."""
    adam = {"name": "adam", "lr": 1e-4, "betas": (0.5, 0.9)}
    return PaperSettings(
        batch=64,
        g=adam,
        d=adam,
        common={"optimizer_wrapper": "optimistic", "extrapolation": 1.0},
        sources=(
            "optimistic Adam: Daskalakis et al. 2018, section 6, where one D step is compared with five",
            "1e-4, betas (0.5, 0.9), batch 64: their optimistic_GAN_training, script/cifar10.py",
        ),
    )


def wcgan(nets: str) -> PaperSettings:
    """A Wasserstein critic with clipped weights, five steps of D for one of G."""
    adam = {"name": "adam", "lr": 1e-4, "betas": (0.5, 0.999)}
    return PaperSettings(
        batch=100,
        g=adam,
        d=adam,
        d_steps=5,
        settings=_objective_settings("wasserstein", clip=0.01) | {"nets.spectral": False},
        sources=(
            "five D steps, weights clipped to 0.01: Arjovsky et al. 2017 (WGAN), algorithm 1, there with RMSprop 5e-5",
            "1e-4, betas (0.5, 0.999), clip 0.01, batch 100: the code of Lupo Pasini and Yin 2022 (parallel W-CGAN)",
        ),
    )


def wcgan_gp(nets: str) -> PaperSettings:
    """A Wasserstein critic with a gradient penalty, five steps of D for one of G."""
    adam = {"name": "adam", "lr": 1e-4, "betas": (0.0, 0.9)}
    return PaperSettings(
        batch=64,
        g=adam,
        d=adam,
        d_steps=5,
        settings=_objective_settings("wasserstein", gp=10) | {"nets.spectral": False},
        sources=(
            "lambda 10, five D steps, 1e-4, betas (0, 0.9), batch 64: Gulrajani et al. 2017 (WGAN-GP), algorithm 1",
        ),
    )


def dcgan(nets: str) -> PaperSettings:
    """DCGAN as it was published: batch norm in D, and no spectral norm."""
    adam = {"name": "adam", "lr": 2e-4, "betas": (0.5, 0.999)}
    family = {} if nets == "dcgan" else {"nets": "dcgan"}
    norms = {"nets.spectral": False, "nets.batch_norm": True}
    return PaperSettings(
        batch=128,
        g=adam,
        d=adam,
        settings=_objective_settings("nonsaturating") | family | norms,
        sources=("2e-4, betas (0.5, 0.999), batch 128, batch norm: Radford et al. 2016 (DCGAN), sections 3 and 4",),
    )


def dposg(nets: str) -> PaperSettings:
    """Plain gradient steps on WGAN-GP, for DPOSG's own update (`--strategy DPOSG`)."""
    return _gradient_descent("--strategy DPOSG", "Liu et al. 2020, whose rates are not known to us")


def dqgan(nets: str) -> PaperSettings:
    """Plain gradient steps on WGAN-GP, for DQGAN's own update (`--strategy DQGAN`)."""
    return _gradient_descent("--strategy DQGAN", "Chen et al. 2020, whose rates are not known to us")


def _gradient_descent(option: str, source: str) -> PaperSettings:
    return PaperSettings(
        batch=64,
        g={"name": "sgd", "lr": 0.1},
        d={"name": "sgd", "lr": 0.01},
        settings=_objective_settings("wasserstein", gp=1) | {"nets.spectral": False},
        sources=(
            f"for the optimistic gradient steps of {option}, on a Wasserstein game with a gradient penalty: {source}",
            "0.1 for G, 0.01 for D, penalty 1: found by a random search on the digits (docs/measurements/policies.md)",
        ),
        origin="as found",
    )


def _objective_settings(loss: str, **weights: float) -> dict[str, Any]:
    """Return settings of the objective: the loss and these weights; other penalties are 0."""
    defaults = dict.fromkeys(("r1", "r2", "gp", "clip", "lecam"), 0)
    return {f"objective.{name}": value for name, value in ({"loss": loss} | defaults | weights).items()}


POLICIES: dict[str, Callable[[str], PaperSettings]] = {
    p.__name__.replace("_", "-"): p
    for p in (ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan_gp, dcgan, dposg, dqgan)
}


def get_policy(name: str, batch: int, g_batch: int = 0, nets: str = "") -> Policy:
    """Return a policy with its learning rates scaled to a batch size.

    Args:
        name: A key of `POLICIES`.
        batch: Images per turn of D.
        g_batch: Images per turn of G; 0: `batch`.
        nets: Name of the family of networks.

    Raises:
        UsageError: There is no such policy.
    """
    if name not in POLICIES:
        raise UsageError(f"--policy={name}: there is no policy {name}. Use {', '.join(POLICIES)}")
    paper = POLICIES[name](nets)
    g, g_reason = _player_optim(paper, paper.g, g_batch or batch)
    d, d_reason = _player_optim(paper, paper.d, batch)
    reasons = (d_reason,) if d_reason == g_reason else (f"G: {g_reason}", f"D: {d_reason}")
    return Policy(g, as_discriminator_optim(d), paper.d_steps, paper.settings, (*paper.sources, *reasons))


def to_cli_args(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of a policy as (field, value) of the command line."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()]


def to_cli_line(settings: Mapping[str, Any]) -> str:
    """Format the settings of a policy in one line."""
    return ", ".join(f"{name}={value}" for name, value in to_cli_args(settings))


def lr_factor(batch: int, base_batch: int) -> float:
    """Return the factor on a learning rate that was published for `base_batch` images.

    It is the square root of the ratio of batch sizes, as usual with Adam, at most `MAX_LR_FACTOR`. It is 1 for smaller
    batches, because papers do not lower their learning rates for them.
    """
    return min(MAX_LR_FACTOR, max(1.0, scale_lr(1.0, "sqrt", batch, base_batch)))


def _player_optim(paper: PaperSettings, optimizer: Mapping[str, Any], batch: int) -> tuple[PlayerOptim, str]:
    """Return the settings of a player for a batch size, and the reason for the learning rate."""
    optim = from_dict(PlayerOptim, {"optimizer": optimizer, **paper.common})
    factor = lr_factor(batch, paper.batch)
    if factor > 1:
        limit = ", the maximum" if factor == MAX_LR_FACTOR else ""
        reason = f"learning rates x {factor:g}{limit}: square root of {batch} images over {paper.batch}, {paper.origin}"
        return replace(optim, optimizer=with_lr(optim.optimizer, optim.optimizer.lr * factor)), reason
    if batch == paper.batch:
        return optim, f"learning rates {paper.origin}"
    return optim, f"learning rates {paper.origin} for {paper.batch} images: not lowered for smaller batches"


def describe_optim(optim: PlayerOptim) -> str:
    """Describe a player's optimizer in a line: adam lr 0.0001, betas (0.0, 0.9), eps 1e-08."""
    optimizer = optim.optimizer
    parts = [f"{optimizer.name} lr {optimizer.lr:g}"]
    parts += [f"{field} {getattr(optimizer, field)}" for field in ("betas", "eps") if hasattr(optimizer, field)]
    if getattr(optimizer, "rectify", False):
        parts.append("rectified")
    if optim.optimizer_wrapper != "auto":
        parts.append(optim.optimizer_wrapper)
    if optim.extrapolation is not None:
        parts.append(f"extrapolation {optim.extrapolation:g}")
    if optim.schedule != "constant":
        parts.append(f"{optim.schedule} schedule")
    return ", ".join(parts)
