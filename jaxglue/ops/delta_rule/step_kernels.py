"""Triton kernel of a token's step: the state of a slot, read and written once, in place.

Layout: qkv [S, W], queries, keys and values side by side; g, beta [S, N]; out [S, N, V]; states
[slots, N, H, V] float32.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def step_kernel(
    qkv, g, beta, slots, begun, states, out,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Advance some columns of one head's state by a sequence's token; grid (V / BLOCK_V, N, S)."""
    N: tl.constexpr = K * G
    column, n, sequence = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, H), column + tl.arange(0, BLOCK_V)
    row = qkv + sequence * (2 * K * H + N * V)
    q = tl.load(row + (n // G) * H + keys).to(tl.float32)
    k = tl.load(row + (K + n // G) * H + keys).to(tl.float32)
    v = tl.load(row + 2 * K * H + n * V + values).to(tl.float32)
    decay = tl.exp(tl.load(g + sequence * N + n).to(tl.float32))
    step = tl.load(beta + sequence * N + n).to(tl.float32)
    slot = tl.load(slots + sequence).to(tl.int64)
    places = states + (slot * N + n) * H * V + keys[:, None] * V + values[None, :]
    has_state = (tl.load(begun + sequence) > 0) & (keys >= 0)
    state = decay * tl.load(places, mask=has_state[:, None], other=0.0)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (H**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    update = step * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * update[None, :]
    tl.store(places, state)
    total = tl.sum(state * q[:, None], 0)
    tl.store(out + (sequence * N + n) * V + values, total.to(out.dtype.element_ty))
