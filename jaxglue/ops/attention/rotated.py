"""Triton kernels of attention's gradients that take those of queries and keys back through their rotation and norm.

They write one array dz [B, T, V, H], the gradient to z: V = N + 2·K heads, of queries, keys and values side by side.
H is a power of two.
"""

import triton
import triton.language as tl

from jaxglue.ops.attention.kernels import (
    key_tile,
    key_value_gradients,
    query_gradient,
    query_tile,
    store_tile,
    tile_of,
)
from jaxglue.ops.norm_rope.kernels import head_norm_gradient


@triton.jit
def _take_back(
    gradient, z, weight, cos, sin, dz, row, token, end, head, T: tl.constexpr, V: tl.constexpr, H: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Store the gradient to a tile of z from that to its rotated and, with HAS_NORM, normed heads."""
    HALF: tl.constexpr = H // 2
    base, offsets, mask = tile_of(row, token, end, head, T, V, H, TOKENS, PACK, HALF)
    columns = tl.arange(0, HALF)
    turned = (row * T + token) * HALF + (tl.arange(0, TOKENS * PACK) // PACK)[:, None] * HALF + columns[None, :]
    c, s = tl.load(cos + turned, mask=mask, other=0.0), tl.load(sin + turned, mask=mask, other=0.0)
    dleft, dright = tl.split(tl.permute(tl.reshape(gradient, (TOKENS * PACK, 2, HALF)), (0, 2, 1)))
    dleft, dright = dleft * c + dright * s, dright * c - dleft * s
    if HAS_NORM:
        left = tl.load(z + base + offsets, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(z + base + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
        dleft *= tl.load(weight + columns).to(tl.float32)[None, :]
        dright *= tl.load(weight + HALF + columns).to(tl.float32)[None, :]
        dleft, dright = head_norm_gradient(left, right, dleft, dright, H, EPS)
    dtype = dz.dtype.element_ty
    tl.store(dz + base + offsets, dleft.to(dtype), mask=mask)
    tl.store(dz + base + HALF + offsets, dright.to(dtype), mask=mask)


@triton.jit
def rotated_dq_kernel(
    q, k, v, starts, units, out, lse, dout, z, weight, cos, sin, dz, delta,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, Q_DESCRIPTOR: tl.constexpr, LATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    EPS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Do as `dq_kernel`; write the first N heads of dz."""
    row, first, end, pack = query_tile(units, T, K * G // P, BLOCK_M // P, UNIT, UNITS)
    if first >= end:
        return
    gradient = query_gradient(
        q, k, v, starts, out, lse, dout, delta, row, first, end, pack,
        T, K, V, G, P, H, WINDOW, FORKS, SCALE, DESCRIPTORS, Q_DESCRIPTOR, LATE, BLOCK_M, BLOCK_N, BLOCK_H,
    )  # fmt: skip
    _take_back(gradient, z, weight, cos, sin, dz, row, first, end, pack * P, T, V, H, BLOCK_M // P, P, EPS, HAS_NORM)


@triton.jit
def rotated_dkdv_kernel(
    q, k, v, ends, units, lse, delta, dout, z, weight, cos, sin, dz,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, FORKS: tl.constexpr, SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    EPS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Do as `dkdv_kernel`; write the last 2·K heads of dz."""
    row, first, end, head = key_tile(units, T, K, BLOCK_N, UNIT, UNITS)
    if first >= end:
        return
    dkeys, dvalues = key_value_gradients(
        q, k, v, ends, lse, delta, dout, row, first, end, head,
        T, K, V, G, P, H, WINDOW, FORKS, SCALE, DESCRIPTORS, BLOCK_M, BLOCK_N, BLOCK_H,
    )  # fmt: skip
    store_tile(dz, dvalues, row, first, end, V - K + head, T, V, H, BLOCK_N, 1, BLOCK_H)
    _take_back(dkeys, z, weight, cos, sin, dz, row, first, end, K * G + head, T, V, H, BLOCK_N, 1, EPS, HAS_NORM)
