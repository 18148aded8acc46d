"""Cache of measured profiles, by network, device and options; and the check that a profile matches a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paragan.config.run import Run
from paragan.config.user_code import user_code_digest
from paragan.core.errors import UsageError
from paragan.core.schema import diff, to_dict
from paragan.eval import result_cache
from paragan.plan.profile.profile import DeviceInfo, Profile, profile_to_yaml, read_profile

MAX_CACHE_BYTES = 10**7  # of all profiles

# Fields of a run that do not change what a worker computes in a turn with some lanes.
IGNORED_RUN_FIELDS = (
    *("recipe", "kimg", "seed", "init_from", "evaluation", "output", "health", "on_divergence", "timeout_s"),
    *("strategy", "batch", "g_batch", "ramp", "lanes", "ema", "reasons", "auto_choice", "fingerprints"),
)
IGNORED_DATA_FIELDS = ("path", "range", "label_key", "only", "cache", "max_bad_fraction", "remote", "prefetch")
IGNORED_DEVICE_FIELDS = ("kind", "threads", "precision")  # part of DeviceInfo


def network_digest(run: Run, structure: str = "") -> str:
    """Return a digest of everything in a resolved run that changes what a worker computes.

    `structure` is the digest of user-defined networks (`structure_digest`). Their source files count too.
    """
    fields = to_dict(run)
    per_lane = [run.batch // run.lanes, run.g_batch // run.lanes]
    relevant = _without(fields, IGNORED_RUN_FIELDS)
    relevant["data"] = _without(fields["data"], IGNORED_DATA_FIELDS)
    relevant["device"] = _without(fields["device"], IGNORED_DEVICE_FIELDS)
    relevant["distill_from"] = run.fingerprints.distill_from or run.distill_from
    return _hash([relevant, per_lane, structure + user_code_digest(run.nets, run.objective)])


def structure_digest(*nets: nn.Module) -> str:
    """Return a digest of the structure of networks: classes, `extra_repr` and the shapes of parameters."""
    modules = [
        f"{name} {type(module).__qualname__} {module.extra_repr()}"
        for net in nets
        for name, module in net.named_modules()
    ]
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for net in nets for name, p in net.named_parameters()]
    return _hash([modules, shapes])


def cache_file(digest: str, device: DeviceInfo, options: Mapping[str, Any]) -> Path:
    """Return the path of a cached profile. `options` are further settings that change its contents."""
    return result_cache.cache_dir() / "profiles" / f"{_hash([digest, _device_identity(device), options])}.yaml"


def read_cached_profile(file: Path) -> Profile | None:
    """Read a cached profile; None if there is none, or it cannot be read."""
    try:
        profile = read_profile(file)
    except UsageError:
        return None
    result_cache.touch(file)
    return profile


def write_cached_profile(file: Path, profile: Profile) -> None:
    """Store a profile in the cache."""
    result_cache.store(file, lambda path: path.write_text(profile_to_yaml(profile), "utf-8"), MAX_CACHE_BYTES)


def check_profile_matches(profile: Profile, digest: str, device: DeviceInfo, remake_command: str) -> None:
    """Check that a profile is of these networks, this device and these versions.

    Args:
        profile: to check.
        digest: expected `network_digest`.
        device: expected device.
        remake_command: the command that makes a matching profile, for the message.

    Raises:
        UsageError: it is of something else.
    """
    differences = diff(_device_identity(profile.device), _device_identity(device))
    reasons = [f"{name} {theirs}, not {ours}" for name, theirs, ours in differences]
    if profile.network_digest != digest:
        reasons.append(f"other networks or another game ({profile.recipe})")
    if reasons:
        raise UsageError(f"profile: it is of {'; '.join(reasons)}. Use `{remake_command}`")


def _device_identity(device: DeviceInfo) -> dict[str, Any]:
    """Return the fields that identify a device: neither its speed, nor its memory, which a container may limit."""
    return _without(to_dict(device), ("peak_flops", "memory_bytes"))


def _without(mapping: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
