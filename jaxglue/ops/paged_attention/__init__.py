"""Attention of one query for each sequence over a key/value cache in pages."""

from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton
from jaxglue.ops.paged_attention.reference import reference_paged_attention

__all__ = ["PAGED_ATTENTION", "paged_attention"]


def _check(capability: Capability | None, dtype, softcap: float | None = None) -> None:
    check_triton(capability, dtype)
    if softcap is not None:
        raise NotImplementedError("scores are capped")


def _load(capability: Capability, *call):
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention

    return TritonPagedAttention.of(capability)


PAGED_ATTENTION = Operation(
    name="paged attention",
    backends={"triton": Backend(check=_check, load=_load, advantage="reads visible pages only")},
)
"""Backends of `paged_attention`; a call is described by the dtype and the cap of scores."""


def paged_attention(
    q: Float[Array, "S N H"],
    keys: Float[Array, "pages K page H"],
    values: Float[Array, "pages K page H"],
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
        keys, values: rotated keys, and values, of all sequences in pages.
        tables: each sequence's pages in order; the token at position p is in page p // page, at p % page.
        positions: of the queries; they see the keys up to and including their own.
        window: tokens visible to a query, itself included; None for all.
        sinks: one learned logit per query head in the softmax's denominator (GPT-OSS).
        softcap: c of scores c·tanh(score / c) (Gemma 2); None for none.
        backend: one of `PAGED_ATTENTION.names`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    (S, N, H), K = q.shape, keys.shape[1]
    if keys.shape != values.shape or keys.shape[3] != H or N % K:
        raise ValueError(f"keys and values must be [pages, K, page, {H}] to fit q, got {keys.shape} and {values.shape}")
    if tables.shape[:1] != (S,) or positions.shape != (S,):
        raise ValueError(f"tables and positions must be for {S} sequences, got {tables.shape} and {positions.shape}")
    if (kernels := PAGED_ATTENTION.load(q.dtype, softcap, backend=backend)) is not None:
        return kernels(q, keys, values, tables, positions, window=window, sinks=sinks)
    return reference_paged_attention(q, keys, values, tables, positions, window=window, sinks=sinks, softcap=softcap)
