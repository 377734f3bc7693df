"""Rows whose tokens are split over the devices along `context`: shares of equal size and work, and keys of whole rows.

A document of many tokens is cut into 2N chunks, of which device i has the i-th from each end: later queries see more
keys, so that each device's see as many. Shorter documents stay whole on one device where its share has room.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxglue.ops.collectives import reduce_scatter
from jaxglue.ops.segments import PackedSegments, RowSplit

CONTEXT = "context"
"""Mesh axis that splits the tokens of a row."""
_LEAST_CHUNK = 128
"""Tokens of a chunk from which tiles of queries are mostly full."""


def split_segments(segments: PackedSegments, devices: int) -> PackedSegments:
    """Return the metadata, in numpy, of rows split over so many devices; fields of tokens are in the devices' order.

    Raises:
        ValueError: the devices do not divide a row.
    """
    assert segments.copies is None
    B, T = np.asarray(segments.starts).shape
    if T % devices:
        raise ValueError(f"rows of {T} tokens do not divide among {devices} devices: use a multiple of {devices}")
    lengths = np.diff(np.asarray(segments.cu_seqlens), axis=1)
    owners = np.stack([_owners(row[row > 0], T, devices) for row in lengths])
    order = np.argsort(owners, axis=1, kind="stable").astype(np.int32)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(T, dtype=np.int32)[None], axis=1)
    before = np.zeros((B, devices, T + 1), np.int32)
    np.cumsum(owners[:, None] == np.arange(devices)[:, None], axis=2, out=before[:, :, 1:])
    stops: Any = np.asarray(segments.ends)
    positions: Any = None if segments.gap_starts is None else np.asarray(segments.positions)
    arrays: dict[str, Any] = {"positions": positions, "rows": order, "order": order, "places": places, "before": before}
    names = "segment_ids", "positions", "starts", "ends", "gap_starts", "gap_ends"
    fields = {name: split_tokens(getattr(segments, name), order) for name in names}
    return replace(segments, **fields, units=None, split=RowSplit(stops=stops, **arrays))


def split_tokens(values: Any, order: Int[np.ndarray, "B T"]) -> Any:
    """Return values of tokens [B, T, …] in the devices' order; None for None."""
    if values is None:
        return None
    values = np.asarray(values)
    return np.take_along_axis(values, order.reshape(*order.shape, *[1] * (values.ndim - 2)), axis=1)


@jax.jit
def in_rows(values: Float[Array, "B T"], split: RowSplit) -> Float[Array, "B T"]:
    """Return values of tokens in the devices' order, of all devices, in the order of their rows."""
    return jnp.take_along_axis(values, split.places, axis=1)


def _owners(lengths: Int[np.ndarray, " documents"], T: int, devices: int) -> Int[np.ndarray, " T"]:
    """Return the device of each token of a row, of which each has as many."""
    owners = np.empty(T, np.int16)
    ends = np.cumsum(lengths)
    room = np.full(devices, T // devices)
    for document in np.argsort(-lengths, kind="stable"):
        length, end = int(lengths[document]), int(ends[document])
        roomiest = np.argsort(-room, kind="stable")
        if length >= 2 * devices * _LEAST_CHUNK:
            sizes = np.full(devices, length // devices)
            sizes[roomiest[: length % devices]] += 1
            first = -(-sizes // 2)
            chunks = np.concatenate([first, (sizes - first)[::-1]])
            owners[end - length : end] = np.repeat(np.r_[:devices, devices - 1 : -1 : -1], chunks)
        else:
            sizes = _fill(room, roomiest, length)
            owners[end - length : end] = np.repeat(roomiest, sizes[roomiest])
        room -= sizes
    owners[len(owners) - room.sum() :] = np.repeat(np.arange(devices), room)
    return owners


def _fill(room: np.ndarray, devices: np.ndarray, tokens: int) -> np.ndarray:
    """Return the tokens of each device where the first ones take as many as they have room for."""
    taken, sizes = np.cumsum(room[devices]), np.zeros_like(room)
    sizes[devices] = np.diff(np.minimum(taken, tokens), prepend=0)
    return sizes


def bounds(segments: PackedSegments, window: int | None) -> PackedSegments:
    """Return the keys of whole rows that this device's queries see, and the queries that see each key. Per device."""
    split = segments.split
    assert split is not None
    starts, stops, before = segments.starts, split.stops, split.before[:, 0]
    if window is not None:
        first = split.rows - window + 1
        if segments.gap_starts is not None and segments.gap_ends is not None:  # skipped keys do not count
            gap = segments.gap_ends - segments.gap_starts
            first = jnp.where((gap > 0) & (first < segments.gap_ends), first - gap, first)
        starts = jnp.maximum(starts, first)
    if window is not None and segments.gap_starts is None:
        stops = jnp.minimum(stops, jnp.arange(stops.shape[1], dtype=jnp.int32) + window)
    ends = jnp.take_along_axis(before, stops, axis=1)
    # A tile of queries passes all keys up to its last one's own; padding's would be far behind.
    own_keys, first_queries = split.rows, before[:, :-1]
    if segments.own_keys is not None and segments.first_queries is not None:  # inside of images
        own_keys = segments.own_keys
        first_queries = jnp.take_along_axis(before, segments.first_queries, axis=1)
    last = jnp.where(segments.segment_ids > 0, own_keys, 0).max(axis=1, keepdims=True)
    changes: dict[str, Any] = {"own_keys": jnp.minimum(own_keys, last), "first_queries": first_queries}
    changes["key_positions"] = split.positions
    return replace(segments, starts=starts, ends=ends, split=None, **changes)


@jax.custom_vjp
def whole_rows(x: Float[Array, "B T/N K H"], split: RowSplit) -> Float[Array, "B T K H"]:
    """Return the keys or values of whole rows, from all devices along `context`; their gradients return. Per device."""
    gathered = jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)
    return _take(gathered, split.places)


def own_tokens(dx: Float[Array, "B T K H"], split: RowSplit) -> Float[Array, "B T/N K H"]:
    """Return the sum of all devices' gradients to this device's keys or values. Per device."""
    return reduce_scatter(_take(dx, split.order), CONTEXT, 1).astype(dx.dtype)


def _take(x: Float[Array, "B T K H"], tokens: Int[Array, "B T"]) -> Float[Array, "B T K H"]:
    return jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds", unique_indices=True))(x, tokens)


whole_rows.defvjp(lambda x, split: (whole_rows(x, split), split), lambda split, dx: (own_tokens(dx, split), None))


@jax.custom_vjp
def to_heads(x: Float[Array, "B T/N C"], split: RowSplit) -> Float[Array, "B T C/N"]:
    """Return whole rows of this device's part of the channels, from all devices along `context`. Per device."""
    return _take(jax.lax.all_to_all(x, CONTEXT, 2, 1, tiled=True), split.places)


@jax.custom_vjp
def to_tokens(x: Float[Array, "B T C/N"], split: RowSplit) -> Float[Array, "B T/N C"]:
    """Return all channels of this device's tokens: the inverse of `to_heads`, and its gradient. Per device."""
    return jax.lax.all_to_all(_take(x, split.order), CONTEXT, 1, 2, tiled=True)


to_heads.defvjp(lambda x, split: (to_heads(x, split), split), lambda split, dx: (to_tokens(dx, split), None))
to_tokens.defvjp(lambda x, split: (to_tokens(x, split), split), lambda split, dx: (to_heads(dx, split), None))


def whole_segments(segments: PackedSegments) -> PackedSegments:
    """Return the metadata of whole rows on every device. Per device."""
    split = segments.split
    assert split is not None and segments.gap_starts is None
    fields: dict[str, Any] = {
        name: whole_rows(getattr(segments, name), split) for name in ("segment_ids", "positions", "starts")
    }
    return replace(segments, **fields, ends=split.stops, split=None)


@dataclass(frozen=True)
class SplitAttention:
    """`AttentionBackend` of this device's queries, over gathered keys and values; only its own are kept for gradients.

    Args:
        backend: of the kernels, to which `bounds` are given.
    """

    backend: Any

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None):
        """Return (out, lse)."""
        keys, values = (whole_rows(x, segments.split) for x in (k, v))
        arrays = q, keys, values, sinks, bounds(segments, window)
        return self.backend.forward(*arrays, window=_by_positions(segments, window), softcap=softcap)

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap=None):
        """Return (dq, dk, dv, dsinks)."""
        keys, values = (whole_rows(x, segments.split) for x in (k, v))
        arrays = q, keys, values, sinks, bounds(segments, window), out, lse, dout
        window = _by_positions(segments, window)
        dq, dk, dv, dsinks = self.backend.backward(*arrays, window=window, softcap=softcap)
        return dq, *(own_tokens(dx, segments.split) for dx in (dk, dv)), dsinks


def _by_positions(segments: PackedSegments, window: int | None) -> int | None:
    """Return the window of forked segments, by which kernels mask positions; of others the bounds have it."""
    return None if segments.gap_starts is None else window
