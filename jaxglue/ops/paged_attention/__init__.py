"""Attention of one query for each sequence over a key/value cache in pages, and writes of new tokens to it."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import Backend, Capability, Operation, check_capability, check_triton
from jaxglue.ops.norm_rope import HeadNorms, norm_and_rotate, scale_queries
from jaxglue.ops.paged_attention.latent import LatentPages, make_latent_pages, reference_latent_attention
from jaxglue.ops.paged_attention.pages import KVPages, make_pages
from jaxglue.ops.paged_attention.reference import reference_paged_attention
from jaxglue.ops.rope import RopeTables, Rotary

__all__ = [
    "APPEND",
    "APPEND_AND_ATTEND",
    "LATENT_ATTENTION",
    "PAGED_ATTENTION",
    "KVPages",
    "LatentPages",
    "append",
    "append_and_attend",
    "latent_attention",
    "make_latent_pages",
    "make_pages",
    "paged_attention",
]

_FP8 = (8, 9)


def _check(capability: Capability | None, dtype, cache: KVPages) -> None:
    check_triton(capability, dtype)
    if cache.key_scales is not None:
        check_capability(capability, _FP8)


def _check_append(capability: Capability | None, dtype, cache: KVPages, rotary: Rotary | None) -> None:
    _check(capability, dtype, cache)
    if rotary is not None and not rotary.turns_whole_halves:
        raise NotImplementedError("only a part of each head turns, or neighboring dimensions")


def _load(capability: Capability, *call: Any):
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention

    return TritonPagedAttention.of(capability)


PAGED_ATTENTION = Operation(
    name="paged attention",
    backends={"triton": Backend(check=_check, load=_load, advantage="reads visible pages only")},
)
"""Backends of `paged_attention`; a call is described by the dtype of queries and the cache."""
APPEND = Operation(
    name="write to the cache",
    backends={"triton": Backend(check=_check_append, load=_load, advantage="norms, rotation and writes are one pass")},
)
"""Backends of `append`; a call is described by the dtype of queries, the cache and rotation."""


def _check_both(
    capability: Capability | None, q, cache: KVPages, tables, rope: RopeTables, rotary: Rotary | None, factor: float
) -> None:
    _check_append(capability, q.dtype, cache, rotary)
    S, _, H = q.shape
    if H & (H - 1):
        raise NotImplementedError("a head's size must be a power of two")
    if (whole := q[None]) is not scale_queries(whole, rope, rotary, factor):
        raise NotImplementedError("queries have factors")
    from jaxglue.ops.paged_attention.triton import is_split

    if is_split(S * cache.keys.shape[1], tables.shape[1], cache.page):
        raise NotImplementedError("several programs share the keys of a sequence")


def _load_both(capability: Capability, *call: Any):
    return _load(capability)


APPEND_AND_ATTEND = Operation(
    name="attention of new tokens",
    backends={"triton": Backend(check=_check_both, load=_load_both, advantage="one launch instead of two")},
)
"""Backends of `append_and_attend`; a call is described by queries, cache, tables, rotation and queries' factor."""


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
    if (kernels := APPEND_AND_ATTEND.load(q, cache, tables, rope, rotary, factor)) is not None:
        _check_shapes(cache, *q.shape[1:])
        options = {"window": None, "sinks": None, "softcap": None} | options
        turns = None if rotary is None else rope.of(rotary)
        return kernels.append_and_attend(q, k, v, cache, pages, offsets, turns, norms, tables, positions, **options)
    rotated, _, cache = append(q, k, v, cache, pages, offsets, rope, rotary, norms, factor)
    return paged_attention(rotated, cache, tables, positions, **options), cache


def _check_latents(capability: Capability | None, dtype, cache: LatentPages) -> None:
    check_triton(capability, dtype)
    if cache.scales is not None:
        raise NotImplementedError("latents in float8 have no kernel")


LATENT_ATTENTION = Operation(
    name="attention over latents",
    backends={"triton": Backend(check=_check_latents, load=_load, advantage="reads latents once, in visible pages")},
)
"""Backends of `latent_attention`; a call is described by the dtype of queries and the cache."""


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
    options: dict[str, Any] = {"rank": rank, "scale": scale}
    if (kernels := LATENT_ATTENTION.load(q.dtype, cache, backend=backend)) is not None:
        return kernels.attend_latents(q, cache, tables, positions, **options)
    return reference_latent_attention(q, cache, tables, positions, **options)


def paged_attention(
    q: Float[Array, "S N H"],
    cache: KVPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Float[Array, "S N H"]:
    """Compute attention of each sequence's last token over its cache, with scores over √H.

    Args:
        q: rotated queries at `positions`; N query heads share K key/value heads.
        cache: rotated keys, and values, of all sequences.
        tables: each sequence's pages in order; the token at position p is in page p // page, at p % page.
        positions: of the queries; they see the keys up to and including their own.
        window: tokens visible to a query, itself included; None for all.
        sinks: one learned logit per query head in the softmax's denominator (GPT-OSS).
        softcap: c of scores c·tanh(score / c) (Gemma 2); None for none.
        backend: one of `PAGED_ATTENTION.names`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    S, N, H = q.shape
    _check_shapes(cache, N, H)
    if tables.shape[:1] != (S,) or positions.shape != (S,):
        raise ValueError(f"tables and positions must be for {S} sequences, got {tables.shape} and {positions.shape}")
    options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap}
    if (kernels := PAGED_ATTENTION.load(q.dtype, cache, backend=backend)) is not None:
        return kernels.attend(q, cache, tables, positions, **options)
    return reference_paged_attention(q, cache, tables, positions, **options)


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
    if (kernels := APPEND.load(q.dtype, cache, rotary, backend=backend)) is None:
        rotated, keys = norm_and_rotate(q[None], k[None], rope, rotary, norms=norms, factor=factor)
        return rotated[0], keys[0], cache.write(keys[0], v, pages, offsets)
    turns = None if rotary is None else rope.of(rotary)
    q, k, cache = kernels.append(q, k, v, cache, pages, offsets, turns, norms)
    return scale_queries(q[None], rope, rotary, factor)[0], k, cache


def _check_shapes(cache: KVPages, N: int, H: int) -> None:
    keys = cache.keys.shape
    if keys != cache.values.shape or keys[3] != H or N % keys[1]:
        raise ValueError(f"pages must be [pages, K, page, {H}] to fit q, got {keys} and {cache.values.shape}")
    if (cache.key_scales is None) != (cache.keys.dtype.itemsize > 1):
        raise ValueError(f"pages of {cache.keys.dtype} have scales where they are float8, and else none")
