"""Profiles that were measured: kept by what they are of, found again, and refused where they are of something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import diff, to_dict
from paragan.eval import result_cache
from paragan.plan.profile.profile import DeviceInfo, Profile, profile_to_yaml, read_profile

MAX_CACHE_BYTES = 10**7  # of all profiles that are kept
# fields of a run that change nothing of what a worker computes in a turn of some lanes
IGNORED_RUN_FIELDS = (
    *(
        "recipe",
        "kimg",
        "seed",
        "init_from",
        "evaluation",
        "output",
        "health",
        "on_divergence",
        "timeout_s",
        "strategy",
    ),
    *("batch", "g_batch", "ramp", "lanes", "ema", "reasons", "auto_choice"),
)
IGNORED_DATA_FIELDS = ("path", "only_class", "cache", "max_bad_fraction", "remote", "prefetch")
IGNORED_DEVICE_FIELDS = ("kind", "threads", "precision")  # the profile's own device says


def network_digest(run: Run, structure: str = "") -> str:
    """Of all in a resolved run that changes what is computed. structure: of networks of the user's own."""
    about = to_dict(run)
    per_lane = [run.batch // run.lanes, run.g_batch // run.lanes]
    kept = {name: part for name, part in about.items() if name not in IGNORED_RUN_FIELDS}
    kept["data"] = _without(about["data"], IGNORED_DATA_FIELDS)
    kept["device"] = _without(about["device"], IGNORED_DEVICE_FIELDS)
    return _hash([kept, per_lane, structure])


def structure_digest(*nets: nn.Module) -> str:
    """Networks by what they are made of: classes, what they print of themselves, and the shapes of their parameters."""
    modules = [
        f"{name} {type(part).__qualname__} {part.extra_repr()}" for net in nets for name, part in _named_modules(net)
    ]
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for net in nets for name, p in net.named_parameters()]
    return _hash([modules, shapes])


def _named_modules(net: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(net.named_modules())


def cache_file(digest: str, device: DeviceInfo, options: Mapping[str, Any]) -> Path:
    """Where a profile is kept. asked: what else decides what it says."""
    return result_cache.cache_dir() / "profiles" / f"{_hash([digest, _device_identity(device), options])}.yaml"


def read_cached_profile(file: Path) -> Profile | None:
    """What is kept there; one that cannot be read is none."""
    try:
        profile = read_profile(file)
    except UsageError:
        return None
    result_cache.touch(file)
    return profile


def write_cached_profile(file: Path, profile: Profile) -> None:
    result_cache.store(file, lambda aside: aside.write_text(profile_to_yaml(profile), "utf-8"), MAX_CACHE_BYTES)


def check_profile_matches(profile: Profile, digest: str, device: DeviceInfo, remake_command: str) -> None:
    """Unusable where a profile is of another network, device or version. remake: the command that makes one."""
    differing = diff(_device_identity(profile.device), _device_identity(device))
    found = [f"{name} {a}, here {b}" for name, a, b in differing]
    found += [] if profile.network_digest == digest else [f"another network or game (it is of {profile.recipe})"]
    if found:
        raise UsageError(f"profile: it is of {'; '.join(found)}: `{remake_command}` makes one")


def _device_identity(device: DeviceInfo) -> dict[str, Any]:
    """What makes it this device: not what was measured of it, nor what a container leaves it of memory."""
    return _without(to_dict(device), ("peak_flops", "memory_bytes"))


def _without(mapping: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
