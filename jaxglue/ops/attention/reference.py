"""Attention over a dense mask in float32, the definition; memory grows with T². And in tiles of keys, in one order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.segments import PackedSegments, aligned

_LOWEST = -(2.0**60)
_LOG2_E = 1.4426950408889634


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K values"],
    segments: PackedSegments,
    *,
    window: int | None,
    sinks: Float[Array, " N"] | None,
    softcap: float | None = None,
) -> Float[Array, "B T N values"]:
    """Compute causal attention inside each segment, softmax in float32; padding gives zeros.

    Queries are the S tokens of a row, or some of them (`PackedSegments.own_keys`).
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    q_index = jnp.arange(T)[:, None] if segments.own_keys is None else segments.own_keys[:, :, None]
    k_index = jnp.arange(S)[None, :]
    visible = (k_index <= q_index) & (k_index >= segments.starts[:, :, None])
    if segments.gap_starts is not None and segments.gap_ends is not None:
        visible &= (k_index < segments.gap_starts[:, :, None]) | (k_index >= segments.gap_ends[:, :, None])
        if window is not None:
            visible &= segments.positions[:, None, :] > segments.positions[:, :, None] - window
    elif window is not None:
        visible &= k_index > q_index - window
    visible = visible[:, None, None]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    sink = jnp.full((N,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    sink = sink.reshape(1, K, N // K, 1, 1)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak)
    weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(B, T, N, -1).astype(q.dtype)


class TileSums(NamedTuple):
    """Sums of R queries over the tiles of keys so far."""

    values: Float[Array, "*B R values"]
    """Weighted values."""
    total: Float[Array, "*B R"]
    """Sum of the weights."""
    peak: Float[Array, "*B R"]
    """Exponent to which weights are relative, a whole one."""

    @classmethod
    def begin(cls, shape: tuple[int, ...], values: int, sinks: Float[Array, "*B R"] | None) -> "TileSums":
        """Return the sums of no keys, or of sinks, for queries of this shape."""
        peak, total = jnp.full(shape, _LOWEST), jnp.zeros(shape)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32) * _LOG2_E, shape)
            peak = jnp.ceil(sink)
            total = jnp.exp2(sink - peak)
        return cls(jnp.zeros((*shape, values)), total, peak)

    def add(
        self,
        q: Float[Array, "*B R H"],
        k: Float[Array, "*B A H"],
        v: Float[Array, "*B A values"],
        visible: Bool[Array, "*B R A"],
        softcap: float | None,
    ) -> "TileSums":
        """Return the sums after a tile of A keys, of which queries see some.

        Rescaling by powers of two is exact, so a tile that a query does not see changes no bit of its sums.
        """
        scores = _product(q, k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores * _LOG2_E, _LOWEST)
        peak = jax.lax.stop_gradient(jnp.maximum(self.peak, jnp.ceil(jnp.max(scores, -1))))
        weights = jnp.where(visible, jnp.exp2(scores - peak[..., None]), 0.0)
        exponents = jnp.maximum(self.peak - peak, -200.0).astype(jnp.int32)
        rescale = jax.lax.stop_gradient(jnp.ldexp(jnp.ones_like(peak), exponents))
        values = self.values * rescale[..., None] + _product(weights.astype(v.dtype), v)
        # XLA's fusions sum weights in orders of their own, but a product's columns in one.
        ones = jnp.ones((*v.shape[:-1], 2), weights.dtype)
        return TileSums(values, self.total * rescale + _product(weights, ones)[..., 0], peak)

    @property
    def result(self) -> Float[Array, "*B R values"]:
        """Return the attended values; zeros for queries that saw no key."""
        seen = (self.total > 0)[..., None]
        return jnp.where(seen, self.values / jnp.where(seen, self.total[..., None], 1.0), 0.0)


_COLUMNS, _FEW_COLUMNS = 64, 16
"""Columns of XLA's blocks on a CPU, and the most that are multiplied otherwise."""


def _product(x: Float[Array, "*B R A"], y: Float[Array, "*B A n"]) -> Float[Array, "*B R n"]:
    """Multiply in float32 a batch of matrices as they lie: else XLA sums few rows otherwise than many.

    So it does where columns leave a part of its blocks empty, unless they are few.
    """
    shape, n = x.shape[:-1], y.shape[-1]
    x, y = (part.astype(jnp.float32).reshape(-1, *part.shape[-2:]) for part in (x, y))
    y = y if n <= _FEW_COLUMNS else jnp.pad(y, ((0, 0), (0, 0), (0, -n % _COLUMNS)))
    return jnp.matmul(*jax.lax.optimization_barrier((x, y)))[..., :n].reshape(*shape, n)


def tiled_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K values"],
    segments: PackedSegments,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None,
    softcap: float | None = None,
) -> Float[Array, "B T N values"]:
    """Compute `reference_attention` in tiles of `key_tile` keys, one after another, over the row.

    A query's sums have the bits of `paged_attention` with `forks` where all parts of segments begin at tiles.
    """
    assert segments.own_keys is None
    (B, T, N, H), K, A = q.shape, k.shape[2], key_tile(q.shape[3])
    S, G = aligned(T, A), N // k.shape[2]
    rows = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    keys, values = (
        jnp.pad(x, ((0, 0), (0, S - T), (0, 0), (0, 0))).reshape(B, S // A, A, K, -1).transpose(1, 0, 3, 2, 4)
        for x in (k, v)
    )
    bounds = [segments.starts, segments.gap_starts, segments.gap_ends]
    starts, gap_starts, gap_ends = (None if bound is None else bound[:, :, None] for bound in bounds)
    query = jnp.arange(T)[None, :, None]
    positions = jnp.pad(segments.positions, ((0, 0), (0, S - T)))

    def step(sums: TileSums, inputs):
        first, k_tile, v_tile = inputs
        key = first + jnp.arange(A)[None, None, :]
        visible = (key <= query) & (key >= starts)
        if gap_starts is not None and gap_ends is not None:
            visible &= (key < gap_starts) | (key >= gap_ends)
        if window is not None:
            at = jax.lax.dynamic_slice_in_dim(positions, first, A, axis=1)
            visible &= at[:, None, :] > segments.positions[:, :, None] - window
        visible = jnp.repeat(visible, G, axis=1)[:, None]
        return sums.add(rows, k_tile, v_tile, jnp.broadcast_to(visible, (B, K, T * G, A)), softcap), None

    of_heads = None if sinks is None else jnp.tile(sinks.reshape(1, K, 1, G), (1, 1, T, 1)).reshape(1, K, T * G)
    begun = TileSums.begin((B, K, T * G), v.shape[3], of_heads)
    sums, _ = jax.lax.scan(jax.checkpoint(step), begun, (jnp.arange(0, S, A), keys, values))
    out = sums.result.reshape(B, K, T, G, -1).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, T, N, -1).astype(q.dtype)
