"""Named strategies: a preset is a mechanism with some fields set.

`--strategy DPOSG` is a `Decentralized` on a ring with `paper_update`; further `--strategy.field=value` options apply on
top. A run keeps the name that the user typed and all fields, so it resumes as it began. To add a preset, add a row here
and its name to the `name` field of the mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paragan.core.schema import name_shorthand
from paragan.strategies.async_paragan import Async
from paragan.strategies.gossip_dposg import Decentralized
from paragan.strategies.quantized_dqgan import Quantized
from paragan.strategies.sync import Sync

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Quantized. Chen et al. 2020: the algorithm, and its baselines, optimistic Adam on exact gradients or on quantized
    # ones, without error feedback
    "DQGAN": {"paper_update": True},
    "CPOAdam": {"wire": "exact"},
    "CPOAdam-GQ": {"feedback": 0.0},
    # The centralized baseline of Liu et al. 2020, in their spelling
    "CP-OAdam": {"wire": "exact"},
    # Decentralized. Liu et al. 2020: the algorithm, its practical form with Adam, and that on random graphs
    "DPOSG": {"topology": "ring", "paper_update": True},
    "DP-OAdam": {"topology": "ring"},
    "Rand-DP-OAdam": {"topology": "random-ring"},
    # Lian et al. 2018 (AD-PSGD): a ring whose links may be late by up to 16 steps
    "async-gossip": {"topology": "ring", "staleness": 16},
    # PerLabel. Lupo Pasini and Yin 2022: of the two ranks of a label one trains D, the other G (with --policy dcgan)
    "DC-CGAN": {"per_label_strategy": "async", "ranks_per_label": 2},
}


def fill_from_preset(value: Any) -> Any:
    """Add the fields of the preset that a plain record of a strategy names, where it does not set them itself."""
    if not isinstance(value, dict):
        return value
    settings: dict[str, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
    preset = PRESETS.get(str(settings.get("name")), {})
    for field, default in preset.items():
        part = settings.setdefault(field, default)
        if isinstance(part, dict) and isinstance(default, str):
            settings[field] = {"name": default, **part}  # the user set fields of the part that the preset names
    return settings


def _sync_by_default(value: Any) -> Any:
    """Read fields without a name as those of `sync`."""
    return {"name": "sync", **value} if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]


# The strategies that train one game; the ranks of a label use one too.
SharedStrategy = Annotated[
    Sync | Quantized | Decentralized | Async,
    Field(discriminator="name"),
    BeforeValidator(fill_from_preset),
    BeforeValidator(_sync_by_default),
    name_shorthand,
]
