"""Packed attention for Hopper: launches of the Gluon kernels, whose warps have different tasks."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float
from triton.experimental.gluon.language import NVMMASharedLayout

from jaxglue.ops.attention.hopper.backward import backward_kernel
from jaxglue.ops.attention.hopper.forward import forward_kernel
from jaxglue.ops.attention.hopper.visits import tiles_in_chunk
from jaxglue.ops.attention.kernels import LOG2_E
from jaxglue.ops.attention.tiles import heads_summed_at_once, kernel_tiles
from jaxglue.ops.attention.triton import KernelSizes, TritonAttention, sink_gradient, starts_of
from jaxglue.ops.attention.vjp import Gradients
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.tile_ring import GROUP_ROWS

_ROWS = 2 * GROUP_ROWS.value
"""Rows of a program: queries forward, keys backward."""
_STAGES = 2
"""Places for tiles on their way; one more for the gradients of narrow heads, which leave room."""
_SPAN = 4
"""Tiles of tokens whose gradients of queries a program rounds."""


@dataclass(frozen=True, kw_only=True)
class HopperAttention(Launcher):
    """`AttentionBackend` for long documents; lse is [B, N/P, T, P], as that of `TritonAttention`.

    That computes the gradients of heads wider than 128, whose sums leave no registers, and of capped scores.
    """

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None):
        """Return (out, lse)."""
        sizes, values = KernelSizes.of(q, k), v.shape[3]
        keys = _ROWS if values <= 128 else _ROWS // 2  # of a tile: wide heads fill shared memory
        first, rest = _parts(k, values, keys)
        arrays = q, first, rest, _rows(v, keys), q if sinks is None else sinks, starts_of(segments)
        outputs = jax.ShapeDtypeStruct((*q.shape[:3], values), q.dtype), sizes.statistics()
        grid = triton.cdiv(sizes.T, _ROWS // sizes.P) * sizes.packs, sizes.B
        constants = _constants(sizes, segments, window) | {
            "V": values,
            "SOFTCAP": softcap,
            "STAGES": _STAGES,
            "HAS_SINKS": sinks is not None,
        }
        cost = KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        return self._launch(forward_kernel, arrays, outputs, grid, constants, cost=cost)

    def backward(self, q, k, v, sinks, segments: PackedSegments, out, lse, dout, *, window, softcap=None) -> Gradients:
        """Return (dq, dk, dv, dsinks); dq is summed in float32, of as many heads at once as take 1 GiB."""
        sizes, values = KernelSizes.of(q, k), v.shape[3]
        if values > 128 or softcap is not None:
            tiles = kernel_tiles((9, 0), sizes.H, value_dim=values, window=window, long=True)
            kernels = TritonAttention(compute_capability=self.compute_capability, tiles=tiles)
            arrays = q, k, v, sinks, segments, out, lse, dout
            return kernels.backward(*arrays, window=window, softcap=softcap)
        chunk = tiles_in_chunk(sizes.T // segments.slots, window)
        if chunk > 1:  # tiles of one head
            lse = lse.transpose(0, 1, 3, 2).reshape(sizes.B, -1, sizes.T, 1)
            sizes = replace(sizes, P=1)
        delta = _per_tile((out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1), sizes)
        planes = sizes.B * sizes.packs, sizes.T * sizes.P
        narrow = values < sizes.H  # scores then begin with the negative lse
        statistics = -(sizes.H**0.5) * lse if narrow else lse * LOG2_E.value, delta
        ends = segments.ends
        if segments.own_keys is not None and segments.first_queries is not None:
            ends = jnp.concatenate([ends, segments.first_queries, segments.own_keys], axis=1)
        lse_lines, delta_lines = (_line(x.reshape(planes)) for x in statistics)
        others = {"ends": ends, "lse": lse_lines, "delta": delta_lines, "dout": _cube(dout, sizes.P, (values,))[0]}
        widths = (values, sizes.H - values) if values < sizes.H else (values,)
        heads = heads_summed_at_once(sizes.K, 4 * sizes.B * sizes.T * sizes.G * sizes.H)

        def some(first, q, k, v) -> tuple[jax.Array, ...]:
            (query, *query_rest), (key, *key_rest) = (
                _cube(q, sizes.P, widths),
                [_rows(k, width=width) for width in widths],
            )
            arrays = {
                "q": query,
                "k": key,
                "v": _rows(v),
                "q_rest": query_rest[0] if query_rest else None,
                "k_rest": key_rest[0] if key_rest else None,
                **others,
            }
            constants = _constants(sizes, segments, window) | {"V": values, "CHUNK": chunk}
            return self._gradients(arrays, first, sizes, heads, widths, constants)

        def replaced(i, arrays):
            update = jax.lax.dynamic_update_slice_in_dim
            first = i * heads
            gradients = zip(arrays, some(first, *arrays), (first * sizes.G, first, first), strict=True)
            return tuple(update(x, gradient, at, axis=2) for x, gradient, at in gradients)

        if heads == sizes.K:
            dq, dk, dv = some(0, q, k, v)
        else:  # gradients take the places of their arrays, whose heads are read once
            dq, dk, dv = jax.lax.fori_loop(0, sizes.K // heads, replaced, (q, k, v))
        return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)

    def _gradients(
        self, arrays: dict, first_head, sizes: KernelSizes, heads: int, widths: tuple[int, ...], constants: dict
    ):
        """Return (dq, dk, dv) of some key/value heads and their query heads."""
        lines, planes, tiles = sizes.T * sizes.P, sizes.B * heads * sizes.G // sizes.P, triton.cdiv(sizes.S, _ROWS)
        rounded = triton.cdiv(triton.cdiv(sizes.T, _ROWS), _SPAN)
        turns = jnp.zeros((planes, triton.cdiv(lines, _ROWS // 2)), jnp.int32)
        sums = [jnp.empty((planes, lines, width), jnp.float32) for width in widths]
        dk, dv, dq = (
            jax.ShapeDtypeStruct((sizes.B, tokens, heads * group, width), arrays["k"].base.dtype)
            for tokens, group, width in ((sizes.S, 1, sizes.H), (sizes.S, 1, widths[0]), (sizes.T, sizes.G, sizes.H))
        )
        in_place, passed = (turns, *sums), 2 + sum(array is not None for array in arrays.values())
        main, *rest = map(_halves, sums)
        dk, dv, dq, *_ = self._launch(
            backward_kernel,
            {
                **arrays,
                "first_head": jnp.asarray(first_head, jnp.int32).reshape(1),
                "turns": turns,
                "sums": main,
                "sums_rest": rest[0] if rest else None,
            },
            (dk, dv, dq, *map(shape_dtype_of, in_place)),
            ((tiles + rounded) * heads * sizes.B,),
            constants | {"STAGES": _STAGES + (sizes.H <= 64), "HEADS": heads, "ROWS": sizes.B, "SPAN": _SPAN},
            cost=KernelCost(kind=KernelKind.ATTENTION_BACKWARD),
            aliases={passed - 1 + i: 3 + i for i in range(len(in_place))},
        )
        return dq, dk, dv


def _constants(sizes: KernelSizes, segments: PackedSegments, window: int | None) -> dict:
    return sizes.constants(window) | {"S": sizes.S, "SPLIT": segments.own_keys is not None}


def _per_tile(x: Float[Array, "B T N"], sizes: KernelSizes) -> Float[Array, "B N/P T P"]:
    return x.reshape(sizes.B, sizes.T, sizes.packs, sizes.P).transpose(0, 2, 1, 3)


def _descriptor(x: jax.Array, block: tuple[int, ...], swizzle: int = 128) -> TensorDescriptor:
    layout = NVMMASharedLayout(swizzle, x.dtype.itemsize * 8, rank=len(block))
    return TensorDescriptor.from_array(x, block, layout)


def _rows(x: Float[Array, "B T K H"], count: int = _ROWS, width: int | None = None) -> TensorDescriptor:
    """Describe tiles of one head's keys or values, or of so many columns of it."""
    B, T, K, H = x.shape
    return _descriptor(x.reshape(B * T, K * H), (count, H if width is None else width))


def _parts(k: Float[Array, "B T K H"], values: int, count: int = _ROWS) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describe tiles of as many columns of keys as values have, and of those beyond; the same where there are none."""
    first = _rows(k, count, values)
    return first, _rows(k, count, k.shape[3] - values) if k.shape[3] > values else first


def _cube(x: Float[Array, "B T N H"], heads: int, widths: tuple[int, ...]) -> list[TensorDescriptor]:
    """Describe tiles of some heads for some tokens, of so many columns each."""
    B, T, N, H = x.shape
    return [_descriptor(x.reshape(B * T, N, H), (_ROWS // 2 // heads, heads, width)) for width in widths]


def _line(x: Float[Array, "BN/P TP"]) -> TensorDescriptor:
    """Describe a tile's statistics; lines begin at multiples of 16 bytes."""
    return _descriptor(jnp.pad(x, ((0, 0), (0, -x.shape[1] % 4))), (1, _ROWS // 2), swizzle=0)


def _halves(x: Float[Array, "BN/P TP H"]) -> TensorDescriptor:
    """Describe the half of a tile that one warpgroup computes."""
    return _descriptor(x, (1, _ROWS // 2, x.shape[2] // 2))
