"""Triton kernels of the steps of a state in a slot, which is read and written once, in place.

Layout: qkv [S, W], or [S, R, W] of several tokens, queries, keys and values side by side; g, beta [S, N]; out
[S, N, V]; states [slots, N, H, V] float32.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def _advanced(
    state, qkv, g, beta, token, n, column, used,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return some columns of a head's state after a token, and its query; nothing is loaded for one not `used`."""
    N: tl.constexpr = K * G
    keys, values = tl.arange(0, H), column + tl.arange(0, BLOCK_V)
    row, here = qkv + token * (2 * K * H + N * V), (keys >= 0) & used
    q = tl.load(row + (n // G) * H + keys, mask=here, other=0.0).to(tl.float32)
    k = tl.load(row + (K + n // G) * H + keys, mask=here, other=0.0).to(tl.float32)
    v = tl.load(row + 2 * K * H + n * V + values, mask=(values >= 0) & used, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + token * N + n, mask=used, other=0.0).to(tl.float32))
    step = tl.load(beta + token * N + n, mask=used, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (H**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    state *= decay
    update = step * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * update[None, :], q


@triton.jit
def step_kernel(
    qkv, g, beta, slots, begun, states, out,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Advance some columns of one head's state by a sequence's token; grid (V / BLOCK_V, N, S)."""
    N: tl.constexpr = K * G
    column, n, sequence = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, H), column + tl.arange(0, BLOCK_V)
    slot = tl.load(slots + sequence).to(tl.int64)
    places = states + (slot * N + n) * H * V + keys[:, None] * V + values[None, :]
    has_state = (tl.load(begun + sequence) > 0) & (keys >= 0)
    state = tl.load(places, mask=has_state[:, None], other=0.0)
    state, q = _advanced(state, qkv, g, beta, sequence, n, column, True, K, G, H, V, BLOCK_V)
    tl.store(places, state)
    total = tl.sum(state * q[:, None], 0)
    tl.store(out + (sequence * N + n) * V + values, total.to(out.dtype.element_ty))


@triton.jit
def rows_kernel(
    kept_qkv, kept_g, kept_beta, counts, qkv, g, beta, slots, begun, states, out,
    KEPT: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Advance some columns of one head's state by the kept tokens that count, and behind it by ROWS further tokens.

    The state behind the kept ones is stored: the others may be refused. Grid (V / BLOCK_V, N, S).
    """
    N: tl.constexpr = K * G
    column, n, sequence = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, H), column + tl.arange(0, BLOCK_V)
    slot, count = tl.load(slots + sequence).to(tl.int64), tl.load(counts + sequence)
    places = states + (slot * N + n) * H * V + keys[:, None] * V + values[None, :]
    has_state = (tl.load(begun + sequence) > 0) & (keys >= 0)
    state = tl.load(places, mask=has_state[:, None], other=0.0)
    for row in tl.static_range(KEPT):
        token, used = sequence * KEPT + row, row < count
        after, q = _advanced(state, kept_qkv, kept_g, kept_beta, token, n, column, used, K, G, H, V, BLOCK_V)
        state = tl.where(used, after, state)
    tl.store(places, state)
    for row in tl.static_range(ROWS):
        token = sequence * ROWS + row
        state, q = _advanced(state, qkv, g, beta, token, n, column, True, K, G, H, V, BLOCK_V)
        total = tl.sum(state * q[:, None], 0)
        tl.store(out + (token * N + n) * V + values, total.to(out.dtype.element_ty))
