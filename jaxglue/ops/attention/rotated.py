"""Triton kernels of attention that norm and rotate its queries, and take gradients back through that and the keys'.

They read z [B, T, V, H], V = N + 2·K heads, of queries, keys and values side by side, and write its gradient dz. Keys
are rotated beforehand: a tile of them is read by many programs. H is a power of two.
"""

import triton
import triton.language as tl

from jaxglue.ops.attention.backward_kernels import key_value_gradients, query_gradient
from jaxglue.ops.attention.kernels import attend, key_tile, load_tile, query_tile, store_tile, tile_of, visible_keys
from jaxglue.ops.norm_rope.kernels import head_norm_gradient, normed, rms_scale


@triton.jit
def _angles(cos, sin, row, token, mask, TOKENS: tl.constexpr, PACK: tl.constexpr, spec: tl.constexpr):
    """Load the cosines and sines of a tile, [TOKENS·PACK, H / 2]."""
    HALF: tl.constexpr = spec.H // 2
    lane, column = tl.arange(0, TOKENS * PACK), tl.arange(0, HALF)
    at = (row * spec.T + token) * HALF + (lane // PACK)[:, None] * HALF + column[None, :]
    return tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def _rotated_queries(z, weight, cos, sin, row, token, end, head, spec: tl.constexpr):
    """Load a tile of z, and return it perhaps normed, and rotated."""
    HALF: tl.constexpr = spec.H // 2
    TOKENS: tl.constexpr = spec.block_m // spec.P
    dtype = z.dtype.element_ty
    base, offsets, mask = tile_of(row, token, end, head, spec.V, TOKENS, spec.P, HALF, spec)
    columns = tl.arange(0, HALF)
    left = tl.load(z + base + offsets, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(z + base + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    if spec.norm_eps is not None:
        scale = rms_scale(tl.sum(left * left + right * right, 1), spec.H, spec.norm_eps)[:, None]
        left = normed(left, scale, tl.load(weight + columns)[None, :], dtype)
        right = normed(right, scale, tl.load(weight + HALF + columns)[None, :], dtype)
    c, s = _angles(cos, sin, row, token, mask, TOKENS, spec.P, spec)
    halves = tl.join((left * c - right * s).to(dtype), (right * c + left * s).to(dtype))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (spec.block_m, spec.H))


@triton.jit
def _take_back(
    gradient, z, weight, cos, sin, dz, row, token, end, head, TOKENS: tl.constexpr, PACK: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Store the gradient to a tile of z from that to its rotated and perhaps normed heads."""
    HALF: tl.constexpr = spec.H // 2
    base, offsets, mask = tile_of(row, token, end, head, spec.V, TOKENS, PACK, HALF, spec)
    columns = tl.arange(0, HALF)
    c, s = _angles(cos, sin, row, token, mask, TOKENS, PACK, spec)
    dleft, dright = tl.split(tl.permute(tl.reshape(gradient, (TOKENS * PACK, 2, HALF)), (0, 2, 1)))
    dleft, dright = dleft * c + dright * s, dright * c - dleft * s
    if spec.norm_eps is not None:
        left = tl.load(z + base + offsets, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(z + base + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
        dleft *= tl.load(weight + columns).to(tl.float32)[None, :]
        dright *= tl.load(weight + HALF + columns).to(tl.float32)[None, :]
        dleft, dright = head_norm_gradient(left, right, dleft, dright, spec.H, spec.norm_eps)
    dtype = dz.dtype.element_ty
    tl.store(dz + base + offsets, dleft.to(dtype), mask=mask)
    tl.store(dz + base + HALF + offsets, dright.to(dtype), mask=mask)


@triton.jit
def rotated_forward_kernel(z, k, v, starts, units, weight, cos, sin, out, lse, spec: tl.constexpr):
    """Do as `forward_kernel` for the first N heads of z as queries, once rotated."""
    row, first, end, pack = query_tile(units, spec)
    if first >= end:
        return
    starts += row * (3 * spec.T if spec.forks else spec.T)
    tokens, low, all_low, lows = visible_keys(starts, first, end, spec)
    q_tile = _rotated_queries(z, weight, cos, sin, row, first, end, pack * spec.P, spec)
    attend(q_tile, k, v, z, starts, out, lse, row, first, end, pack, tokens, low, all_low, lows, spec)


@triton.jit
def rotated_dq_kernel(k, v, starts, units, out, lse, dout, z, weight, cos, sin, dz, delta, q, spec: tl.constexpr):
    """Do as `dq_kernel`; write the first N heads of dz, and q once rotated, for `rotated_dkdv_kernel`."""
    N: tl.constexpr = spec.K * spec.G
    TOKENS: tl.constexpr = spec.block_m // spec.P
    row, first, end, pack = query_tile(units, spec)
    if first >= end:
        return
    starts += row * (3 * spec.T if spec.forks else spec.T)
    tokens, low, all_low, lows = visible_keys(starts, first, end, spec)
    q_tile = _rotated_queries(z, weight, cos, sin, row, first, end, pack * spec.P, spec)
    store_tile(q, q_tile, row, first, end, pack * spec.P, N, TOKENS, spec.P, spec)
    dout_tile = load_tile(dout, row, first, pack * spec.P, N, TOKENS, spec.P, False, spec)
    out_tile = load_tile(out, row, first, pack * spec.P, N, TOKENS, spec.P, False, spec)
    gradient = query_gradient(
        q_tile, out_tile, dout_tile, k, v, starts, lse, delta, row, first, end, pack, tokens, low, all_low, lows, spec
    )
    _take_back(gradient, z, weight, cos, sin, dz, row, first, end, pack * spec.P, TOKENS, spec.P, spec)


@triton.jit
def rotated_dkdv_kernel(q, k, v, ends, units, lse, delta, dout, z, weight, cos, sin, dz, spec: tl.constexpr):
    """Do as `dkdv_kernel`; write the last 2·K heads of dz."""
    row, first, end, head = key_tile(units, spec)
    if first >= end:
        return
    dkeys, dvalues = key_value_gradients(q, k, v, ends, lse, delta, dout, row, first, end, head, spec)
    store_tile(dz, dvalues, row, first, end, spec.V - spec.K + head, spec.V, spec.block_n, 1, spec)
    _take_back(dkeys, z, weight, cos, sin, dz, row, first, end, spec.K * spec.G + head, spec.block_n, 1, spec)
