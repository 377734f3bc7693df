"""Triton kernels of the steps of a state in a slot, which is read and written once, in place.

Layout: qkv [S, W], or [S, R, W] of several tokens, queries, keys and values side by side; g, beta [S, N]; out
[S, N, V]; states [slots, N, H, V] float32; inputs of a convolution [slots, TAPS - 1, C].
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def _token(
    qkv, g, beta, token, n, column, used,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return a token's query, key, some columns of its value, decay and step; zeros that change no state if not `used`.

    A kernel loads all its tokens before the first sum, which no load passes.
    """
    N: tl.constexpr = K * G
    keys, values = tl.arange(0, H), column + tl.arange(0, BLOCK_V)
    row, here = qkv + token * (2 * K * H + N * V), (keys >= 0) & used
    q = tl.load(row + (n // G) * H + keys, mask=here, other=0.0).to(tl.float32)
    k = tl.load(row + (K + n // G) * H + keys, mask=here, other=0.0).to(tl.float32)
    v = tl.load(row + 2 * K * H + n * V + values, mask=(values >= 0) & used, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + token * N + n, mask=used, other=0.0).to(tl.float32))
    return q, k, v, decay, tl.load(beta + token * N + n, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _advanced(state, k, v, decay, step):
    """Return some columns of a head's state after a token."""
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    state *= decay
    update = step * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * update[None, :]


@triton.jit
def _output(state, q, out, at, H: tl.constexpr):
    """Write what a token's query reads of the state after it."""
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (H**-0.5)
    tl.store(out + at, tl.sum(state * q[:, None], 0).to(out.dtype.element_ty))


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
    q, k, v, decay, step = _token(qkv, g, beta, sequence, n, column, True, K, G, H, V, BLOCK_V)
    state = _advanced(state, k, v, decay, step)
    tl.store(places, state)
    _output(state, q, out, (sequence * N + n) * V + values, H)


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
    kept: tl.tuple = ()
    tokens: tl.tuple = ()
    for row in tl.static_range(KEPT):
        token = sequence * KEPT + row
        kept += (_token(kept_qkv, kept_g, kept_beta, token, n, column, row < count, K, G, H, V, BLOCK_V),)
    for row in tl.static_range(ROWS):
        tokens += (_token(qkv, g, beta, sequence * ROWS + row, n, column, True, K, G, H, V, BLOCK_V),)
    for row in tl.static_range(KEPT):
        q, k, v, decay, step = kept[row]
        state = _advanced(state, k, v, decay, step)
    tl.store(places, state)
    for row in tl.static_range(ROWS):
        q, k, v, decay, step = tokens[row]
        state = _advanced(state, k, v, decay, step)
        _output(state, q, out, ((sequence * ROWS + row) * N + n) * V + values, H)


@triton.jit
def convolution_kernel(
    x, kept, counts, taps, bias, slots, begun, inputs, out,
    ROWS: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a sequence's ROWS tokens behind its inputs; grid (C / BLOCK, S).

    The inputs stored are the last of all or, with KEPT tokens of which the first `counts` count, the last before the
    ROWS tokens, which may be refused.
    """
    sequence, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    place = inputs + tl.load(slots + sequence).to(tl.int64) * (TAPS - 1) * C + channel
    has_inputs = inside & (tl.load(begun + sequence) > 0)
    count = 0
    if KEPT > 0:
        count = tl.load(counts + sequence)
    last: tl.tuple = ()
    weights: tl.tuple = ()
    for index in tl.static_range(TAPS - 1):  # all is loaded before the first store
        at = index + count
        token = tl.load(place + at * C, mask=has_inputs & (at < TAPS - 1), other=0.0)
        if KEPT > 0:
            own = kept + (sequence * KEPT + at - (TAPS - 1)) * C + channel
            later = tl.load(own, mask=inside & (at >= TAPS - 1), other=0.0)
            token = tl.where(at < TAPS - 1, token, later.to(token.dtype))
        last += (token,)
    for index in tl.static_range(TAPS):
        weights += (tl.load(taps + channel * TAPS + index, mask=inside, other=0.0).to(tl.float32),)
    added = 0.0
    if bias is not None:
        added = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if KEPT > 0:
        for index in tl.static_range(TAPS - 1):
            tl.store(place + index * C, last[index], mask=inside)
    for row in tl.static_range(ROWS):
        at = (sequence * ROWS + row) * C + channel
        own = tl.load(x + at, mask=inside, other=0.0)
        last += (own.to(inputs.dtype.element_ty),)
        total = last[row].to(tl.float32) * weights[0]
        for index in tl.static_range(1, TAPS):
            total += last[row + index].to(tl.float32) * weights[index]
        total += added
        total = total / (1 + tl.exp(-total))
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    if KEPT == 0:
        for index in tl.static_range(TAPS - 1):
            tl.store(place + index * C, last[ROWS + index], mask=inside)
