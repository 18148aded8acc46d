"""Inputs of `paragan plan`: links, memory and the profile of one worker."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.data.dataset import Dataset
    from paragan.plan.profile.profile import Profile


def resolve_links(text: str | None, hosts: int | None, ranks_per_host: int | None) -> Any:
    """Return the links of --links, --hosts and --ranks-per-host.

    Raises:
        UsageError: they contradict each other.
    """
    from paragan.plan.links import MAX_RANKS_PER_HOST, Links, is_links_file, load_links

    if (ranks_per_host or 1) > MAX_RANKS_PER_HOST:
        raise UsageError(f"--ranks-per-host {ranks_per_host}: too many. Use at most {MAX_RANKS_PER_HOST}")
    if text is None:
        if (hosts or 1) > 1:
            raise UsageError(f"--hosts {hosts}: needs --links. Use a file, or --links '25 Gbit/s, 50 us'")
        return Links(hosts=1, ranks_per_host=ranks_per_host or 1, up=10e9, latency=1e-5)
    if re.match(r"[0-9.]+(/[0-9.]+)? *[a-zA-Z]+/s *,", text) and not is_links_file(text):
        text = f"{hosts or 1} hosts of {ranks_per_host or 1} ranks, {text}"
    links = load_links(text)
    if hosts not in (None, links.hosts):
        raise UsageError(f"--hosts {hosts}: --links has {links.hosts}. Leave --hosts out, or use other links")
    if ranks_per_host not in (None, links.ranks_per_host):
        if links.ranks_per_host != 1:
            raise UsageError(
                f"--ranks-per-host {ranks_per_host}: --links has {links.ranks_per_host}. Leave --ranks-per-host out"
            )
        links = dataclasses.replace(links, ranks_per_host=ranks_per_host)
    return links


def check_lanes(run: Run, ranks: int) -> None:
    """Check that the ranks can share the lanes.

    Raises:
        UsageError: names a number of lanes that works.
    """
    if ranks <= run.lanes:
        return
    fits = next((n for n in range(ranks, run.batch + 1) if run.batch % n == 0), None)
    batch = -(-run.batch // ranks) * ranks
    hint = f"--lanes {fits}" if fits else f"--lanes {ranks} --batch {batch}"
    raise UsageError(f"--lanes {run.lanes}: {ranks} ranks cannot share them. Use {hint}")


def parse_bytes(text: str) -> int:
    """Parse a size such as "40 GB" to bytes.

    Raises:
        UsageError: it is no size of 1 MB or more; less is a number without its unit.
    """
    match = re.fullmatch(r"([0-9.]+) *([kKMGT]?)i?B?", text.strip())
    nbytes = 0.0
    if match:
        with contextlib.suppress(ValueError):  # such as 1.2.3
            nbytes = float(match[1]) * {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    if not 1e6 <= nbytes < 1e18:
        raise UsageError(f"--memory {text}: it must be a size of 1 MB or more. Use 40 GB or 900 MB")
    return int(nbytes)


def memory_per_rank(profile: Profile, ranks_per_host: int) -> int:
    """Return the memory of a rank. On CPUs, the ranks of a host share it."""
    return profile.device.memory_bytes // (ranks_per_host if profile.device.kind == "cpu" else 1)


def load_or_measure_profile(file: str | None, run: Run, dataset: Dataset) -> tuple[Any, str]:
    """Read a profile, or measure one here. Returns it with a description of its source."""
    from paragan.plan.profile.profile import read_profile

    if file:
        profile = read_profile(Path(file))
        _check_profile_networks(profile, run, dataset, file)
        return profile, file
    from paragan.cli.bench_step import describe_cache_file, measure_run_profile
    from paragan.plan.profile.profiler import ProfileOptions

    profile, cache_file = measure_run_profile(run, ProfileOptions())
    return profile, f"measured on this machine, {describe_cache_file(cache_file)}; use --profile for another"


def _check_profile_networks(profile: Profile, run: Run, dataset: Dataset, file: str) -> None:
    """Check that a profile is of the networks of this run. It may be of any device."""
    from paragan.config.resolve import make_spec
    from paragan.core.rng import CPU
    from paragan.plan.memory import fake_tensor_mode
    from paragan.plan.round_cost import blank_dataset
    from paragan.train.build import build_networks

    with fake_tensor_mode():
        pair = build_networks(run, make_spec(run.data, blank_dataset(dataset)), CPU)
        sizes = tuple(sum(p.numel() for p in net.parameters() if p.requires_grad) for net in (pair.g, pair.d))
    checks = (("parameters", profile.num_params, sizes), ("d_steps", profile.d_steps, run.d_steps))
    for name, measured, expected in checks:
        if measured != expected:
            raise UsageError(
                f"--profile {file}: it is of another game than {run.recipe}: {name} {measured}, not {expected}. "
                f"Use `paragan bench step {run.recipe} --out {file}` with the same settings"
            )
