"""Find settings that fit into the memory of a device, where those of a run do not.

`explain_out_of_memory` is called when training ran out of memory; `paragan train -n` foresees it (`find_options`).
Estimates (plan/round_cost.py) find a candidate, and on the device a round is played to see whether it fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from paragan.comm.world import World
from paragan.config.run import Run, with_lanes
from paragan.core.devices import backend_of, release_memory
from paragan.core.errors import DeviceOutOfMemory, UsageError
from paragan.data.dataset import Dataset
from paragan.plan.cost import format_bytes
from paragan.plan.round_cost import blank_dataset, count_rank_lanes, estimate_round, largest_stage, play_rank_round
from paragan.train.loop import play_round

RESERVED_FRACTION = 0.05  # of the memory, for what is done between rounds
PeakFn = Callable[[Run], float]  # a run of one rank's lanes -> bytes that a round takes
FitsFn = Callable[[Run], bool]  # a run of one rank's lanes -> whether a round fits


class PeakEstimates:
    """Estimated peaks of a round on one rank, for other batches and passes of one run.

    Args:
        dataset: blank.
        rank_lanes: lanes of the rank.
        ranks: of the run.
    """

    def __init__(self, dataset: Dataset, rank_lanes: int, ranks: int):
        self.dataset, self.rank_lanes, self.ranks = dataset, rank_lanes, ranks
        self._peaks: dict[tuple[int, int, int], int] = {}

    def __call__(self, run: Run) -> int:
        """Return the peak in bytes."""
        key = run.batch, run.g_batch, run.device.lanes_per_pass
        if key not in self._peaks:
            self._peaks[key] = estimate_round(with_lanes(run, self.rank_lanes), self.dataset, self.ranks).peak_bytes
        return self._peaks[key]


def explain_out_of_memory(
    run: Run, dataset: Dataset, world: World, reason: str, has_named_dir: bool = False
) -> DeviceOutOfMemory:
    """Return the error of a run that ran out of memory on the device of this rank: what it needs, and what fits.

    Plays rounds on the device, which must hold nothing of the run any more.

    Args:
        reason: the error of torch.
        has_named_dir: whether the user named the run folder, which now holds this run.
    """
    device = world.device
    backend = backend_of(device)
    release_memory(device)
    blank = blank_dataset(dataset)
    largest = dataclasses.replace(largest_stage(run), distill_from="")
    rank_lanes = count_rank_lanes(largest, blank, world.size)
    memory = backend.memory_bytes(device)
    usable = (1 - RESERVED_FRACTION) * memory
    peak_of = PeakEstimates(blank, rank_lanes, world.size)
    measured: dict[float, float] = {}  # estimated peak of a round -> its peak on the device

    def scaled_peak_of(candidate: Run) -> float:
        estimated = max(measured, default=1.0)
        return peak_of(candidate) * measured.get(estimated, 1.0) / estimated

    def fits(candidate: Run) -> bool:
        backend.reset_peak_memory(device)
        is_played = True
        try:
            with_teacher = dataclasses.replace(candidate, distill_from=run.distill_from)
            play_round(play_rank_round(with_teacher, blank, rank_lanes, world.size, device))
        except (RuntimeError, ValueError, UsageError):  # too little memory; or a batch that these networks do not take
            is_played = False
        release_memory(device)  # after the error, which holds the tensors of the round
        if is_played:
            measured[peak_of(candidate)] = backend.peak_bytes(device)
        return is_played and backend.peak_bytes(device) <= usable

    if fits(largest):
        return DeviceOutOfMemory(
            f"out of memory: a round fits into the {format_bytes(memory)} of the device, and what is done between "
            f"rounds does not, or another process uses it ({reason})"
        )
    fits(with_batch(largest, min(largest.batch, 2 * largest.lanes)))  # for the scale of estimates
    options = find_options(dataclasses.replace(run, distill_from=""), scaled_peak_of, usable, fits)
    advice = format_advice(options, ", with another --run-dir" if has_named_dir else "")
    return DeviceOutOfMemory(
        f"{name_batch(run)}: needs about {format_bytes(scaled_peak_of(largest))}, and the device has "
        f"{format_bytes(memory)}. {advice}"
    )


def find_options(run: Run, peak_of: PeakFn, memory_bytes: float, fits: FitsFn) -> list[str]:
    """Return each of the options that help where rounds need more than `memory_bytes`: the largest batch that fits,
    and passes of one lane.

    Args:
        peak_of: estimates the peak of a round of another run on one rank, in bytes.
        fits: whether such a round does fit.
    """
    largest = largest_stage(run)
    options: list[str] = []
    batch = find_largest_batch(largest, lambda candidate: peak_of(candidate) <= memory_bytes, fits)
    if batch:
        options.append(name_batch(run, batch))
    device = dataclasses.replace(run.device, lanes_per_pass=1)
    if run.device.lanes_per_pass != 1 and fits(dataclasses.replace(largest, device=device)):
        options.append("--device.lanes_per_pass=1")
    return options


def format_advice(options: Sequence[str], condition: str = "") -> str:
    """Return a sentence that names options, each of which is enough."""
    if not options:
        return "Use a device with more memory, or smaller networks"
    return " ".join(["Use", ", or ".join(options) + condition])


def find_largest_batch(run: Run, is_estimated_to_fit: FitsFn, fits: FitsFn) -> int:
    """Return the largest batch below that of a run that fits, a multiple of its lanes; 0 if there is none."""
    low = 0  # images of a lane that fit
    high = run.batch // run.lanes  # images of a lane that do not
    while high - low > 1:
        middle = (low + high) // 2
        if is_estimated_to_fit(with_batch(run, middle * run.lanes)):
            low = middle
        else:
            high = middle
    while low and not fits(with_batch(run, low * run.lanes)):
        low = low * 9 // 10
    return low * run.lanes


def with_batch(run: Run, batch: int) -> Run:
    """Return a run without ramp with another batch; that of G changes with it."""
    return dataclasses.replace(run, batch=batch, g_batch=run.g_batch and _g_batch(run, batch))


def _g_batch(run: Run, batch: int) -> int:
    """Return G's batch, as large relative to D's as in a run, in whole lanes."""
    return max(1, run.g_batch * batch // (run.batch * run.lanes)) * run.lanes


def name_batch(run: Run, batch: int = 0) -> str:
    """Return the options that set the batch: that of a run, or another."""
    if run.ramp and batch:
        return f"--batch={batch} --ramp=none"
    name = f"--batch={batch or run.batch}"
    if run.ramp:
        name = f"--ramp={','.join(f'{kimg:g}:{size}' for kimg, size in run.ramp)}"
    if run.g_batch and batch:
        return f"{name} --g_batch={_g_batch(run, batch)}"
    return name
