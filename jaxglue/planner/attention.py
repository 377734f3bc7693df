"""Time and workspace of attention's kernels as a function of documents' lengths."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxglue.models.config import DecoderConfig
from jaxglue.ops.attention import ATTENTION, AttentionCall
from jaxglue.ops.attention.tiles import heads_summed_at_once, tile_columns
from jaxglue.ops.kernel_cost import KernelKind
from jaxglue.ops.segments import BatchKind
from jaxglue.planner import calibration as fitted
from jaxglue.planner.cost import AttentionCost
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.workload import MicroBatches, Workload

_DQ = 3 / 7
"""Share of the gradient to queries in the backward pass's matmuls."""
_SAMPLE = 8
"""Micro-batches whose programs are placed one by one."""
_WORKSPACE_SHARE = 0.12
"""Share of the GPU's memory that the workspace may take."""


def attention_costs(workload: Workload, gpu: Gpu, window: int | None) -> dict[KernelKind, AttentionCost]:
    """Return the costs of a layer's attention, mean over the micro-batches, by the kind of its kernels."""
    forward = backward = 0.0
    workspace, in_place = 0, True
    for batches in workload.micro_batches:
        backend = attention_backend(workload, gpu, batches.kind, window)
        reserved = _workspace(workload, backend, batches.kind)
        passes = _passes(workload, gpu, batches, window, backend)
        forward += batches.share * passes[0]
        backward += batches.share * passes[1]
        if backend == "cudnn":
            backward += batches.share * reserved / gpu.copy  # written before it is used
        workspace = max(workspace, reserved)
        in_place = in_place and _sums_queries(workload, backend)
        in_place = in_place and _heads_at_once(workload) < workload.config.num_key_value_heads
    if (parts := workload.mesh.context) > 1:
        rows = _row_bytes(workload)
        # Each pass gathers keys and values and puts them in the row's order; the backward pass returns their gradients.
        exchange = (1 - 1 / parts) * rows / gpu.peers + 2 * rows / gpu.copy
        return {
            KernelKind.ATTENTION_FORWARD: AttentionCost(seconds=forward / parts + exchange, workspace=rows),
            KernelKind.ATTENTION_BACKWARD: AttentionCost(
                seconds=backward / parts + 2 * exchange, workspace=workspace + 2 * rows, in_place=in_place
            ),
        }
    return {
        KernelKind.ATTENTION_FORWARD: AttentionCost(seconds=forward),
        KernelKind.ATTENTION_BACKWARD: AttentionCost(seconds=backward, workspace=workspace, in_place=in_place),
    }


def _row_bytes(workload: Workload) -> int:
    """Return the bytes of the keys and values of whole rows."""
    config = workload.config
    of_token = 2 * config.num_key_value_heads * config.head_dim * jnp.dtype(workload.dtype).itemsize
    return workload.batch_size * workload.seq_len * of_token


def layer_attention_costs(workload: Workload, gpu: Gpu, index: int) -> dict[KernelKind, AttentionCost]:
    """Return the costs of attention in the layer of this index, whose heads may have sizes of their own."""
    config = workload.config
    shape = config.shapes[index]
    if (shape.head_dim, shape.kv_heads) != (config.head_dim, config.num_key_value_heads):
        own = replace(config, head_dim=shape.head_dim, num_key_value_heads=shape.kv_heads)
        workload = replace(workload, config=own)
    return attention_costs(workload, gpu, config.layer_windows[index])


def _passes(
    workload: Workload, gpu: Gpu, batches: MicroBatches, window: int | None, backend: str
) -> tuple[float, float]:
    """Return the seconds of both passes over a micro-batch."""
    config = workload.config
    if backend == "hopper":
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.value_dim)
        some = batches.documents[:: -(-batches.batches // _SAMPLE)]
        times = [hopper_seconds(each, heads, window, matmul=gpu.matmul, copy=gpu.copy) for each in some]
        pairs = visible_pairs(batches.lengths, window) / visible_pairs(itertools.chain(*some), window)
        forward, backward = (pairs * sum(each) / batches.batches for each in zip(*times, strict=True))
        if _sums_queries(workload, backend):
            return forward, backward
        return forward, _passes(workload, gpu, batches, window, "triton")[1]
    rates = _rates(workload, backend, batches.kind)
    longest = _longest_programs(workload, batches, window) if backend == "triton" else (0.0, 0.0)
    forward = max(_seconds(workload, gpu, batches, window, rates.forward), longest[0])
    both = _backward_share(config) * _seconds(workload, gpu, batches, window, rates.backward)
    return forward, sum(map(max, (_DQ * both, (1 - _DQ) * both), longest))


def _sums_queries(workload: Workload, backend: str) -> bool:
    """Return whether a backward pass sums the gradients of queries in memory: Hopper's own one does."""
    config = workload.config
    return backend == "hopper" and config.value_dim <= 128 and config.attention.softcap is None


def with_fitting_attention(workload: Workload, gpu: Gpu) -> Workload:
    """Return the workload with Triton kernels in place of `auto` where others' workspace would take too much memory."""
    if workload.attention != "auto" or _fits(workload, gpu):
        return workload
    return replace(workload, attention="triton")


def _fits(workload: Workload, gpu: Gpu) -> bool:
    """Return whether the largest workspace of attention takes a small part of the GPU's memory."""
    needed = (
        _workspace(workload, attention_backend(workload, gpu, batches.kind, window), batches.kind)
        for batches, window in _attention_calls(workload)
    )
    return max(needed) <= _WORKSPACE_SHARE * gpu.memory


def _attention_calls(workload: Workload) -> Iterator[tuple[MicroBatches, int | None]]:
    """Return the kinds of micro-batches, each with every window of a layer."""
    return itertools.product(workload.micro_batches, set(workload.config.layer_windows))


def attention_shape(
    model: DecoderConfig,
    dtype,
    seq_len: int,
    kind: BatchKind,
    *,
    window: int | None,
    forked: bool,
    split: bool = False,
) -> AttentionCall:
    """Return a layer's call of attention on rows of one kind.

    Args:
        model: the architecture.
        dtype, seq_len: of the rows.
        kind: of the rows.
        window: of the layer.
        forked: segments have several continuations of one beginning.
        split: rows are split over GPUs.
    """
    return AttentionCall(
        dtype=jnp.dtype(dtype),
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        query_heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        softcap=model.attention.softcap,
        seq_len=seq_len,
        segment_slots=kind.slots,
        long=kind.long,
        forked=forked,
        window=window,
        split=split,
    )


def attention_backend(workload: Workload, gpu: Gpu, kind: BatchKind, window: int | None) -> str:
    """Return the kernels of a layer; triton where auto has no kernels here."""
    if workload.attention != "auto":
        return workload.attention
    forked = workload.objective.forks
    shape = attention_shape(
        workload.config,
        workload.dtype,
        workload.seq_len,
        kind,
        window=window,
        forked=forked,
        split=workload.mesh.context > 1,
    )
    name = ATTENTION.choose(gpu.capability, shape).name
    return name if name in ("cudnn", "hopper") else "triton"


def visible_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Count the visible pairs of query and key in documents of these lengths."""
    tokens = np.asarray(tuple(lengths), np.int64)
    ramp = tokens if window is None else np.minimum(tokens, window)
    return int((ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp).sum())


def _seconds(
    workload: Workload, gpu: Gpu, batches: MicroBatches, window: int | None, rate: fitted.AttentionRate
) -> float:
    """Return the seconds of a forward pass at a rate."""
    config = workload.config
    pairs = visible_pairs(batches.lengths, window) + rate.waste * sum(batches.lengths)
    flops = 2 * config.num_attention_heads * sum(_tile_columns(config)) * pairs / batches.batches
    return flops / (rate.share * gpu.matmul)


def _tile_columns(config: DecoderConfig) -> tuple[int, int]:
    """Return the columns of tiles of keys and of values."""
    first, rest = tile_columns(config.head_dim, config.value_dim)
    return first + rest, first + (rest if config.value_dim > first else 0)


def _backward_share(config: DecoderConfig) -> float:
    """Return the backward pass's FLOPs over the forward pass's."""
    keys, values = _tile_columns(config)
    return (3 * keys + 2 * values) / (keys + values)


def _longest_programs(workload: Workload, batches: MicroBatches, window: int | None) -> tuple[float, float]:
    """Return the seconds of the longest programs: of the kernels for queries, and of that for keys and values.

    A program passes all keys that its queries see, or all queries of a group of heads that see its keys.
    """
    config, longest = workload.config, max(batches.lengths, default=0)
    span = longest if window is None else min(longest, window)
    rows = span * config.num_attention_heads // config.num_key_value_heads
    columns = sum(_tile_columns(config)) / 256
    turns = max(min(0.4 + 0.6 * columns, 1.0), columns)
    seconds = turns * fitted.KEYS_TURN * span, turns * fitted.ROWS_TURN * rows
    return fitted.ATTENTION_START + seconds[0], fitted.ATTENTION_START + seconds[1]


def _rates(workload: Workload, backend: str, kind: BatchKind) -> fitted.AttentionRates:
    kernel = backend if backend == "cudnn" else "long" if kind.long else "short"
    size = workload.config.value_dim
    if size > 64:
        return fitted.ATTENTION[kernel, 128 if size <= 128 else 256]
    return fitted.ATTENTION.get((kernel, 64), fitted.ATTENTION["short", 64])


def _workspace(workload: Workload, backend: str, kind: BatchKind) -> int:
    config = workload.config
    if _sums_queries(workload, backend):
        return _head_bytes(workload) * _heads_at_once(workload)
    heads = config.num_attention_heads
    slots = kind.slots if backend == "cudnn" else 0
    return int(fitted.CUDNN_WORKSPACE) * slots * workload.tokens * heads * config.head_dim


def _head_bytes(workload: Workload) -> int:
    """Return the bytes of the gradients of queries, float32, of a key/value head."""
    config = workload.config
    return 4 * workload.tokens * (config.num_attention_heads // config.num_key_value_heads) * config.head_dim


def _heads_at_once(workload: Workload) -> int:
    return heads_summed_at_once(workload.config.num_key_value_heads, _head_bytes(workload))


_MULTIPROCESSORS = 132
_ROWS = 64
"""Rows of a warpgroup's matmul."""
_AT_ONCE = 33
"""Programs that `_last_end` places together."""


class Heads(NamedTuple):
    """Heads of an attention call."""

    queries: int
    keys: int
    dim: int
    values: int
    """Head dim of values."""

    @property
    def columns(self) -> tuple[int, int]:
        """Return the columns of all matmuls of the forward and of the backward pass."""
        return self.dim + self.values, 3 * self.dim + 2 * self.values

    @property
    def group(self) -> int:
        """Return the query heads of a key/value head."""
        return self.queries // self.keys

    @property
    def in_tile(self) -> int:
        """Return the query heads of a token that are in one tile: the largest power of two that divides the group."""
        return math.gcd(self.group, 16)


@lru_cache(maxsize=256)
def hopper_seconds(
    lengths: tuple[int, ...], heads: Heads, window: int | None, *, matmul: float, copy: float
) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass over documents of these lengths.

    Args:
        lengths: of the documents of one micro-batch, in order.
        heads: of the call.
        window: tokens visible to a query; None for all.
        matmul: FLOP/s of the GPU.
        copy: bytes/s of its memory.
    """
    size = next(size for size in fitted.HOPPER_FORWARD if heads.values <= size)
    backward_rates = fitted.HOPPER_BACKWARD[min(size, max(fitted.HOPPER_BACKWARD))]
    passes = (
        (forward_tiles(lengths, heads, window), fitted.HOPPER_FORWARD[size], 2 * heads.columns[0], 1.0),
        (backward_tiles(lengths, heads, window), backward_rates, heads.columns[1], _parted(heads)),
    )
    elements = sum(lengths) * heads.queries * heads.dim

    def seconds(tiles, rates: fitted.TileRates, columns: int, slower: float) -> float:
        flops = 2 * columns * _ROWS * 2 * _ROWS
        tile = flops * _MULTIPROCESSORS / (slower * rates.share * matmul)
        return _last_end(rates.start + tile * tiles) + rates.moved * elements / copy

    forward, backward = (seconds(*each) for each in passes)
    return forward, backward


def _parted(heads: Heads) -> float:
    return 1.0 if heads.in_tile == min(heads.group, 16) else fitted.HOPPER_PARTED


def forward_tiles(lengths: Sequence[int], heads: Heads, window: int | None) -> Int[np.ndarray, " programs"]:
    """Count the tiles of 128 keys that each program of the forward kernel visits, in the order of their starts."""
    tokens = 2 * _ROWS // heads.in_tile
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], tokens)[::-1]
    begin = (ends - lengths)[np.searchsorted(ends, first, side="right")]
    if window is not None:
        begin = np.maximum(begin, first - window + 1)
    tiles = -(-(np.minimum(first + tokens, ends[-1]) - begin) // (2 * _ROWS))
    return np.tile(np.repeat(tiles, heads.group // heads.in_tile), heads.keys)


def backward_tiles(lengths: Sequence[int], heads: Heads, window: int | None) -> Int[np.ndarray, " programs"]:
    """Count the tiles of 64 query rows that each program of the backward kernel, of 128 keys, visits, in order."""
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], 2 * _ROWS)
    last = np.minimum(first + 2 * _ROWS, ends[-1]) - 1
    end = ends[np.searchsorted(ends, last, side="right")]
    if window is not None:
        end = np.minimum(end, last + window)
    parts = heads.group // heads.in_tile
    return np.tile(-(-(end - first) * heads.in_tile // _ROWS) * parts, heads.keys)


def _last_end(seconds: Float[np.ndarray, " programs"]) -> float:
    """Return when the last program ends, each of which starts in order on the first free multiprocessor."""
    free = np.zeros(_MULTIPROCESSORS)
    for at in range(0, len(seconds), _AT_ONCE):
        free.sort()
        some = seconds[at : at + _AT_ONCE]
        free[: len(some)] += some
    return float(free.max())
