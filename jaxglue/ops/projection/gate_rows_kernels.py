"""Triton kernel of a gated feed-forward's first half for up to 256 rows, where multiplying takes as long as reading.

Each program reads all of x, from the L2 cache, so that its rate decides: a program takes three times 64 rows of weights
where registers hold them, 96 of gate and the same of up. That is a program for each multiprocessor of an H100 or H200
for 12,288 columns, where 64 or 128 rows would leave a third of them idle in the second turn.
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
    own = tl.minimum(first + rows // 16 * 8 + rows % 8, F - 1)  # rows beyond are other rows, and not stored
    columns = k + tl.arange(0, BLOCK_K)
    at = tl.where((rows % 16 < 8)[:, None], gate, up) + own[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _store_pairs(
    acc, first, x_scales, gate_scales, up_scales, out, rows, M: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store activation(gate) · up of sums in the order of `_load_pairs`."""
    dtype: tl.constexpr = out.dtype.element_ty
    if ROUND:
        acc = acc.to(dtype).to(tl.float32)
    pairs = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate, up = tl.reshape(gate, (ROWS // 2, BLOCK_M)), tl.reshape(up, (ROWS // 2, BLOCK_M))
    n = first + tl.arange(0, ROWS // 2)
    if x_scales is not None:
        row_scales = tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
        gate *= tl.load(gate_scales + n, mask=n < F, other=0.0)[:, None] * row_scales
        up *= tl.load(up_scales + n, mask=n < F, other=0.0)[:, None] * row_scales
    y = (activate(gate, GELU) * up).to(dtype)
    tl.store(out + rows[None, :] * F + n[:, None], y, mask=(rows < M)[None, :] & (n < F)[:, None])


@triton.jit
def gate_rows_kernel(
    x, x_scales, gate, up, gate_scales, up_scales, out,
    M: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FEW: tl.constexpr, GELU: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute activation(x·gateᵀ) · (x·upᵀ) of BLOCK_N + FEW rows of weights, half of them gate's; grid (F / half).

    x [M, K], M at most BLOCK_M; gate and up [F, K]; out [M, F]. e4m3 values have scales [M] and [F].
    """
    first, rows = tl.program_id(0) * ((BLOCK_N + FEW) // 2), tl.arange(0, BLOCK_M)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    few = tl.full((FEW if FEW > 0 else 16, BLOCK_M), 0.0, tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K
        values = tl.trans(load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K))
        acc = tl.dot(_load_pairs(gate, up, first, k, F, K, BLOCK_N, BLOCK_K), values, acc)
        if FEW > 0:
            few = tl.dot(_load_pairs(gate, up, first + BLOCK_N // 2, k, F, K, FEW, BLOCK_K), values, few)
    if FEW > 0:
        _store_pairs(few, first + BLOCK_N // 2, x_scales, gate_scales, up_scales, out, rows, M, F, FEW, BLOCK_M, GELU,
                     ROUND)  # fmt: skip
    _store_pairs(acc, first, x_scales, gate_scales, up_scales, out, rows, M, F, BLOCK_N, BLOCK_M, GELU, ROUND)
