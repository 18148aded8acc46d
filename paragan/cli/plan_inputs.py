"""TODO: docstring of paragan/cli/plan_inputs.py"""

from __future__ import annotations

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
    """The links that are asked for; Unusable where a file knows another number of hosts."""
    from paragan.plan.links import MAX_RANKS_PER_HOST, Links, is_links_file, load_links

    if (ranks_per_host or 1) > MAX_RANKS_PER_HOST:
        raise UsageError(f"--ranks-per-host {ranks_per_host}: at most {MAX_RANKS_PER_HOST} are planned for")
    if text is None:
        if (hosts or 1) > 1:
            raise UsageError(f"--hosts {hosts} needs --links: a file, or one line such as '25 Gbit/s, 50 us'")
        return Links(hosts=1, ranks_per_host=ranks_per_host or 1, up=10e9, latency=1e-5)
    if re.match(r"[0-9.]+(/[0-9.]+)? *[a-zA-Z]+/s *,", text) and not is_links_file(text):
        text = f"{hosts or 1} hosts of {ranks_per_host or 1} ranks, {text}"
    links = load_links(text)
    if hosts not in (None, links.hosts):
        raise UsageError(f"--hosts {hosts}, and --links knows {links.hosts}: leave --hosts out, or give other links")
    if ranks_per_host not in (None, links.ranks_per_host):
        if links.ranks_per_host != 1:
            raise UsageError(
                f"--ranks-per-host {ranks_per_host}, and --links says {links.ranks_per_host}: leave one of them out"
            )
        links = dataclasses.replace(links, ranks_per_host=ranks_per_host)
    return links


def check_lanes(run: Run, ranks: int) -> None:
    """Unusable names lanes that so many ranks can share."""
    if ranks <= run.lanes:
        return
    fits = next((n for n in range(ranks, run.batch + 1) if run.batch % n == 0), None)
    batch = -(-run.batch // ranks) * ranks
    works = f"--lanes {fits}" if fits else f"--lanes {ranks} --batch {batch}"
    raise UsageError(f"{ranks} ranks cannot share --lanes {run.lanes}: {works} works")


def parse_bytes(text: str) -> int:
    """'40 GB' -> bytes."""
    found = re.fullmatch(r"([0-9.]+) *([kKMGT]?)i?B?", text.strip())
    try:
        amount = float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2].replace("K", "k")]  # type: ignore[index]
    except (TypeError, ValueError):
        amount = 0.0
    if not 0 < amount < 1e18:
        raise UsageError(f"--memory {text}: bytes above 0, with their unit: 40 GB, 900 MB")
    return int(amount)


def memory_per_rank(profile: Profile, ranks_per_host: int) -> int:
    """Of a rank: a processor's is shared by all ranks of a host."""
    return profile.device.memory_bytes // (ranks_per_host if profile.device.kind == "cpu" else 1)


def load_or_measure_profile(file: str | None, run: Run, dataset: Dataset) -> tuple[Any, str]:
    """A profile of the device that is planned for, and where it is from."""
    from paragan.plan.profile.profile import read_profile

    if file:
        profile = read_profile(Path(file))
        _check_profile_networks(profile, run, dataset, file)
        return profile, file
    from paragan.cli.bench_step import describe_cache_file, measure_run_profile
    from paragan.plan.profile.profiler import ProfileOptions

    profile, kept = measure_run_profile(run, ProfileOptions())
    return profile, f"measured on this machine, {describe_cache_file(kept)}; --profile is for others"


def _check_profile_networks(profile: Profile, run: Run, dataset: Dataset, file: str) -> None:
    """A profile may be of any device, and of these networks alone."""
    from paragan.config.resolve import make_spec
    from paragan.core.rng import CPU
    from paragan.plan.memory import fake_tensor_mode
    from paragan.plan.round_cost import blank_dataset
    from paragan.train.build import build_networks

    with fake_tensor_mode():
        pair = build_networks(run, make_spec(run, blank_dataset(dataset)), CPU)
        sizes = tuple(sum(p.numel() for p in net.parameters() if p.requires_grad) for net in (pair.g, pair.d))
    for what, theirs, ours in (("parameters", profile.num_params, sizes), ("d_steps", profile.d_steps, run.d_steps)):
        if theirs != ours:
            raise UsageError(
                f"--profile {file} is of another game than {run.recipe}: {what} {theirs}, not {ours}; "
                f"`paragan bench step {run.recipe} --out {file}` makes one, with the same settings"
            )
