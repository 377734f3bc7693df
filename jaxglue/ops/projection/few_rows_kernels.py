"""Triton kernel of projections of few rows, as in decoding: a weight is read once, in its stored form, by all rows.

A program computes all rows' products with BLOCK_N rows of a weight, over one of SPLITS parts of the sum, so that few
wide rows fill the GPU too. Weights are the matmul's first operand, whose instructions have 64 rows, and the rows of x
its second, which may have as few as 16. Up to three weights of one input share a launch, one after another; of a gated
feed-forward, gate and up share a program. The last program to finish a tile sums its parts in their order, so results
do not depend on who is last.

Values are rounded where training rounds them, so that log-probabilities of both are near: a product with a weight
before adapters, activation or stream, and an adapter's product before it is added to nothing else.

Programs of one launch wait for each other through `counters`, which are zeros before and after it: no other launch
clears them. Launches of a program run one after another, so all share them. The last one says whether the adapters'
inputs are at their ranks, and how many tiles have yet to read them: numbers that their programs add have the tiles as
their sum, while sums of some of them are beyond; each reader subtracts one, and waits for no answer.
"""

import numpy as np
import triton
import triton.language as tl

from jaxglue.ops.quant.nf4 import VALUES

LOG2_E = tl.constexpr(1.4426950408889634)


def _nf4_assembly() -> str:
    """Return instructions that look up eight NF4 codes, in four bytes, in bfloat16, and multiply by the bytes' scales.

    A permutation of bytes looks up four of eight bytes at a time, by three bits of each code: the values' low and high
    bytes are four tables, for codes below 8 and from 8 on, between which the codes' last bits choose: another
    permutation repeats these, as the signs of bytes, in all bits of a byte.
    """
    bits = (np.array(VALUES, np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)  # no value is a tie
    parts = (("l", bits & 255), ("h", bits >> 8))
    words = {f"{part}{i}": registers[4 * i : 4 * i + 4] for part, registers in parts for i in range(4)}
    tables = "".join(f"mov.b32 {name}, 0x{bytes(map(int, four))[::-1].hex()};\n" for name, four in words.items())
    lines = f"{{.reg .b32 {', '.join(words)}, a, b, c, d, i, m, s;\n{tables}"
    lines += "shl.b32 s, $4, 4;  and.b32 i, $4, 0x77777777;\n"
    for half, signs in ((0, "0x9D8C"), (1, "0xBFAE")):
        lines += f"""prmt.b32 a, l0, l1, i;  prmt.b32 b, l2, l3, i;  prmt.b32 c, h0, h1, i;  prmt.b32 d, h2, h3, i;
        prmt.b32 m, $4, s, {signs};  lop3.b32 a, a, b, m, 0xD8;  lop3.b32 c, c, d, m, 0xD8;
        prmt.b32 b, a, c, 0x7351;  mul.rn.bf16x2 ${half}, b, ${5 + half};
        prmt.b32 d, a, c, 0x6240;  mul.rn.bf16x2 ${2 + half}, d, ${5 + half};
        shr.b32 i, i, 16;
        """
    return lines + "}"


NF4_ASSEMBLY = tl.constexpr(_nf4_assembly())
BEYOND = tl.constexpr(1 << 20)
"""More than the tiles of a launch."""


@triton.jit
def settled(acc):
    """Return sums after the matmuls before have read their operands.

    The compiler would leave a step's last matmul running beside the next step, which decodes its operand into the
    registers that this matmul still reads; it waits for sums that something else than a matmul takes.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def arrive(counter):
    """Return how many programs arrived before, after all stores of this program."""
    tl.debug_barrier()  # one thread counts for all
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def activate(x, GELU: tl.constexpr):
    """Return silu(x), or GELU(x) in its tanh form."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp2(inner * (-2.0 * LOG2_E)))
    else:
        return x / (1.0 + tl.exp2(x * (-1.0 * LOG2_E)))


@triton.jit
def load_rows(x, rows, k, M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of rows of x [M, K], zeros beyond."""
    columns = k + tl.arange(0, BLOCK_K)
    at = x + rows[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(rows < M)[:, None] & (columns < K)[None, :], other=0.0)
    elif M % BLOCK_M != 0:
        return tl.load(at, mask=(rows < M)[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _load_weight(w, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of rows of w [N, K]; no other program reads them."""
    columns = k + tl.arange(0, BLOCK_K)
    at = w + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _matrix(w, rows, k, dtype: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK_K columns of rows of w in x's dtype, those of another dtype as `few_rows._permuted` orders them."""
    loaded = _load_weight(w, rows, k, K, BLOCK_K)
    if loaded.dtype != dtype:
        loaded = tl.permute(tl.reshape(loaded, (ROWS, BLOCK_K // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
        return tl.reshape(loaded, (ROWS, BLOCK_K)).to(dtype)
    else:
        return loaded


@triton.jit
def nf4_scales(blocks, groups, rows, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the scales' codes, and their groups' factors, of BLOCK_K columns of some rows."""
    COLUMNS: tl.constexpr = K // 64
    block = step * (BLOCK_K // 64) + tl.arange(0, BLOCK_K // 64)
    at, inside = rows.to(tl.int64)[:, None] * COLUMNS + block[None, :], (block < COLUMNS)[None, :]
    return tl.load(blocks + at, mask=inside, other=0), tl.load(groups + at // 256, mask=inside, other=0.0)


@triton.jit
def nf4_tile(codes, rows, step, scales, lookup, dtype: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
              BLOCK_K: tl.constexpr):  # fmt: skip
    """Return BLOCK_K columns of some rows of a weight in NF4."""
    return nf4_values(nf4_codes(codes, rows, step, K, BLOCK_K), scales, lookup, dtype, ROWS, BLOCK_K)


@triton.jit
def nf4_codes(codes, rows, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the codes of BLOCK_K columns of some rows, two in a byte."""
    byte = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    at = codes + rows.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(byte < K // 2)[None, :], other=0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def nf4_values(code, scales, lookup, dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the values of the codes of BLOCK_K columns, times the scales of their blocks."""
    HALF: tl.constexpr = BLOCK_K // 2
    code = tl.reshape(tl.permute(tl.reshape(code, (ROWS, HALF // 16, 4, 4)), (0, 1, 3, 2)), (ROWS, HALF))
    scale = tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, BLOCK_K // 64, 32)), (ROWS, HALF))
    if lookup is not None:  # for the interpreter, which knows no instructions
        even = tl.load(lookup + (code >> 4).to(tl.int32)) * scale
        odd = tl.load(lookup + (code & 15).to(tl.int32)) * scale
    else:
        both: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        even, odd = tl.inline_asm_elementwise(
            NF4_ASSEMBLY, "=r,=r,=r,=r,r,r,r", [code, scale.to(tl.bfloat16)], dtype=both, is_pure=True, pack=4
        )
    return tl.reshape(tl.join(even.to(dtype), odd.to(dtype)), (ROWS, BLOCK_K))


@triton.jit
def _shrink(
    source, down, norm_weight, inverse_rms, ranks_used, parts, low_rank, counter, unread, added, number,
    M: tl.constexpr, K: tl.constexpr, R: tl.constexpr, SHRINKS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a part of the adapters' input by a first matrix [R, K]; the last program of an adapter sums the parts.

    With norm_weight [K] and inverse_rms [M], the input is a norm's, whose output these make of it; with ranks_used
    [M, R], others are zeros. The last program of all adapters adds `added` to `unread`.
    """
    rows, ranks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    acc = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    # The input has two bytes a value, where steps are of as many values of one byte: as many stages take up to 475 KB.
    STAGES: tl.constexpr = 2 if BLOCK_K * (2 * BLOCK_M + 4 * BLOCK_R) > 45_000 else 3
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (number * STEPS + step) * BLOCK_K
        columns = k + tl.arange(0, BLOCK_K)
        inside = (ranks < R)[:, None] & (columns < K)[None, :]
        a = tl.load(down + ranks[:, None] * K + columns[None, :], mask=inside, other=0.0)
        if norm_weight is not None:
            a *= tl.load(norm_weight + columns, mask=columns < K, other=0.0)[None, :]
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        x = tl.load(source + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(a.to(x.dtype)), acc)
    tile = rows[:, None] * BLOCK_R + ranks[None, :]
    tl.store(parts + number * BLOCK_M * BLOCK_R + tile, acc)
    if arrive(counter) == SHRINKS - 1:
        total = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
        for other in tl.static_range(0, SHRINKS):
            total += tl.load(parts + other * BLOCK_M * BLOCK_R + tile, cache_modifier=".cg")
        if inverse_rms is not None:
            total *= tl.load(inverse_rms + rows, mask=rows < M, other=0.0)[:, None]
        if ranks_used is not None:
            inside = (rows < M)[:, None] & (ranks < R)[None, :]
            used = tl.load(ranks_used + rows[:, None] * R + ranks[None, :], mask=inside, other=0)
            total = tl.where(used != 0, total, 0.0)
        tl.store(low_rank + tile, total.to(low_rank.dtype.element_ty))
        tl.store(counter, 0)
        tl.debug_barrier()  # one thread signals that all have stored
        tl.atomic_add(unread, added, sem="release")


@triton.jit
def await_low_ranks(unread, TILES: tl.constexpr):
    """Wait until all adapters' inputs are at their ranks, and count this reader."""
    left = tl.atomic_add(unread, 0, sem="acquire")
    while (left < 1) | (left > TILES):
        left = tl.atomic_add(unread, 0, sem="acquire")
    tl.debug_barrier()  # one thread may have waited for all
    tl.atomic_add(unread, -1, sem="relaxed")


@triton.jit
def _load_up(up, rows, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load rows of an adapter's second matrix [N, R]."""
    ranks = tl.arange(0, BLOCK_R)
    return tl.load(up + rows[:, None] * R + ranks[None, :], mask=(ranks < R)[None, :], other=0.0)


@triton.jit
def _expand(acc, low_rank, b, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add the adapter's product with rows b of its second matrix."""
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    ranks = tl.load(low_rank + tile, cache_modifier=".cg")  # written by another program of this launch
    return tl.dot(b.to(ranks.dtype), tl.trans(ranks), acc)


@triton.jit
def few_rows_kernel(
    x, x_scales, weights, scales, blocks, groups, offsets, codes, lookup, biases, source, downs, ups, factors,
    norm_weight, inverse_rms, ranks_used, stream, counters, parts, low_ranks, low_rank_parts, outs,
    M: tl.constexpr, K: tl.constexpr, N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, COUNT: tl.constexpr,
    FIRST_1: tl.constexpr, FIRST_2: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, R: tl.constexpr, SHRINKS: tl.constexpr,
    SHRINK_STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, NF4: tl.constexpr, FACTOR: tl.constexpr, ROUND: tl.constexpr, ROUND_ADAPTER: tl.constexpr,
    E4M3: tl.constexpr, DECODED: tl.constexpr,
):  # fmt: skip
    """Compute x·Wᵀ of COUNT weights (+ adapters' products) (+ biases) (+ stream), or activation(gate)·up of two.

    x [M, K], M at most BLOCK_M; weights [N_i, K]; outs [M, N_i]. Grid (COUNT · SHRINKS + TILES · SPLITS): the first
    programs multiply `source`, the adapters' input, by their first matrices, and the others wait for these at the end.
    Values of one byte times x's dtype have scales [N_i] · FACTOR; e4m3 values of x have scales [M]. NF4 has codes
    [N_i, K / 2], and codes of scales in `blocks` [N_i, K / 64]: these are values of the table `codes`, times one of
    `groups` for each 256, plus one of `offsets`.
    Weights that registers take before the matmul are DECODED.
    Gate and up are rounded to e4m3 after multiplication by a factor E4M3, if this is not 0.
    counters: a count for each tile, then one for each adapter's parts, and one for readers of all adapters' inputs.
    """
    program = tl.program_id(0)
    if R > 0:
        if program < COUNT * SHRINKS:
            adapter = program // SHRINKS
            down = downs[0]
            for i in tl.static_range(1, COUNT):
                if adapter == i:
                    down = downs[i]
            _shrink(
                source=source, down=down, norm_weight=norm_weight, inverse_rms=inverse_rms, ranks_used=ranks_used,
                parts=low_rank_parts + adapter * SHRINKS * BLOCK_M * BLOCK_R,
                low_rank=low_ranks + adapter * BLOCK_M * BLOCK_R,
                counter=counters + TILES + adapter, unread=counters + TILES + COUNT,
                added=tl.where(adapter == 0, TILES - (COUNT - 1) * BEYOND, BEYOND), number=program % SHRINKS, M=M, K=K,
                R=R, SHRINKS=SHRINKS, STEPS=SHRINK_STEPS, BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K,
            )  # fmt: skip
            return
        program -= COUNT * SHRINKS
    tile, split = program // SPLITS, program % SPLITS
    w, column, end, which = weights[0], tile * BLOCK_N, N_0, 0
    if R > 0:
        matrix_up = ups[0]
    if NF4:
        block, group, offset = blocks[0], groups[0], tl.load(offsets[0])
    if not GATED:
        for i in tl.static_range(1, COUNT):
            first = FIRST_1 if i == 1 else FIRST_2
            if tile >= first:
                w, column, end, which = weights[i], (tile - first) * BLOCK_N, N_1 if i == 1 else N_2, i
                if R > 0:
                    matrix_up = ups[i]
                if NF4:
                    block, group, offset = blocks[i], groups[i], tl.load(offsets[i])
    n, rows = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    inside = n if WHOLE else tl.minimum(n, end - 1)  # rows beyond a weight are other rows, and not stored
    b, b_up, factor_0, factor_1 = None, None, None, None
    if R > 0:  # read before the sum, so that nothing but the low ranks is waited for after it
        b, factor_0 = _load_up(matrix_up, inside, R, BLOCK_R), tl.load(factors + which)
        if GATED:
            b_up, factor_1 = _load_up(ups[1], inside, R, BLOCK_R), tl.load(factors + 1)
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    up = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
    if NF4:
        scale, factor = nf4_scales(block, group, inside, split * STEPS, K, BLOCK_K)
        if GATED:
            up_offset = tl.load(offsets[1])
            up_scale, up_factor = nf4_scales(blocks[1], groups[1], inside, split * STEPS, K, BLOCK_K)
    for index in range(0, STEPS):
        step = split * STEPS + index
        k = step * BLOCK_K
        values = load_rows(x, rows, k, M, K, BLOCK_M, BLOCK_K)
        if NF4:
            # Single bytes are not loaded ahead by the compiler.
            next_scale, next_factor = nf4_scales(block, group, inside, step + 1, K, BLOCK_K)
            block_scale = tl.load(codes + scale.to(tl.int32)) * factor + offset
            scale, factor = next_scale, next_factor
            matrix = nf4_tile(w, inside, step, block_scale, lookup, values.dtype, K, BLOCK_N, BLOCK_K)
        else:
            matrix = _matrix(w, inside, k, values.dtype, K, BLOCK_N, BLOCK_K)
        acc = tl.dot(matrix, tl.trans(values), acc)
        if GATED:
            if NF4:
                next_scale, next_factor = nf4_scales(blocks[1], groups[1], inside, step + 1, K, BLOCK_K)
                block_scale = tl.load(codes + up_scale.to(tl.int32)) * up_factor + up_offset
                up_scale, up_factor = next_scale, next_factor
                matrix = nf4_tile(weights[1], inside, step, block_scale, lookup, values.dtype, K, BLOCK_N, BLOCK_K)
            else:
                matrix = _matrix(weights[1], inside, k, values.dtype, K, BLOCK_N, BLOCK_K)
            up = tl.dot(matrix, tl.trans(values), up)
        if DECODED:
            acc = settled(acc)
            if GATED:
                up = settled(up)

    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        WIDTH: tl.constexpr = 2 * SIZE if GATED else SIZE
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows[None, :]
        tile_parts = parts + tile.to(tl.int64) * SPLITS * WIDTH
        tl.store(tile_parts + split * WIDTH + at, acc)
        if GATED:
            tl.store(tile_parts + split * WIDTH + SIZE + at, up)
        if arrive(counters + tile) < SPLITS - 1:
            return
        tl.store(counters + tile, 0)
    if R > 0:
        await_low_ranks(counters + TILES + COUNT, TILES)
    if SPLITS > 1:
        acc = tl.load(tile_parts + at, cache_modifier=".cg")
        for other in range(1, SPLITS):
            acc += tl.load(tile_parts + other * WIDTH + at, cache_modifier=".cg")
        if GATED:
            up = tl.load(tile_parts + SIZE + at, cache_modifier=".cg")
            for other in range(1, SPLITS):
                up += tl.load(tile_parts + other * WIDTH + SIZE + at, cache_modifier=".cg")

    dtype: tl.constexpr = outs[0].dtype.element_ty
    if GATED:
        if E4M3 > 0:
            acc, up = _as_e4m3(acc, E4M3), _as_e4m3(up, E4M3)
        acc = _finish(
            acc=acc, WHICH=0, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks, b=b,
            factor=factor_0, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_0, M=M,
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        up = _finish(
            acc=up, WHICH=1, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks,
            b=b_up, factor=factor_1, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_0,
            M=M, BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        _store(activate(acc, GELU) * up, None, outs[0], n, rows, N_0, M, BLOCK_M, WHOLE)
    elif COUNT == 1:
        acc = _finish(
            acc=acc, WHICH=0, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks, b=b,
            factor=factor_0, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_0, M=M,
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        _store(acc, stream, outs[0], n, rows, N_0, M, BLOCK_M, WHOLE)
    elif tile < FIRST_1:
        acc = _finish(
            acc=acc, WHICH=0, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks, b=b,
            factor=factor_0, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_0, M=M,
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        _store(acc, None, outs[0], n, rows, N_0, M, BLOCK_M, WHOLE)
    elif tile < FIRST_2:
        acc = _finish(
            acc=acc, WHICH=1, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks, b=b,
            factor=factor_0, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_1, M=M,
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        _store(acc, None, outs[1], n, rows, N_1, M, BLOCK_M, WHOLE)
    elif COUNT > 2:
        acc = _finish(
            acc=acc, WHICH=2, x_scales=x_scales, scales=scales, FACTOR=FACTOR, biases=biases, low_ranks=low_ranks, b=b,
            factor=factor_0, n=n, rows=rows, dtype=dtype, ROUND=ROUND, ROUND_ADAPTER=ROUND_ADAPTER, R=R, N=N_2, M=M,
            BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
        )  # fmt: skip
        _store(acc, None, outs[2], n, rows, N_2, M, BLOCK_M, WHOLE)


@triton.jit
def _as_e4m3(acc, FACTOR: tl.constexpr):
    """Round sums, times a power of two, as training does for gate and up (`dot_to_e4m3`)."""
    return tl.clamp(acc * FACTOR, -448.0, 448.0).to(tl.float8e4nv).to(tl.float32) / FACTOR


@triton.jit
def _finish(
    acc, WHICH: tl.constexpr, x_scales, scales, FACTOR: tl.constexpr, biases, low_ranks, b, factor, n, rows,
    dtype: tl.constexpr, ROUND: tl.constexpr, ROUND_ADAPTER: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Apply scales, and add the adapter's product and the bias of one of the weights."""
    if ROUND and x_scales is not None:  # training's products of e4m3 values have no scales
        acc = acc.to(dtype).to(tl.float32)
    if x_scales is not None:
        acc *= tl.load(x_scales + rows, mask=rows < M, other=0.0)[None, :]
    if scales is not None:
        acc *= (tl.load(scales[WHICH] + n, mask=n < N, other=0.0) * FACTOR)[:, None]
    if ROUND and x_scales is None:
        acc = acc.to(dtype).to(tl.float32)
    if R > 0:
        ranks = low_ranks + WHICH * BLOCK_M * BLOCK_R
        if ROUND_ADAPTER:
            zeros = tl.full(acc.shape, 0.0, tl.float32)
            acc += _expand(zeros, ranks, b * factor, BLOCK_M, BLOCK_R).to(dtype).to(tl.float32)
        else:
            acc = _expand(acc, ranks, b * factor, BLOCK_M, BLOCK_R)
    if biases is not None:
        acc += tl.load(biases[WHICH] + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def _store(acc, stream, out, n, rows, N: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr):
    """Store a tile [n, rows] to out [M, N], after adding the stream's, if any."""
    at, mask = rows[None, :] * N + n[:, None], (rows < M)[None, :]
    if not WHOLE:
        mask = mask & (n < N)[:, None]
    if stream is not None:
        acc += tl.load(stream + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
