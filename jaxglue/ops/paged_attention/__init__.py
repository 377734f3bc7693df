"""Attention of one query for each sequence over a key/value cache in pages, and writes of new tokens to it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import Backend, Capability, Operation, Reads, check_capability, check_triton
from jaxglue.ops.norm_rope import (
    LLAMA_NORM,
    NORM_ROPE,
    HeadNorms,
    NormCall,
    NormStyle,
    norm_and_rotate,
    scale_queries,
    style_of,
)
from jaxglue.ops.paged_attention.latent import LatentPages, make_latent_pages, reference_latent_attention
from jaxglue.ops.paged_attention.pages import KVPages, make_pages
from jaxglue.ops.paged_attention.reference import reference_paged_attention, tiled_paged_attention
from jaxglue.ops.rope import TABLES_READ, RopeConfig, RopeTables, Rotary

if TYPE_CHECKING:
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention, TritonTiledPages

__all__ = [
    "APPEND",
    "APPEND_AND_ATTEND",
    "LATENT_ATTENTION",
    "PAGED_ATTENTION",
    "AppendAndAttendCall",
    "AppendCall",
    "KVPages",
    "LatentCall",
    "LatentPages",
    "PagedCall",
    "append",
    "append_and_attend",
    "append_in_order",
    "latent_attention",
    "make_latent_pages",
    "make_pages",
    "paged_attention",
]

_FP8 = (8, 9)


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedCall:
    """Meaning of attention over a cache."""

    dtype: jnp.dtype
    cache: KVPages
    window: int | None = None
    sinks: bool = False
    """Query heads have learned logits in the softmax's denominator."""
    softcap: float | None = None
    forked: bool = False
    """Sums over keys have one order, that of training's tiles."""
    rows: int = 1
    """Queries of a sequence, of tokens one after the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendCall:
    """Meaning of a write to the cache."""

    dtype: jnp.dtype
    cache: KVPages
    rotary: Rotary | None = None
    style: NormStyle = LLAMA_NORM
    """Of the norms of heads; the default where they have none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendAndAttendCall:
    """Meaning of a write to the cache and of attention over it."""

    append: AppendCall
    attend: PagedCall
    query_shape: tuple[int, ...]
    """[S, N, H] of the queries."""
    pages: int
    """Pages in a sequence's table."""
    scaled: bool = False
    """Rotated queries have factors."""


def _check(capability: Capability | None, call: PagedCall) -> None:
    _check_cache(capability, call.dtype, call.cache)


def _check_cache(capability: Capability | None, dtype: jnp.dtype, cache: KVPages) -> None:
    check_triton(capability, dtype)
    if cache.key_scales is not None:
        check_capability(capability, _FP8)


def _check_append(capability: Capability | None, call: AppendCall) -> None:
    _check_cache(capability, call.dtype, call.cache)
    if call.rotary is not None and not call.rotary.turns_whole_halves:
        raise NotImplementedError("only a part of each head turns, or neighboring dimensions")
    if call.style.centered or call.style.bias:
        raise NotImplementedError("layer norms and biases are XLA's")


def _load(capability: Capability, call: Any) -> "TritonPagedAttention":
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention

    return TritonPagedAttention.of(capability)


_PAGES: Reads = {KVPages: ("keys", "values", "key_scales", "value_scales")}
_ATTEND: Reads = {PagedCall: ("dtype", "cache", "window", "sinks", "softcap"), **_PAGES}
_APPEND: Reads = {
    AppendCall: ("dtype", "cache", "rotary", "style"),
    NormStyle: ("offset", "rounds_first"),
    **_PAGES,
    **TABLES_READ,
}


def _check_tiles(capability: Capability | None, call: PagedCall) -> None:
    _check(capability, call)
    if not call.forked:
        raise NotImplementedError("no order of sums is asked for")
    if call.cache.key_scales is not None:
        raise NotImplementedError("keys are in float8")


def _load_tiles(capability: Capability, call: PagedCall) -> "TritonTiledPages":
    from jaxglue.ops.paged_attention.triton import TritonTiledPages

    return TritonTiledPages.of(capability)


PAGED_ATTENTION = Operation(
    name="paged attention",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="reads visible pages only",
            reads={**_ATTEND, PagedCall: (*(_ATTEND[PagedCall] or ()), "rows")},
        ),
        "tiles": Backend(
            check=_check_tiles,
            load=_load_tiles,
            advantage="sums over keys have the order of training's tiles",
            reads={
                PagedCall: ("dtype", "cache", "window", "sinks", "softcap", "forked"),
                KVPages: ("keys", "values", "key_scales", "value_scales"),
            },
        ),
    },
)
"""Backends of `paged_attention`."""
APPEND = Operation(
    name="write to the cache",
    backends={
        "triton": Backend(
            check=_check_append,
            load=_load,
            advantage="norms, rotation and writes are one pass",
            # Queries are scaled after the kernel, by `scale_queries`.
            reads={**_APPEND, RopeConfig: (*(TABLES_READ[RopeConfig] or ()), "query_scale")},
        )
    },
)
"""Backends of `append`."""


def _check_both(capability: Capability | None, call: AppendAndAttendCall) -> None:
    _check_append(capability, call.append)
    S, _, H = call.query_shape
    if H & (H - 1):
        raise NotImplementedError("a head's size must be a power of two")
    if call.scaled:
        raise NotImplementedError("queries have factors")
    from jaxglue.ops.paged_attention.triton import is_split

    cache = call.attend.cache
    if is_split(S * cache.keys.shape[1], call.pages, cache.page):
        raise NotImplementedError("several programs share the keys of a sequence")


APPEND_AND_ATTEND = Operation(
    name="attention of new tokens",
    backends={
        "triton": Backend(
            check=_check_both,
            load=_load,
            advantage="one launch instead of two",
            reads={AppendAndAttendCall: ("append", "attend", "query_shape", "pages"), **_APPEND, **_ATTEND},
        )
    },
)
"""Backends of `append_and_attend`."""


def append_and_attend(
    q: Float[Array, "S N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    cache: KVPages,
    pages: Int[Array, " S"],
    offsets: Int[Array, " S"],
    rope: RopeTables,
    rotary: Rotary | None,
    norms: HeadNorms | None,
    factor: float,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    **options: Any,
) -> tuple[Float[Array, "S N H"], KVPages]:
    """Write the last token of each sequence as `append`, and attend it as `paged_attention`; return also the cache.

    Errors are those of both.
    """
    options = {"window": None, "sinks": None, "softcap": None} | options
    call = AppendAndAttendCall(
        append=AppendCall(dtype=q.dtype, cache=cache, rotary=rotary, style=style_of(norms)),
        attend=PagedCall(dtype=q.dtype, cache=cache, **options | {"sinks": options["sinks"] is not None}),
        query_shape=q.shape,
        pages=tables.shape[1],
        scaled=factor != 1.0 or (rotary is not None and rope.scales(rotary) is not None),
    )
    if (kernels := APPEND_AND_ATTEND.load(call)) is not None:
        _check_shapes(cache, *q.shape[1:])
        turns = None if rotary is None else rope.of(rotary)
        return kernels.append_and_attend(q, k, v, cache, pages, offsets, turns, norms, tables, positions, **options)
    rotated, _, cache = append(q, k, v, cache, pages, offsets, rope, rotary, norms, factor)
    return paged_attention(rotated, cache, tables, positions, **options), cache


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentCall:
    """Meaning of attention over latents."""

    dtype: jnp.dtype
    cache: LatentPages


def _check_latents(capability: Capability | None, call: LatentCall) -> None:
    check_triton(capability, call.dtype)
    if call.cache.scales is not None:
        raise NotImplementedError("latents in float8 have no kernel")


LATENT_ATTENTION = Operation(
    name="attention over latents",
    backends={
        "triton": Backend(
            check=_check_latents,
            load=_load,
            advantage="reads latents once, in visible pages",
            reads={LatentCall: ("dtype", "cache"), LatentPages: ("tokens",)},
        )
    },
)
"""Backends of `latent_attention`."""


def latent_attention(
    q: Float[Array, "S N W"],
    cache: LatentPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    rank: int,
    scale: float,
    backend: str = "auto",
) -> Float[Array, "S N rank"]:
    """Compute the weighted latents of each sequence's last token over its cache.

    Args:
        q: rotated parts of queries, then their others projected to the latents' space.
        cache: of all sequences.
        tables: each sequence's pages in order, as in `paged_attention`.
        positions: of the queries; they see the tokens up to and including their own.
        rank: width of a latent, a token's last values.
        scale: of the scores.
        backend: one of `LATENT_ATTENTION.names`.
    """
    kernels = LATENT_ATTENTION.load(LatentCall(dtype=q.dtype, cache=cache), backend=backend)
    attend = reference_latent_attention if kernels is None else kernels.attend_latents
    return attend(q, cache, tables, positions, rank=rank, scale=scale)


def paged_attention(
    q: Float[Array, "M N H"],
    cache: KVPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    forks: Int[Array, " S"] | None = None,
    rows: int = 1,
    backend: str = "auto",
) -> Float[Array, "M N H"]:
    """Compute attention of each sequence's last token over its cache, or of its last few, with scores over √H.

    Args:
        q: rotated queries at `positions`; N query heads share K key/value heads.
        cache: rotated keys, and values, of all sequences.
        tables: each sequence's pages in order; the token at position p is in page p // page, at p % page.
        positions: of the queries; they see the keys up to and including their own.
        window: tokens visible to a query, itself included; None for all.
        sinks: one learned logit per query head in the softmax's denominator (GPT-OSS).
        softcap: c of scores c·tanh(score / c) (Gemma 2); None for none.
        forks: tokens of each sequence's beginning. Sums over keys then have the order of training, whose rows hold
            beginnings once: in tiles of `key_tile` keys from the first token, and again from the one at the fork, so
            that a query has the bits of `packed_attention` with `exact`.
        rows: queries of each sequence, M / S, side by side: the first is at its position, the next one behind it, ….
        backend: one of `PAGED_ATTENTION.names`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    (M, N, H), S = q.shape, len(q) // rows
    _check_shapes(cache, N, H)
    if tables.shape[:1] != (S,) or positions.shape != (S,) or M % rows:
        raise ValueError(f"tables and positions must be for {S} sequences, got {tables.shape} and {positions.shape}")
    call = PagedCall(dtype=q.dtype, cache=cache, window=window, sinks=sinks is not None, softcap=softcap)
    call = replace(call, forked=forks is not None, rows=rows)
    kernels: Any = PAGED_ATTENTION.load(call, backend=backend)
    if rows > 1:
        if kernels is not None:
            own = {"window": window, "sinks": sinks, "softcap": softcap, "rows": rows}
            return kernels.attend(q, cache, tables, positions, **own)
        last = tables.shape[1] * cache.page - 1
        positions = jnp.minimum(positions[:, None] + jnp.arange(rows), last).reshape(M)
        tables = jnp.repeat(tables, rows, axis=0)
        return paged_attention(
            q, cache, tables, positions, window=window, sinks=sinks, softcap=softcap, forks=forks, backend=backend
        )
    if forks is not None:
        in_tiles = tiled_paged_attention if kernels is None else kernels.attend
        return in_tiles(q, cache, tables, positions, forks, window=window, sinks=sinks, softcap=softcap)
    attend = reference_paged_attention if kernels is None else kernels.attend
    return attend(q, cache, tables, positions, window=window, sinks=sinks, softcap=softcap)


def append(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: KVPages,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    rope: RopeTables,
    rotary: Rotary | None,
    norms: HeadNorms | None = None,
    factor: float = 1.0,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], KVPages]:
    """Norm and rotate queries and keys as `norm_and_rotate`, and write keys and values to the cache.

    Args:
        q, k, v: projections of T tokens, in one dtype.
        cache: donate it, or it is copied.
        pages, offsets: each token's place in the cache; tokens of page 0 may share one.
        rope: tables of the T tokens, in one row.
        rotary: the rotary embedding; None for none.
        norms: of queries and keys; None for none.
        factor: of rotated queries.
        backend: one of `APPEND.names`.

    Returns:
        rotated queries and keys, and the cache.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    T, N, H = q.shape
    _check_shapes(cache, N, H)
    if k.shape != (T, cache.keys.shape[1], H) or v.shape != k.shape:
        raise ValueError(f"k and v must be [{T}, {cache.keys.shape[1]}, {H}], got {k.shape} and {v.shape}")
    call = AppendCall(dtype=q.dtype, cache=cache, rotary=rotary, style=style_of(norms))
    if (kernels := APPEND.load(call, backend=backend)) is None:
        rotated, keys = norm_and_rotate(q[None], k[None], rope, rotary, norms=norms, factor=factor)
        if (kernels := APPEND.load(AppendCall(dtype=q.dtype, cache=cache), backend=backend)) is None:
            return rotated[0], keys[0], cache.write(keys[0], v, pages, offsets)
        *_, cache = kernels.append(keys[0], keys[0], v, cache, pages, offsets, None, None)
        return rotated[0], keys[0], cache
    turns = None if rotary is None else rope.of(rotary)
    q, k, cache = kernels.append(q, k, v, cache, pages, offsets, turns, norms)
    return scale_queries(q[None], rope, rotary, factor)[0], k, cache


def append_in_order(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: KVPages,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    rope: RopeTables,
    rotary: Rotary | None,
    norms: HeadNorms | None,
    factor: float,
) -> tuple[Float[Array, "T N H"], KVPages]:
    """Return queries after `norm_and_rotate`, to the bit, and the cache with such keys, and values.

    Arguments are as of `append`.
    """
    _check_shapes(cache, *q.shape[1:])
    if rotary is not None and cache.key_scales is None:
        call = NormCall(dtype=q.dtype, style=style_of(norms), interleaved=rotary.config.interleaved)
        kernels: Any = PAGED_ATTENTION.load(PagedCall(dtype=q.dtype, cache=cache, forked=True))
        if kernels is not None and NORM_ROPE.load(call) is not None:
            rotated, cache = kernels.append(q, k, v, cache, pages, offsets, rope.of(rotary), norms)
            return scale_queries(rotated[None], rope, rotary, factor)[0], cache
    rotated, keys = norm_and_rotate(q[None], k[None], rope, rotary, norms=norms, factor=factor)
    rotated, _, cache = append(rotated[0], keys[0], v, cache, pages, offsets, rope, None)
    return rotated, cache


def _check_shapes(cache: KVPages, N: int, H: int) -> None:
    keys = cache.keys.shape
    if keys != cache.values.shape or keys[3] != H or N % keys[1]:
        raise ValueError(f"pages must be [pages, K, page, {H}] to fit q, got {keys} and {cache.values.shape}")
    if (cache.key_scales is None) != (cache.keys.dtype.itemsize > 1):
        raise ValueError(f"pages of {cache.keys.dtype} have scales where they are float8, and else none")
