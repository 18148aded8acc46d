"""TODO: docstring of paragan/cli/plan_inputs.py"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from paragan.core.errors import Unusable


def links_of(text: str | None, hosts: int | None, each: int | None) -> Any:
    """The links that are asked for; Unusable where a file knows another number of hosts."""
    from paragan.plan.links import MOST_RANKS, Links, is_file, links_from

    if (each or 1) > MOST_RANKS:
        raise Unusable(f"--ranks-per-host {each}: at most {MOST_RANKS} are planned for")
    if text is None:
        if (hosts or 1) > 1:
            raise Unusable(f"--hosts {hosts} needs --links: a file, or one line such as '25 Gbit/s, 50 us'")
        return Links(hosts=1, ranks_per_host=each or 1, up=10e9, latency=1e-5)
    if re.match(r"[0-9.]+(/[0-9.]+)? *[a-zA-Z]+/s *,", text) and not is_file(text):
        text = f"{hosts or 1} hosts of {each or 1} ranks, {text}"
    links = links_from(text)
    if hosts not in (None, links.hosts):
        raise Unusable(f"--hosts {hosts}, and --links knows {links.hosts}: leave --hosts out, or give other links")
    if each not in (None, links.ranks_per_host):
        if links.ranks_per_host != 1:
            raise Unusable(f"--ranks-per-host {each}, and --links says {links.ranks_per_host}: leave one of them out")
        links = dataclasses.replace(links, ranks_per_host=each)
    return links


def refuse_lanes(run: Any, ranks: int) -> None:
    """Unusable names lanes that so many ranks can share."""
    if ranks <= run.lanes:
        return
    fits = next((n for n in range(ranks, run.batch + 1) if run.batch % n == 0), None)
    batch = -(-run.batch // ranks) * ranks
    works = f"--lanes {fits}" if fits else f"--lanes {ranks} --batch {batch}"
    raise Unusable(f"{ranks} ranks cannot share --lanes {run.lanes}: {works} works")


def bytes_of(text: str) -> int:
    """'40 GB' -> bytes."""
    found = re.fullmatch(r"([0-9.]+) *([kKMGT]?)i?B?", text.strip())
    try:
        amount = float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2].replace("K", "k")]  # type: ignore[index]
    except (TypeError, ValueError):
        amount = 0.0
    if not 0 < amount < 1e18:
        raise Unusable(f"--memory {text}: bytes above 0, with their unit: 40 GB, 900 MB")
    return int(amount)


def _memory(profile: Any, ranks_per_host: int) -> int:
    """Of a rank: a processor's is shared by all ranks of a host."""
    return profile.device.memory // (ranks_per_host if profile.device.kind == "cpu" else 1)


def profile_for(file: str | None, run: Any, images: Any) -> tuple[Any, str]:
    """A profile of the device that is planned for, and where it is from."""
    from paragan.plan.profile.profile import read_profile

    if file:
        profile = read_profile(Path(file))
        _refuse_network(profile, run, images, file)
        return profile, file
    from paragan.cli.bench_step import profiled, where
    from paragan.plan.profile.profiler import Asked

    profile, kept = profiled(run, Asked())
    return profile, f"measured on this machine, {where(kept)}; --profile is for others"


def _refuse_network(profile: Any, run: Any, images: Any, file: str) -> None:
    """A profile may be of any device, and of these networks alone."""
    from paragan.config.resolve import spec_of
    from paragan.core.rng import CPU
    from paragan.plan.memory import imagined
    from paragan.plan.round_cost import few
    from paragan.train.build import build_nets

    with imagined():
        pair = build_nets(run, spec_of(run, few(images)), CPU)
        sizes = tuple(sum(p.numel() for p in net.parameters() if p.requires_grad) for net in (pair.g, pair.d))
    for what, theirs, ours in (("parameters", profile.params, sizes), ("d_steps", profile.d_steps, run.d_steps)):
        if theirs != ours:
            raise Unusable(
                f"--profile {file} is of another game than {run.recipe}: {what} {theirs}, not {ours}; "
                f"`paragan bench step {run.recipe} --out {file}` makes one, with the same settings"
            )
