"""Searches that need few plans: each is a prediction of a whole step."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

from jaxglue.planner.plans import Plan, by_time


def fastest(plan: Callable[[int], Plan], counts: Sequence[int], room: float) -> Plan | None:
    """Return the fastest plan of some count that fits into `room` bytes of the GPU, if one does.

    Memory grows with the count; time falls, and rises again where the link is full.
    """
    plan = cache(plan)
    fitting = counts[: bisect_right(counts, room, key=lambda count: plan(count).device_bytes)]
    low, high = 0, len(fitting) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if plan(fitting[left]).seconds <= plan(fitting[right]).seconds:
            high = right - 1
        else:
            low = left + 1
    tried = map(plan, fitting[low : high + 1])
    return min((found for found in tried if found.device_bytes <= room), key=by_time, default=None)


def interpolate(loads: dict[int, float], limit: int, step: int) -> int:
    """Return the next row length to try, or a known one at the end of the search."""
    fitting = max((seq_len for seq_len, load in loads.items() if load <= 1), default=0)
    above = min((seq_len for seq_len, load in loads.items() if load > 1), default=limit)
    if not fitting or above - fitting <= step:
        return fitting or min(loads)
    slope = (loads[above] - loads[fitting]) / (above - fitting) if above in loads else math.inf
    guess = int(fitting + (1 - loads[fitting]) / slope) // step * step
    return min(max(guess, fitting), above - step)
