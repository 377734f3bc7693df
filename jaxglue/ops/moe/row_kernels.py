"""Triton kernels around the experts' matmuls, one row in a program: the activations, and rows to tokens."""

import triton
import triton.language as tl


@triton.jit
def _gate_up(projected, start, F: tl.constexpr, GPT_OSS: tl.constexpr, BLOCK: tl.constexpr):
    """(gate, up) of BLOCK columns of a row, in float32: alternating for GPT-OSS, else in two halves."""
    if GPT_OSS:
        columns = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(projected + columns, mask=columns < 2 * F, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(projected + columns, mask=columns < F, other=0.0)
        up = tl.load(projected + F + columns, mask=columns < F, other=0.0)
        return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _activate(gate, up, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(value, its derivative by gate, by up)."""
    if GPT_OSS:
        low, inside = gate <= LIMIT, (up >= -LIMIT) & (up <= LIMIT)
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
        by_gate = tl.where(low, up * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid)), 0.0)
        return gate * sigmoid * up, by_gate, tl.where(inside, gate * sigmoid, 0.0)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid * up, up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), gate * sigmoid


@triton.jit
def activation_kernel(
    projected, weights, offsets, out,
    E: tl.constexpr, F: tl.constexpr, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of out [S, F]: the activation of projected [S, 2F] times the row's weight; grid (S).

    Rows from offsets[E] on, which belong to no group, are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    weight = tl.load(weights + row)
    for start in range(0, F, BLOCK):
        gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
        value, _, _ = _activate(gate, up, GPT_OSS, ALPHA, LIMIT)
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + row * F + columns, (value * weight).to(out.dtype.element_ty), mask=columns < F)


@triton.jit
def activation_gradient_kernel(
    projected, weights, offsets, dout, dprojected, dweights,
    E: tl.constexpr, F: tl.constexpr, GPT_OSS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of dprojected [S, 2F] and of dweights [S], where it belongs to a group; grid (S)."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + E):
        return
    weight = tl.load(weights + row)
    dweight = tl.full((BLOCK,), 0.0, tl.float32)
    dprojected += row * 2 * F
    for start in range(0, F, BLOCK):
        gate, up = _gate_up(projected + row * 2 * F, start, F, GPT_OSS, BLOCK)
        value, by_gate, by_up = _activate(gate, up, GPT_OSS, ALPHA, LIMIT)
        columns = start + tl.arange(0, BLOCK)
        grad = tl.load(dout + row * F + columns, mask=columns < F, other=0.0).to(tl.float32)
        dweight += grad * value
        dgate = (grad * weight * by_gate).to(dprojected.dtype.element_ty)
        dup = (grad * weight * by_up).to(dprojected.dtype.element_ty)
        if GPT_OSS:
            both, columns = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,)), 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(dprojected + columns, both, mask=columns < 2 * F)
        else:
            tl.store(dprojected + columns, dgate, mask=columns < F)
            tl.store(dprojected + F + columns, dup, mask=columns < F)
    tl.store(dweights + row, tl.sum(dweight, 0))


@triton.jit
def combine_kernel(
    rows, inverse, weights, expert_ids, bias, out,
    D: tl.constexpr, X: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of out [M, D]: the sum of the rows [S, D] that inverse [M, X] names (+ weight · bias); grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < D
        acc = tl.full((BLOCK,), 0.0, tl.float32)
        for choice in tl.static_range(0, X):
            row = tl.load(inverse + token * X + choice).to(tl.int64)
            here = mask & (row < tl.num_programs(0) * X)
            acc += tl.load(rows + row * D + columns, mask=here, other=0.0).to(tl.float32)
            if HAS_BIAS:
                expert, weight = tl.load(expert_ids + token * X + choice), tl.load(weights + token * X + choice)
                acc += weight * tl.load(bias + expert * D + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(out + token * D + columns, acc.to(out.dtype.element_ty), mask=mask)
