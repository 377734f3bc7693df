"""Remat policies that the planner compares, and the tiles of long rows."""

from itertools import pairwise

ATTENTION = "attention_out,attention_lse"
_OFFLOADS = (
    "offload:layer_input,attention_residual,query,key,value",
    "offload:layer_input,gate",
    "offload:layer_input,attention_residual,gate",
    "offload:layer_input,attention_residual,key,value,gate",
    "offload:layer_input,attention_residual,query,key,value,gate",
)
"""In the order of bytes offloaded. All values save about as much recomputation per byte, so their total decides."""
_POLICIES = ("none", "dots", "dots; offload:layer_input", "full", "offload", *_OFFLOADS)
_MIXES = (
    ("dots", "none"),
    *((lean, "dots") for lean in ("full", "offload", *_OFFLOADS)),
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


def candidates(*, keep_attention: bool, tiled: bool) -> Candidates:
    """Return policies, and pairs of a lean and a fast one, spread among the lean so that the link catches up.

    Args:
        keep_attention: attention's output and log-sum-exp are copied faster than they are recomputed.
        tiled: layers compute by tiles.
    """
    if tiled:
        return _TILED_POLICIES, _TILED_MIXES
    if not keep_attention:
        return _POLICIES, _MIXES
    kept = f"offload:layer_input,{ATTENTION}"
    mixes = tuple((_with_attention(lean), _with_attention(fast)) for lean, fast in _MIXES)
    more = ("offload", kept), (kept, _with_attention(_OFFLOADS[0])), (kept, "dots")
    return (kept, *map(_with_attention, _POLICIES)), (*more, *mixes)


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
