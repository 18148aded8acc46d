"""Decide from the reports of the ranks that survived a loss whether they continue, and from which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paragan.comm.elastic.rejoin import SurvivorReport


def continue_from(reports: Mapping[int, SurvivorReport]) -> tuple[int, tuple[int, ...]]:
    """Return the step from which the ranks that reported continue, and those that need the parameters of another one.

    Ranks of the highest generation keep their parameters. Where ranks agree in every round, a rank of a higher one has
    exactly what the others would have; else they may be some steps apart, and continue from the largest.
    """
    with_state = [report for report in reports.values() if report.step >= 0]
    generation = max((report.generation for report in with_state), default=0)
    step = max((report.step for report in with_state if report.generation == generation), default=-1)
    return step, tuple(r for r, report in reports.items() if report.step < 0 or report.generation < generation)


def find_shutdown_reason(
    previous: Sequence[int],
    present: Sequence[int],
    without_state: Sequence[int],
    exited: Sequence[int],
    min_ranks: int = 2,
) -> str:
    """Return why the present ranks cannot continue; empty if they can.

    Args:
        previous: the members before.
        present: those that reported.
        without_state: those of them that have no parameters yet.
        exited: those of the lost ones whose processes are known to have ended, or that ask to join again.
        min_ranks: with how many ranks they continue at least.
    """
    lost = [r for r in previous if r not in present]
    names, missing = ", ".join(map(str, present)), ", ".join(map(str, lost))
    if len(present) == len(without_state):
        return "no remaining rank has parameters"
    if not has_majority(previous, present, exited):
        return f"rank {missing} cannot be reached, and rank {names} {'is' if len(present) == 1 else 'are'} no majority"
    if len(present) < min_ranks:
        remaining = "no other rank remains" if len(present) == 1 else f"fewer than min_ranks={min_ranks} remain"
        happened = f"{'has' if len(lost) == 1 else 'have'} ended" if {*lost} <= {*exited} else "cannot be reached"
        return f"rank {missing} {happened}: {remaining}"
    return ""


def has_majority(previous: Sequence[int], present: Sequence[int], exited: Sequence[int]) -> bool:
    """Return whether no other group of the previous members can be larger than the present ones, or as large."""
    return 2 * len(present) > len(previous) - len(exited)
