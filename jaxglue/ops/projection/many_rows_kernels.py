"""Triton kernels of projections of some hundred rows, where multiplying takes as long as reading the weights.

Each program reads 256 rows of x, from the L2 cache, so a program takes 128 rows of weights or, of gate and up, three
times 64, as many as registers hold sums of. With 12,288 columns the latter are a program for each multiprocessor of an
H100 or H200, where 64 or 128 rows would leave a third of them idle in the second turn.
"""

import triton
import triton.language as tl

from jaxglue.ops.projection.few_rows_kernels import activate, load_rows


@triton.jit
def _load_pairs(gate, up, first, k, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of ROWS / 2 rows of gate and of up, from `first` on: eight of the one, then of the other.

    So a thread's sums, of rows 8 apart, are of gate and up of one column.
    """
    rows = tl.arange(0, ROWS)
    features = tl.minimum(first + rows // 16 * 8 + rows % 8, F - 1)  # rows beyond are other rows, and not stored
    columns = k + tl.arange(0, BLOCK_K)
    at = tl.where((rows % 16 < 8)[:, None], gate, up) + features[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _store_pairs(
    acc, first, x_scales, gate_scales, up_scales, out, rows, M: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store activation(gate) · up of sums in the order of `_load_pairs`, rounded before scales as in training."""
    dtype: tl.constexpr = out.dtype.element_ty
    if ROUND:
        acc = acc.to(dtype).to(tl.float32)
    if x_scales is not None:
        acc *= tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
    pairs = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate, up = tl.reshape(gate, (ROWS // 2, BLOCK_M)), tl.reshape(up, (ROWS // 2, BLOCK_M))
    n = first + tl.arange(0, ROWS // 2)
    if x_scales is not None:
        gate *= tl.load(gate_scales + n, mask=n < F, other=0.0)[:, None]
        up *= tl.load(up_scales + n, mask=n < F, other=0.0)[:, None]
    y = (activate(gate, GELU) * up).to(dtype)
    tl.store(out + rows[None, :] * F + n[:, None], y, mask=(rows < M)[None, :] & (n < F)[:, None])


@triton.jit
def gate_rows_kernel(
    x, x_scales, gate, up, gate_scales, up_scales, out,
    M: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FEW: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute activation(x·gateᵀ) · (x·upᵀ) of BLOCK_N + FEW rows of weights, half of them gate's.

    x [M, K]; gate and up [F, K]; out [M, F]. e4m3 values have scales [M] and [F]. Grid (F / half · M / BLOCK_M):
    programs of the same weights are neighbors.
    """
    BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    first, rows = program // BLOCKS * ((BLOCK_N + FEW) // 2), program % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW, BLOCK_M), 0.0, tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_pairs(gate, up, first, k, F, K, BLOCK_N, BLOCK_K), values, acc)
        few = tl.dot(_load_pairs(gate, up, first + BLOCK_N // 2, k, F, K, FEW, BLOCK_K), values, few)
    _store_pairs(
        acc=few, first=first + BLOCK_N // 2, x_scales=x_scales, gate_scales=gate_scales, up_scales=up_scales, out=out,
        rows=rows, M=M, F=F, ROWS=FEW, BLOCK_M=BLOCK_M, GELU=GELU, ROUND=ROUND,
    )  # fmt: skip
    _store_pairs(
        acc=acc, first=first, x_scales=x_scales, gate_scales=gate_scales, up_scales=up_scales, out=out, rows=rows, M=M,
        F=F, ROWS=BLOCK_N, BLOCK_M=BLOCK_M, GELU=GELU, ROUND=ROUND,
    )  # fmt: skip


@triton.jit
def _of(first, values, N_0: tl.constexpr, N_1: tl.constexpr, COUNT: tl.constexpr):
    """Return the value of the weight that has row `first` of COUNT, one below the other."""
    value = values[0]
    if COUNT > 1:
        value = tl.where(first < N_0, value, values[1])
    if COUNT > 2:
        value = tl.where(first < N_0 + N_1, value, values[2])
    return value


@triton.jit
def _load_block(weights, first, k, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
                K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Load BLOCK_K columns of ROWS rows of the weight that has row `first`."""
    n = first - _of(first, (0, N_0, N_0 + N_1), N_0, N_1, COUNT) + tl.arange(0, ROWS)
    if (N_0 + N_1 + N_2) % ROWS != 0:
        n = tl.minimum(n, _of(first, (N_0, N_1, N_2), N_0, N_1, COUNT) - 1)  # other rows, which are not stored
    columns = k + tl.arange(0, BLOCK_K)
    at = _of(first, weights, N_0, N_1, COUNT) + n[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def many_rows_kernel(
    x, x_scales, weights, scales, outs,
    M: tl.constexpr, K: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ of COUNT weights; grid (Σ N_i / BLOCK_N · M / BLOCK_M), neighbors with the same weights.

    x [M, K]; weights [N_i, K], all but the last of whole blocks; outs [M, N_i]. e4m3 values have scales [M] and [N_i],
    and products are rounded before them, as in training.
    """
    BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    first, rows = program // BLOCKS * BLOCK_N, program % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_block(weights, first, k, N_0, N_1, N_2, COUNT, K, BLOCK_N, BLOCK_K), values, acc)
    dtype: tl.constexpr = outs[0].dtype.element_ty
    n = first - _of(first, (0, N_0, N_0 + N_1), N_0, N_1, COUNT) + tl.arange(0, BLOCK_N)
    N = _of(first, (N_0, N_1, N_2), N_0, N_1, COUNT)
    if x_scales is not None:
        acc = acc.to(dtype).to(tl.float32) * tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        acc *= tl.load(_of(first, scales, N_0, N_1, COUNT) + n, mask=n < N, other=0.0)[:, None]
    out = _of(first, outs, N_0, N_1, COUNT) + rows[None, :] * N + n[:, None]
    tl.store(out, acc.to(dtype), mask=(rows < M)[None, :] & (n < N)[:, None])
