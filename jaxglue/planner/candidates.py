"""Remat policies that the planner compares, and the tiles of long rows."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from jaxglue.planner.plan import Plan, by_time

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


ATTENTION = "attention_out,attention_lse"
_RANKS = "lora_hidden"
"""Few bytes a token, and they save the passes to adapters' ranks, SwiGLU's among them: kept wherever it can be."""
_OFFLOADS = (
    f"offload:layer_input,attention_residual,query,key,value,{_RANKS}",
    f"offload:layer_input,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,key,value,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,query,key,value,gate,{_RANKS}",
)
"""In the order of bytes offloaded. All values save about as much recomputation per byte, so their total decides."""
_LEAN = f"save:{_RANKS}", f"offload:layer_input,{_RANKS}"
_POLICIES: tuple[str, ...] = ("none", "dots", "dots; offload:layer_input", "full", "offload", *_LEAN, *_OFFLOADS)
_MIXES = (
    ("dots", "none"),
    *((lean, "dots") for lean in (*_LEAN, *_OFFLOADS)),
    *pairwise(_OFFLOADS),
    *((lean, f"{lean}; save:up") for lean in _OFFLOADS[1:]),
    *((lean, f"{other}; save:up") for other, lean in pairwise(_OFFLOADS[1:])),
)
_KEPT = ("full", f"save:{ATTENTION}", f"offload; save:{ATTENTION}", f"offload:layer_input,{ATTENTION}")
"""Of layers by tiles, in which only attention's values and the layer's input can be kept."""
_TILED_POLICIES = (*_KEPT, "offload", f"offload:layer_input,query,key,value,{ATTENTION}")
_TILED_MIXES = (
    ("offload", f"offload:layer_input,{ATTENTION}"),
    *((f"offload:layer_input,{ATTENTION}", fast) for fast in (*_KEPT[1:3], _TILED_POLICIES[-1])),
)
_TILES = (32768, 16384, 8192)
"""Most tokens of a tile, in the order in which they are tried."""
_LEAST_TILE = 1024

Candidates = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def candidates(*, keep_attention: bool, tiled: bool, adapters: bool) -> Candidates:
    """Return policies, and pairs of a lean and a fast one, spread among the lean so that the link catches up.

    Args:
        keep_attention: attention's output and log-sum-exp are copied faster than they are recomputed.
        tiled: layers compute by tiles.
        adapters: layers have adapters.
    """
    if tiled:
        return _TILED_POLICIES, _TILED_MIXES
    policies, mixes = _POLICIES, _MIXES
    if keep_attention:
        kept = _with_attention(_LEAN[1])
        more = (_LEAN[1], kept), (kept, _with_attention(_OFFLOADS[0]))
        mixes = (*more, *((_with_attention(lean), _with_attention(fast)) for lean, fast in mixes))
        policies = tuple(map(_with_attention, policies))
    if adapters:
        return policies, mixes
    pairs = ((_without_ranks(lean), _without_ranks(fast)) for lean, fast in mixes)
    return tuple(dict.fromkeys(map(_without_ranks, policies))), tuple(pairs)


def _without_ranks(policy: str) -> str:
    return policy.replace(f",{_RANKS}", "").replace(f"save:{_RANKS}", "full")


def _with_attention(policy: str) -> str:
    """Add attention's values to those offloaded, where the policy names any."""
    head, *rest = policy.split(";")
    return ";".join([f"{head},{ATTENTION}" if head.startswith("offload:") else head, *rest])


def tile_sizes(tokens: int) -> list[int]:
    """Return tiles to try for so many tokens: divisors, the largest first, multiples of 128 where there are some."""
    sizes = []
    for limit in _TILES:
        fitting = [tokens // count for count in range(2, tokens // _LEAST_TILE + 1) if tokens % count == 0]
        fitting = [size for size in fitting if size <= limit]
        if best := max((size for size in fitting if size % 128 == 0), default=max(fitting, default=0)):
            sizes.append(best)
    return list(dict.fromkeys(sizes))
