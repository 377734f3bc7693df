"""Triton kernel of experts with few tokens each, as in decoding: every expert's matrix is read once, as it is stored.

As in `projection.few_rows_kernels`, matrices are the first operand of the matmul, whose instructions have 64 rows, and
the few tokens its second. Rows of x are those of one expert each, as `RowTiles` tabulates them.
"""

import triton
import triton.language as tl

from jaxglue.ops.projection.few_rows_kernels import nf4_scales, nf4_tile, settled


def _mxfp4_assembly() -> str:
    """Return instructions that decode the eight e2m1 codes of a word times a factor: 0, 4, 1, 5, 2, 6, 3 and 7.

    Codes of a pair are 16 bits apart. One integer multiplication puts both magnitude and sign of a code in the places
    of bfloat16's; it runs beside the logical operations, of which Hopper computes one for two instructions it starts.
    """
    lines = "{.reg .b32 c, w;\nshr.b32 w, $8, 8;\n"
    for pair in range(4):
        source, (mask, factor) = ("$8", "w")[pair // 2], ((0x000F000F, 0x1040), (0x00F000F0, 0x0104))[pair % 2]
        lines += f"""and.b32 c, {source}, {mask:#010x};  mul.lo.u32 c, c, {factor:#06x};  and.b32 c, c, 0x81C081C0;
        mul.rn.bf16x2 c, c, $9;  mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, c;
        """
    return lines + "}"


MXFP4_ASSEMBLY = tl.constexpr(_mxfp4_assembly())


@triton.jit
def _activate(gate, up, GPT_OSS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    if GPT_OSS:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        return gate / (1.0 + tl.exp(gate * (-1.0 * ALPHA))) * up
    elif GELU:  # see kernels.py
        return gate / (1.0 + tl.exp(-1.5957691216 * gate * (1.0 + 0.044715 * gate * gate))) * up
    else:
        return gate / (1.0 + tl.exp(gate * -1.0)) * up


@triton.jit
def _factors(exponents, PLAIN: tl.constexpr):
    """Return 2^(exponent − 127) in float32, or 2^(exponent − 1) in both halves of a word in bfloat16.

    Exponent and mantissa of a code, in the place of bfloat16's, are its value times 2⁻¹²⁶, zeros and 0.5 included. A
    block of values from 4 on, which no model has, would need a larger factor than bfloat16 holds, and has no numbers.
    """
    if PLAIN:  # for the interpreter, which knows neither bfloat16 nor instructions
        return tl.where(exponents == 0, 1 << 22, exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return (tl.minimum(exponents.to(tl.int32), 129) + 126) * 0x800080  # of 129 on, bfloat16's infinity


@triton.jit
def _decode(words, factors, PLAIN: tl.constexpr):
    """Return the values of codes 0, 4, 1, 5, 2, 6, 3 and 7 of words, times the factors."""
    if PLAIN:
        return (
            _decode_plain(words, 0) * factors, _decode_plain(words, 4) * factors,
            _decode_plain(words, 1) * factors, _decode_plain(words, 5) * factors,
            _decode_plain(words, 2) * factors, _decode_plain(words, 6) * factors,
            _decode_plain(words, 3) * factors, _decode_plain(words, 7) * factors,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            MXFP4_ASSEMBLY,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, factors],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16) * 2,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _decode_plain(words, index: tl.constexpr):
    code = (words >> (4 * index)) & 15
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = tl.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, mantissa * (126 << 23))
    return (magnitude | (code >> 3) << 31).to(tl.float32, bitcast=True)


@triton.jit
def _exponents(scales, rows, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the exponents of BLOCK_K columns of some rows."""
    block = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    return tl.load(scales + rows[:, None] * (K // 32) + block[None, :], mask=(block < K // 32)[None, :], other=127)


@triton.jit
def _mxfp4_words(blocks, rows, step, K: tl.constexpr, ROWS: tl.constexpr):
    """Load 128 columns of some rows of matrices in MXFP4: the first two words of every block, and the last two."""
    word = step * 16 + tl.arange(0, 16)
    at = blocks.to(tl.pointer_type(tl.int32), bitcast=True) + rows[:, None] * (K // 8) + word[None, :]
    if K % 128 != 0:
        words = tl.load(at, mask=(word < K // 8)[None, :], other=0, eviction_policy="evict_first")
    else:
        words = tl.load(at, eviction_policy="evict_first")
    first, last = tl.split(tl.permute(tl.reshape(words, (ROWS, 4, 2, 2)), (0, 1, 3, 2)))
    return tl.reshape(first, (ROWS, 8)), tl.reshape(last, (ROWS, 8))


@triton.jit
def _mxfp4_tile(words, exponents, ROWS: tl.constexpr, PLAIN: tl.constexpr):
    """Return the 64 columns of two words of each of four blocks, in the order "codes".

    A thread's operands of 64 columns are neighboring pairs 0, 4, 8, … of 32: in that order one block's, in one factor.
    """
    factors = _factors(exponents, PLAIN)
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], (ROWS, 4, 2)), (ROWS, 8))
    a, b, c, d, e, f, g, h = _decode(words, factors, PLAIN)
    values = tl.join(tl.join(tl.join(a, b), tl.join(e, f)), tl.join(tl.join(c, d), tl.join(g, h)))
    values = tl.reshape(values, (ROWS, 4, 2, 2, 4))  # blocks, words, halves, pairs
    return tl.reshape(tl.permute(values, (0, 2, 4, 1, 3)), (ROWS, 64))


@triton.jit
def _byte_tile(matrices, rows, scales, step, dtype: tl.constexpr, FACTOR: tl.constexpr, K: tl.constexpr,
               ROWS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return BLOCK_K columns of rows of matrices of one byte a value, rounded as training's, in the order "pairs"."""
    columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
    at = matrices + rows[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        values = tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(at, eviction_policy="evict_first")
    values = tl.permute(tl.reshape(values, (ROWS, BLOCK_K // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return (tl.reshape(values, (ROWS, BLOCK_K)).to(tl.float32) * (scales * FACTOR)[:, None]).to(dtype)


@triton.jit
def _places(columns, ORDER: tl.constexpr):
    """Return the places of columns in the order in which stored matrices are multiplied; see `few_rows.ordered`."""
    if ORDER == "codes":
        within = columns % 128
        columns = columns - within + within // 8 % 4 * 32 + within % 4 * 8 + within // 32 * 2 + within // 4 % 2
    elif ORDER == "pairs":
        within = columns % 32
        columns = columns - within + within % 8 // 2 * 8 + within // 8 * 2 + within % 2
    return columns


@triton.jit
def _rows(x, tokens, first, end, X_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return which of BLOCK_M rows are their group's, and where they are in x."""
    row = first + tl.arange(0, BLOCK_M)
    ours = row < end
    source = row
    if tokens is not None:
        source = tl.load(tokens + row, mask=ours, other=0)
    return ours, x + source.to(tl.int64)[:, None] * X_COLUMNS


@triton.jit
def _load_x(at, ours, columns, X_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    if X_COLUMNS % BLOCK_K != 0:
        return tl.load(at + columns[None, :], mask=ours[:, None] & (columns < X_COLUMNS)[None, :], other=0.0)
    else:
        return tl.load(at + columns[None, :], mask=ours[:, None], other=0.0)


@triton.jit
def _store(
    acc, biases, row_weights, out, first, end, column,
    N: tl.constexpr, OUT_COLUMNS: tl.constexpr, ORDER: tl.constexpr, GATED: tl.constexpr, GPT_OSS: tl.constexpr,
    GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile's products, or activations, and zeros beyond N columns."""
    row = first + tl.arange(0, BLOCK_M)
    ours = row < end
    if biases is not None:
        acc += biases[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
        weights = tl.load(row_weights + row, mask=ours, other=0.0)
        acc = _activate(gate, up, GPT_OSS, GELU, ALPHA, LIMIT) * weights[None, :]
    elif row_weights is not None:  # the one activation without a gate: max(up, 0)²
        positive = tl.maximum(acc, 0.0)
        acc = positive * positive * tl.load(row_weights + row, mask=ours, other=0.0)[None, :]
    columns = column + tl.arange(0, BLOCK_N)
    mask = (columns < N)[:, None] & ours[None, :]
    at = out + row.to(tl.int64)[None, :] * OUT_COLUMNS
    tl.store(at + _places(columns, ORDER)[:, None], acc.to(out.dtype.element_ty), mask=mask)
    if OUT_COLUMNS != N and column + BLOCK_N >= N:
        beyond = N + tl.arange(0, 128)
        zeros = tl.full((128, BLOCK_M), 0.0, out.dtype.element_ty)
        rest = (beyond < OUT_COLUMNS)[:, None] & ours[None, :]
        tl.store(at + _places(beyond, ORDER)[:, None], zeros, mask=rest)


@triton.jit
def _multiply(
    x, tokens, matrices, scales, nf4, lookup, bias, row_weights, out, group, first, end, n, column,
    K: tl.constexpr, N: tl.constexpr, X_COLUMNS: tl.constexpr, OUT_COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
    STORED: tl.constexpr, FACTOR: tl.constexpr, ORDER: tl.constexpr, PLAIN: tl.constexpr, GATED: tl.constexpr,
    GPT_OSS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
    MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows, and MORE after them, by rows n of the group's matrix; see `experts_kernel`."""
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ALL: tl.constexpr = 2 * N if GATED else N
    matrix = group.to(tl.int64) * ALL
    ours, at_x = _rows(x, tokens, first, end, X_COLUMNS, BLOCK_M)
    acc = tl.full((ROWS, BLOCK_M), 0.0, tl.float32)
    if MORE:
        ours_too, at_more = _rows(x, tokens, first + BLOCK_M, end, X_COLUMNS, MORE)
        more = tl.full((ROWS, MORE), 0.0, tl.float32)
    if STORED == "mxfp4":
        exponents = _exponents(scales, matrix + n, 0, K, BLOCK_K)
    elif STORED == "nf4":
        offset = tl.load(nf4[1])
        scale, factor = nf4_scales(scales, nf4[0], matrix + n, 0, K, BLOCK_K)
    elif STORED == "bytes":
        row_scales = tl.load(scales + matrix + n)
    # Values of a part of a step are decoded into registers, of which fewer leave room for more programs.
    PARTS: tl.constexpr = 2 if STORED == "mxfp4" else 1
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        if STORED == "mxfp4":
            words = _mxfp4_words(matrices, matrix + n, step, K, ROWS)
            # Single bytes are not loaded ahead by the compiler.
            following = _exponents(scales, matrix + n, step + 1, K, BLOCK_K)
        for part in tl.static_range(PARTS):
            columns = step * BLOCK_K + part * (BLOCK_K // PARTS) + tl.arange(0, BLOCK_K // PARTS)
            values = _load_x(at_x, ours, columns, X_COLUMNS, BLOCK_K)
            if MORE:
                values_too = _load_x(at_more, ours_too, columns, X_COLUMNS, BLOCK_K)
            if STORED == "mxfp4":
                w = _mxfp4_tile(words[part], exponents, ROWS, PLAIN).to(values.dtype)
            elif STORED == "nf4":
                next_scale, next_factor = nf4_scales(scales, nf4[0], matrix + n, step + 1, K, BLOCK_K)
                found = tl.load(nf4[2] + scale.to(tl.int32)) * factor + offset
                w = nf4_tile(matrices, matrix + n, step, found, lookup, values.dtype, K, ROWS, BLOCK_K)
                scale, factor = next_scale, next_factor
            elif STORED == "bytes":
                w = _byte_tile(matrices, matrix + n, row_scales, step, values.dtype, FACTOR, K, ROWS, BLOCK_K)
            elif TRANSPOSED:
                at = matrices + (matrix + n)[:, None] * K + columns[None, :]
                if K % BLOCK_K != 0:
                    w = tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
                else:
                    w = tl.load(at, eviction_policy="evict_first")
            else:
                at = matrices + (group.to(tl.int64) * K + columns)[:, None] * ALL + n[None, :]
                w = tl.trans(tl.load(at, mask=(columns < K)[:, None], other=0.0, eviction_policy="evict_first"))
            acc = tl.dot(w, tl.trans(values), acc)
            if MORE:
                more = tl.dot(w, tl.trans(values_too), more)
        if STORED == "mxfp4":
            exponents = following
        if STORED != "plain" and not PLAIN:
            acc = settled(acc)
            if MORE:
                more = settled(more)

    biases = None
    if bias is not None:
        biases = tl.load(bias + group * ALL + n).to(tl.float32)
    _store(
        acc=acc, biases=biases, row_weights=row_weights, out=out, first=first, end=end, column=column, N=N,
        OUT_COLUMNS=OUT_COLUMNS, ORDER=ORDER, GATED=GATED, GPT_OSS=GPT_OSS, GELU=GELU, ALPHA=ALPHA, LIMIT=LIMIT,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    if MORE:
        _store(
            acc=more, biases=biases, row_weights=row_weights, out=out, first=first + BLOCK_M, end=end, column=column,
            N=N, OUT_COLUMNS=OUT_COLUMNS, ORDER=ORDER, GATED=GATED, GPT_OSS=GPT_OSS, GELU=GELU, ALPHA=ALPHA,
            LIMIT=LIMIT, BLOCK_M=MORE, BLOCK_N=BLOCK_N,
        )  # fmt: skip


@triton.jit
def experts_kernel(
    x, tokens, matrices, scales, nf4, lookup, bias, row_weights, table, out,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, X_COLUMNS: tl.constexpr, OUT_COLUMNS: tl.constexpr,
    TILES: tl.constexpr, TRANSPOSED: tl.constexpr, STORED: tl.constexpr, FACTOR: tl.constexpr, ORDER: tl.constexpr,
    PLAIN: tl.constexpr, GATED: tl.constexpr, GPT_OSS: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, FEWER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by BLOCK_N columns of their expert's matrix; grid (TILES, ⌈N / BLOCK_N⌉).

    x [S, X_COLUMNS], or with `tokens` [S] x [M, X_COLUMNS], of which these are the rows; matrices [E, N, K], or
    [E, K, N] where they are not TRANSPOSED. GATED, there are 2N columns, alternately gate and up for GPT-OSS, else in
    two halves; out [S, OUT_COLUMNS], with zeros beyond N columns, is the activation times the rows' weights, where
    these are not None. STORED is
    "plain", "mxfp4", "bytes", whose rows have scales · FACTOR, or "nf4", with scales [E, N, K / 64] and nf4 the groups'
    factors, the offset and the scales' values. The columns of x are in the order of what is stored, those of out in
    ORDER. A tile has BLOCK_M rows; programs of a tile with fewer multiply by as few as FEWER names, in pairs of
    consecutive powers of two, of which the second may be zero, the fewest first.
    """
    table += tl.program_id(0)
    group, start = tl.load(table), tl.load(table + TILES)
    end, before = tl.load(table + 2 * TILES), tl.load(table + 3 * TILES)
    if group == E:  # the grid has room for the most tiles that groups of any sizes could need
        return
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    column, lane = tl.program_id(1) * BLOCK_N, tl.arange(0, ROWS)
    if not GATED:
        n = column + lane
        inside = n < N
    elif GPT_OSS:
        n = 2 * column + lane
        inside = n < 2 * N
    else:
        n = lane % 2 * N + column + lane // 2
        inside = column + lane // 2 < N
    if N % BLOCK_N != 0:
        n = tl.where(inside, n, 0)  # columns beyond the matrix are others, and not stored
    first = start + (tl.program_id(0) - before) * BLOCK_M
    FORMS: tl.constexpr = len(FEWER)
    for i in tl.static_range(FORMS):
        if end - first <= FEWER[i][0] + FEWER[i][1]:
            _multiply(
                x=x, tokens=tokens, matrices=matrices, scales=scales, nf4=nf4, lookup=lookup, bias=bias,
                row_weights=row_weights, out=out, group=group, first=first, end=end, n=n, column=column, K=K, N=N,
                X_COLUMNS=X_COLUMNS, OUT_COLUMNS=OUT_COLUMNS, TRANSPOSED=TRANSPOSED, STORED=STORED, FACTOR=FACTOR,
                ORDER=ORDER, PLAIN=PLAIN, GATED=GATED, GPT_OSS=GPT_OSS, GELU=GELU, ALPHA=ALPHA, LIMIT=LIMIT,
                BLOCK_M=FEWER[i][0], MORE=FEWER[i][1], BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            )  # fmt: skip
            return
    _multiply(
        x=x, tokens=tokens, matrices=matrices, scales=scales, nf4=nf4, lookup=lookup, bias=bias,
        row_weights=row_weights, out=out, group=group, first=first, end=end, n=n, column=column, K=K, N=N,
        X_COLUMNS=X_COLUMNS, OUT_COLUMNS=OUT_COLUMNS, TRANSPOSED=TRANSPOSED, STORED=STORED, FACTOR=FACTOR, ORDER=ORDER,
        PLAIN=PLAIN, GATED=GATED, GPT_OSS=GPT_OSS, GELU=GELU, ALPHA=ALPHA, LIMIT=LIMIT, BLOCK_M=BLOCK_M, MORE=0,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip


@triton.jit
def choose_kernel(
    logits, expert_ids, weights,
    E: tl.constexpr, X: tl.constexpr, SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Choose X of E experts for a token, of equal ones the first, and weigh them; grid (M)."""
    token, expert, choice = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_X)
    scores = tl.load(logits + token * E + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    chosen = tl.full([BLOCK_X], float("-inf"), tl.float32)
    ids = tl.full([BLOCK_X], 0, tl.int32)
    left = scores
    for i in tl.static_range(X):
        most = tl.max(left, 0)
        first = BLOCK_E - tl.max(tl.where(left == most, BLOCK_E - expert, 0), 0)
        best = tl.minimum(first, E - 1)  # none equals NaN
        chosen = tl.where(choice == i, most, chosen)
        ids = tl.where(choice == i, best, ids)
        left = tl.where(expert == best, float("-inf"), left)
    highest = tl.max(scores, 0)
    values = tl.exp(chosen - highest)
    if SOFTMAX_FIRST:
        values /= tl.sum(tl.exp(scores - highest), 0)
    if NORMALIZE:
        values /= tl.sum(tl.where(choice < X, values, 0.0), 0)
    tl.store(expert_ids + token * X + choice, ids, mask=choice < X)
    tl.store(weights + token * X + choice, values, mask=choice < X)


@triton.jit
def group_kernel(
    expert_ids, permutation, inverse, sizes, offsets, table,
    A: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Give the A assignments of one expert their rows, in their order, and tiles of ROWS of these; grid (E + 1).

    Every program counts those of all experts. The last one marks the tiles that are left over.
    """
    own, index, bins = tl.program_id(0), tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_E)
    ids = tl.load(expert_ids + index, mask=index < A, other=BLOCK_E - 1)  # a bin beyond the experts
    counts = tl.histogram(ids, BLOCK_E)
    before = tl.sum(tl.where(bins < own, (counts + ROWS - 1) // ROWS, 0), 0)
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    tile = before + tl.arange(0, BLOCK_T)
    tl.store(offsets + own, first)
    if own == E:
        tl.store(table + tile, tl.full([BLOCK_T], E, tl.int32), mask=tile < TILES)
        return
    ours = (ids == own) & (index < A)
    row = first + tl.cumsum(ours.to(tl.int32), 0) - 1
    tl.store(permutation + row, index, mask=ours)
    tl.store(inverse + index, row, mask=ours)
    tl.store(sizes + own, count)
    mask = tile < before + (count + ROWS - 1) // ROWS
    one = tl.full([BLOCK_T], 1, tl.int32)
    tl.store(table + tile, one * own, mask=mask)
    tl.store(table + TILES + tile, one * first, mask=mask)
    tl.store(table + 2 * TILES + tile, one * (first + count), mask=mask)
    tl.store(table + 3 * TILES + tile, one * before, mask=mask)
