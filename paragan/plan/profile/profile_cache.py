"""Profiles that were measured: kept by what they are of, found again, and refused where they are of something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paragan.config.run import Run
from paragan.core.errors import Unusable
from paragan.core.schema import differences, plain
from paragan.eval import result_cache
from paragan.plan.profile.profile import Device, Profile, read_profile, written_profile

MOST_BYTES = 10**7  # of all profiles that are kept
# fields of a run that change nothing of what a worker computes in a turn of some lanes
APART = (
    *("recipe", "kimg", "seed", "init_from", "evaluation", "output", "health", "guard", "timeout_s", "strategy"),
    *("batch", "g_batch", "ramp", "lanes", "average", "about", "chosen"),
)
APART_OF_DATA = ("path", "only", "hold", "bad_share", "reach", "feed")
APART_OF_DEVICE = ("kind", "threads", "precision")  # the profile's own device says


def network_digest(run: Run, structure: str = "") -> str:
    """Of all in a resolved run that changes what is computed. structure: of networks of the user's own."""
    about = plain(run)
    per_lane = [run.batch // run.lanes, run.g_batch // run.lanes]
    kept = {name: part for name, part in about.items() if name not in APART}
    kept["data"] = _without(about["data"], APART_OF_DATA)
    kept["device"] = _without(about["device"], APART_OF_DEVICE)
    return _digest([kept, per_lane, structure])


def structure_of(*nets: nn.Module) -> str:
    """Networks by what they are made of: classes, what they print of themselves, and the shapes of their parameters."""
    modules = [f"{name} {type(part).__qualname__} {part.extra_repr()}" for net in nets for name, part in _parts(net)]
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for net in nets for name, p in net.named_parameters()]
    return _digest([modules, shapes])


def _parts(net: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(net.named_modules())


def kept_file(network: str, device: Device, asked: Mapping[str, Any]) -> Path:
    """Where a profile is kept. asked: what else decides what it says."""
    return result_cache.folder() / "profiles" / f"{_digest([network, _identity(device), asked])}.yaml"


def found(file: Path) -> Profile | None:
    """What is kept there; one that cannot be read is none."""
    try:
        profile = read_profile(file)
    except Unusable:
        return None
    result_cache.used(file)
    return profile


def keep(file: Path, profile: Profile) -> None:
    result_cache.put(file, lambda aside: aside.write_text(written_profile(profile), "utf-8"), MOST_BYTES)


def refuse_other(profile: Profile, network: str, device: Device, remake: str) -> None:
    """Unusable where a profile is of another network, device or version. remake: the command that makes one."""
    differing = differences(_identity(profile.device), _identity(device))
    found = [f"{name} {a}, here {b}" for name, a, b in differing]
    found += [] if profile.network == network else [f"another network or game (it is of {profile.recipe})"]
    if found:
        raise Unusable(f"profile: it is of {'; '.join(found)}: `{remake}` makes one")


def _identity(device: Device) -> dict[str, Any]:
    """What makes it this device: not what was measured of it, nor what a container leaves it of memory."""
    return _without(plain(device), ("peak_flops", "memory"))


def _without(about: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name not in names}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
