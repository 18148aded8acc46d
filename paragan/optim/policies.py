"""Named policies: how G and D learn differently, each from the paper it is named after.

A policy takes the place of `g`, `d` and `d_steps` of a recipe, before the user's own settings; one that is about a
critic of another kind sets its objective too, and what its networks go without. What it gave are plain values in
run.yaml, so nothing is decided again when a run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict
from paragan.optim.optimizers import PlayerOptim, scale_lr, with_lr

MAX_LR_FACTOR = 4.0  # times the published rate: further off it is a guess


@dataclass(frozen=True)
class PaperSettings:
    """What a paper says. g, d: fields of the players' optimizers, right for `batch` images a turn; both: fields of both
    sides; settings: what else it sets, dotted fields of a run; sources: where each is from, a line each."""

    batch: int
    g: Mapping[str, Any]
    d: Mapping[str, Any]
    sources: tuple[str, ...]
    d_steps: int = 1
    common: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Policy:
    """What a policy gives, and why, a line each. settings: dotted fields of a run, beside those three."""

    g: PlayerOptim
    d: PlayerOptim
    d_steps: int
    settings: Mapping[str, Any]
    reasons: tuple[str, ...]


def ttur(nets: str) -> PaperSettings:
    """Two time scales: D learns four times as fast as G."""
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
    """Very large batches, slow rates, two steps of D."""
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
    """Five steps of D for one of G, and a rate that falls to 0."""
    adam = {"name": "adam", "lr": 2e-4, "betas": (0.0, 0.9)}
    return PaperSettings(
        batch=64,
        g=adam,
        d=adam,
        d_steps=5,
        common={"schedule": "linear"},
        sources=(
            "2e-4, betas (0, 0.9), five D steps, batch 64: Miyato et al. 2018 (SN-GAN), appendix B, residual nets",
            "falls in a line from the first step on: their sngan_projection, configs/sn_cifar10_unconditional.yml",
        ),
    )


def paragan(nets: str) -> PaperSettings:
    """AdaBelief for G, Adam for D."""
    spectral = nets in ("sngan", "sagan", "biggan", "biggan-deep", "contragan")
    form = {"eps": 1e-16, "rectify": True} if spectral else {"eps": 1e-12}
    why = "1e-16 with rectification for SN-GAN, and nets like its" if spectral else "1e-12 for a small GAN"
    return PaperSettings(
        batch=64,
        g={"name": "adabelief", "lr": 2e-4, "betas": (0.5, 0.999), **form},
        d={"name": "adam", "lr": 2e-4, "betas": (0.5, 0.999)},
        sources=(
            "AdaBelief for G with Adam for D: the best pair of Shi et al. 2024 (ParaGAN), as others report it",
            f"2e-4, betas (0.5, 0.999), eps {why}: AdaBelief's own repository (Zhuang et al. 2020), its table",
        ),
    )


def optimistic(nets: str) -> PaperSettings:
    """Optimistic Adam for both, one step each."""
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
    """A Wasserstein critic whose weights are clipped, five steps of it for one of G."""
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
    """A Wasserstein critic whose slopes are penalised, five steps of it for one of G."""
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
    own = {"nets.spectral": False, "nets.batch_norm": True}
    return PaperSettings(
        batch=128,
        g=adam,
        d=adam,
        settings=_objective_settings("nonsaturating") | ({} if nets == "dcgan" else {"nets": "dcgan"}) | own,
        sources=("2e-4, betas (0.5, 0.999), batch 128, batch norm: Radford et al. 2016 (DCGAN), sections 3 and 4",),
    )


def _objective_settings(loss: str, **weights: float) -> dict[str, Any]:
    """A whole objective: what bounds or follows D otherwise is none."""
    none = dict.fromkeys(("r1", "r2", "gp", "clip", "lecam"), 0)
    return {f"objective.{name}": value for name, value in ({"loss": loss} | none | weights).items()}


POLICIES: dict[str, Callable[[str], PaperSettings]] = {
    p.__name__.replace("_", "-"): p for p in (ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan_gp, dcgan)
}


def get_policy(name: str, batch: int, g_batch: int = 0, nets: str = "") -> Policy:
    """A policy for a batch (G's own: g_batch) and for the networks of that name. Unusable names those there are."""
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name}; there are: {', '.join(POLICIES)}, none")
    published = POLICIES[name](nets)
    g, why_g = _player_optim(published, published.g, g_batch or batch)
    d, why_d = _player_optim(published, published.d, batch)
    why = (why_d,) if why_d == why_g else (f"G: {why_g}", f"D: {why_d}")
    return Policy(g, d, published.d_steps, published.settings, (*published.sources, *why))


def to_cli_args(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings of a policy as a user would type them."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()]


def to_cli_line(settings: Mapping[str, Any]) -> str:
    """The same in one line."""
    return ", ".join(f"{name}={value}" for name, value in to_cli_args(settings))


def lr_factor(batch: int, base_batch: int) -> float:
    """The factor on a rate that was published for `base` images. With the root of a larger batch, as usual with the
    Adam family, at most MOST; none for a smaller one, because published rates do not fall with the batch."""
    return min(MAX_LR_FACTOR, max(1.0, scale_lr(1.0, "sqrt", batch, base_batch)))


def _player_optim(published: PaperSettings, optimizer: Mapping[str, Any], batch: int) -> tuple[PlayerOptim, str]:
    side, factor = (
        from_dict(PlayerOptim, {"optimizer": optimizer, **published.common}),
        lr_factor(batch, published.batch),
    )
    if factor > 1:
        most = ", the most" if factor == MAX_LR_FACTOR else ""
        why = f"rates x {factor:g}{most}: the square root of {batch} images over the {published.batch} they are for"
        return replace(side, optimizer=with_lr(side.optimizer, side.optimizer.lr * factor)), why
    same = batch == published.batch
    return side, f"rates as published{'' if same else f' for {published.batch} images: a smaller batch keeps them'}"


def describe_optim(optim: PlayerOptim) -> str:
    """How a player learns, in a line: adam lr 0.0001, betas (0.0, 0.9), eps 1e-08."""
    optimizer = optim.optimizer
    more = [f"{word} {getattr(optimizer, word)}" for word in ("betas", "eps") if hasattr(optimizer, word)]
    more += ["rectified"] if getattr(optimizer, "rectify", False) else []
    more += [optim.optimizer_wrapper] if optim.optimizer_wrapper != "auto" else []
    more += [f"by {optim.extrapolation:g}"] if optim.extrapolation is not None else []
    more += [f"{optim.schedule} schedule"] if optim.schedule != "constant" else []
    return ", ".join([f"{optimizer.name} lr {optimizer.lr:g}", *more])
