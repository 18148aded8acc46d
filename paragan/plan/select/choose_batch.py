"""Choose the total batch of a run from a profile of one worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.plan.links import Links
from paragan.plan.measure_links import measure_links
from paragan.plan.profile.profile import Profile
from paragan.plan.select.candidates import Candidate, default_candidates
from paragan.plan.select.choose import EXTRA_TIMEOUT_S
from paragan.plan.select.compare import Goal, compare_strategies
from paragan.strategies.sync import Sync
from paragan.train.rank_agreement import on_all_ranks


def choose_batch(run: Run, profile: Profile, world: World, batches: Sequence[int]) -> tuple[int, str]:
    """Return the batch with which the run is predicted to learn most in an hour, and the reason.

    A batch that is small beside the gradient noise scale needs few images, a large one gives more images a second
    (McCandlish et al. 2018). Batches that do not fit into memory are passed over. All ranks call this together.

    Args:
        run: resolved; its batch is what its learning rates are for.
        profile: of one worker, with a noise scale.
        world: of all ranks.
        batches: to choose from.

    Raises:
        UsageError: the profile has no noise scale, or no batch fits.
    """
    if not profile.noise_scale:
        raise UsageError(
            'bs="auto": the profile has no noise scale. Use profile(gan, noise_kimg=10), or a number of images'
        )
    links = Links(hosts=1, up=1.0, latency=0.0)
    if world.size > 1:
        links = measure_links(world, quick=True)

    def compare() -> str:
        if not world.is_main:
            return ""
        candidates = [Candidate(run.strategy.name, run.strategy)]
        if run.strategy.auto_request:
            candidates = default_candidates(world.size, profile, run.batch)
        planned = replace(run, strategy=Sync()) if run.strategy.auto_request else run
        shared_by = world.launch_info.local_size if profile.device.kind == "cpu" else 1
        goal = Goal(run.kimg, memory_bytes=profile.device.memory_bytes // shared_by)
        plan = compare_strategies(planned, candidates, profile, links, world.size, goal, batches=batches)
        player, noise = min(profile.noise_scale.items(), key=lambda item: item[1].images)
        choice = f"batch {plan.best.batch} of {', '.join(map(str, batches))}"
        reason = f"{choice}: the noise scale of {player}'s gradient, the smaller one, is {noise.images:.3g} images"
        return json.dumps([plan.best.batch, reason])

    batch, reason = json.loads(world.all_gather_str(on_all_ranks(world, compare, EXTRA_TIMEOUT_S))[0])
    return batch, reason
