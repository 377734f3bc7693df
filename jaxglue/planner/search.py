"""Searches that need few predictions of a whole step."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from jaxglue.planner.plans import Plan, by_time

_AS_FAST = 0.01
"""Share by which a run may be slower where its first step begins sooner: less than predictions are off by."""


def soonest(plans: Sequence[Plan], steps: int | None = None) -> list[Plan]:
    """Return the plan, if any, that starts first among those with which a run is as fast as with the fastest.

    A run is its start and its steps; without their number, the steps alone.
    """
    times = [plan.run_seconds(steps) for plan in plans]
    as_fast = [plan for plan, time in zip(plans, times, strict=True) if time <= (1 + _AS_FAST) * min(times)]
    return [min(as_fast, key=lambda plan: plan.start_seconds)] if as_fast else []


def most(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the last count that fits, if one does; all counts before it fit, too."""
    fitting = _fitting(counts, fits)
    return fitting[-1] if fitting else None


def fastest(plan: Callable[[int], Plan], counts: Sequence[int], fits: Callable[[int], bool]) -> Plan | None:
    """Return the fastest plan of some count that fits, if one does.

    Memory grows with the count; time falls, and rises again where the link is full.
    """
    plan = cache(plan)
    fitting = _fitting(counts, fits)
    low, high = 0, len(fitting) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if plan(fitting[left]).seconds <= plan(fitting[right]).seconds:
            high = right - 1
        else:
            low = left + 1
    return min(map(plan, filter(fits, fitting[low : high + 1])), key=by_time, default=None)


def _fitting(counts: Sequence[int], fits: Callable[[int], bool]) -> Sequence[int]:
    return counts[: bisect_left(counts, True, key=lambda count: not fits(count))]


def interpolate(loads: dict[int, float], limit: int, step: int) -> int:
    """Return the next row length to try, or a known one at the end of the search."""
    fitting = max((seq_len for seq_len, load in loads.items() if load <= 1), default=0)
    above = min((seq_len for seq_len, load in loads.items() if load > 1), default=limit)
    if not fitting or above - fitting <= step:
        return fitting or min(loads)
    free, excess = 1 - loads[fitting], loads[above] - 1
    latest = [load <= 1 for load in reversed(loads.values())]
    stale = 0.5 ** (latest.index(not latest[0]) - 1)  # both ends move, as in the Illinois algorithm
    free, excess = (free, excess * stale) if latest[0] else (free * stale, excess)
    guess = int(fitting + (above - fitting) * free / (free + excess)) // step * step
    return min(max(guess, fitting), above - step)
