"""Remat policies that the planner compares, and the tiles of long rows."""

from itertools import pairwise

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
