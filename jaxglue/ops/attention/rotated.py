"""Triton kernels of attention's gradients that take those of queries and keys back through their rotation and norm.

They write one array dz [B, T, V, H], the gradient to z: V = N + 2·K heads, of queries, keys and values side by side.
H is a power of two.
"""

import triton
import triton.language as tl

from jaxglue.ops.attention.backward_kernels import key_value_gradients, query_gradient
from jaxglue.ops.attention.kernels import VALUES, key_tile, query_tile, store_tile, tile_of
from jaxglue.ops.norm_rope.kernels import head_norm_gradient


@triton.jit
def _take_back(
    gradient, z, weight, cos, sin, dz, row, token, end, head, TOKENS: tl.constexpr, PACK: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Store the gradient to a tile of z from that to its rotated and perhaps normed heads."""
    HALF: tl.constexpr = spec.H // 2
    base, offsets, mask = tile_of(row, token, end, head, spec.V, TOKENS, PACK, spec.H, 0, HALF, spec)
    columns = tl.arange(0, HALF)
    turned = (row * spec.T + token) * HALF + (tl.arange(0, TOKENS * PACK) // PACK)[:, None] * HALF + columns[None, :]
    c, s = tl.load(cos + turned, mask=mask, other=0.0), tl.load(sin + turned, mask=mask, other=0.0)
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
def rotated_dq_kernel(
    q, k, v, q_rest, k_rest, v_rest, starts, units, out, lse, dout, z, weight, cos, sin, dz, delta, spec: tl.constexpr
):
    """Do as `dq_kernel`; write the first N heads of dz."""
    row, first, end, pack = query_tile(units, spec)
    if first >= end:
        return
    gradient, _ = query_gradient(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, starts=starts, out=out, lse=lse, dout=dout,
        delta=delta, row=row, first=first, end=end, pack=pack, spec=spec,
    )  # fmt: skip
    _take_back(
        gradient=gradient, z=z, weight=weight, cos=cos, sin=sin, dz=dz, row=row, token=first, end=end,
        head=pack * spec.P, TOKENS=spec.block_m // spec.P, PACK=spec.P, spec=spec,
    )  # fmt: skip


@triton.jit
def rotated_dkdv_kernel(
    q, k, v, q_rest, k_rest, v_rest, ends, units, lse, delta, dout, dout_rest, z, weight, cos, sin, dz,
    spec: tl.constexpr,
):  # fmt: skip
    """Do as `dkdv_kernel`; write the last 2·K heads of dz."""
    row, first, end, head = key_tile(units, spec)
    if first >= end:
        return
    dkeys, _, dvalues, _ = key_value_gradients(
        q=q, k=k, v=v, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest, ends=ends, lse=lse, delta=delta, dout=dout,
        dout_rest=dout_rest, row=row, first=first, end=end, kv_head=head, spec=spec,
    )  # fmt: skip
    store_tile(dz, dvalues, row, first, end, spec.V - spec.K + head, spec.V, spec.block_n, 1, VALUES, spec)
    _take_back(
        gradient=dkeys, z=z, weight=weight, cos=cos, sin=sin, dz=dz, row=row, token=first, end=end,
        head=spec.K * spec.G + head, TOKENS=spec.block_n, PACK=1, spec=spec,
    )  # fmt: skip
