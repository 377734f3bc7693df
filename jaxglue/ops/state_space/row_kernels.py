"""Triton kernels around the recurrence: a token's step, the state of a slot read and written once, and gated norms.

Layout: xbc [S, W], x, B and C side by side; step, g [S, N]; out [S, N, P]; states [slots, N, S, P] float32; values and
gates [M, V], weights [groups, V] of the groups in whose order the rows are.
"""

import triton
import triton.language as tl

from jaxglue.ops.norm_rope.kernels import normed, rms_scale


@triton.jit
def step_kernel(
    xbc, step, g, skip, slots, begun, states, out,
    N: tl.constexpr, G: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Advance some columns of one head's state by a sequence's token; grid (P / BLOCK_P, N, sequences).

    All of the state is asked for before the token, whose barriers keep the compiler from reading a part at a time.
    """
    column, n, sequence = tl.program_id(0) * BLOCK_P, tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, S), column + tl.arange(0, BLOCK_P)
    slot = tl.load(slots + sequence).to(tl.int64)
    places = states + (slot * N + n) * S * P + keys[:, None] * P + values[None, :]
    known = (tl.load(begun + sequence) > 0) & (keys >= 0)
    state = tl.load(places, mask=known[:, None], other=0.0)
    group = n // (N // G)
    row = xbc + sequence * (N * P + 2 * G * S)
    x = tl.load(row + n * P + values).to(tl.float32)
    b = tl.load(row + N * P + group * S + keys).to(tl.float32)
    c = tl.load(row + N * P + (G + group) * S + keys).to(tl.float32)
    decay = tl.exp(tl.load(g + sequence * N + n).to(tl.float32))
    size = tl.load(step + sequence * N + n).to(tl.float32)
    state = decay * state
    state += b[:, None] * (size * x)[None, :]
    tl.store(places, state)
    total = tl.sum(state * c[:, None], 0) + tl.load(skip + n).to(tl.float32) * x
    tl.store(out + (sequence * N + n) * P + values, total.to(out.dtype.element_ty))


@triton.jit
def _places(M, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, GROUPS: tl.constexpr):
    """Return (places, mask) of a program's rows, and places of their weights."""
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    places = rows.to(tl.int64)[:, None] * V + columns[None, :]
    weights = (rows % GROUPS)[:, None] * V + columns[None, :]
    return places, (rows < M)[:, None] & (columns < V)[None, :], weights


@triton.jit
def _load(x, places, mask):
    return tl.load(x + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out,
    M: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Norm the products of some rows and their gates' silu, rounded as the reference's; grid (tiles of M)."""
    places, mask, weights = _places(M, V, BLOCK_M, BLOCK_V, GROUPS)
    gates = _load(gate, places, mask)
    values = _load(x, places, mask) * (gates / (1.0 + tl.exp(-gates)))
    scale = rms_scale(tl.sum(values * values, 1), V, EPS)[:, None]
    values = normed(values, scale, _load(weight, weights, mask), out.dtype.element_ty)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_gradient_kernel(
    x, gate, weight, dout, dx, dgate,
    M: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients to some rows and their gates; grid (tiles of M)."""
    places, mask, weights = _places(M, V, BLOCK_M, BLOCK_V, GROUPS)
    values, gates = _load(x, places, mask), _load(gate, places, mask)
    opened = 1.0 / (1.0 + tl.exp(-gates))
    products = values * gates * opened
    scale = rms_scale(tl.sum(products * products, 1), V, EPS)[:, None]
    dnormed = _load(dout, places, mask) * _load(weight, weights, mask)
    along = tl.sum(dnormed * products, 1)[:, None] * scale * scale / V
    dproducts = (dnormed - products * along) * scale
    dtype = dx.dtype.element_ty
    tl.store(dx + places, (dproducts * gates * opened).to(dtype), mask=mask)
    tl.store(dgate + places, (dproducts * values * opened * (1.0 + gates * (1.0 - opened))).to(dtype), mask=mask)
