"""Triton kernel of experts with few tokens each, as in decoding: every expert's matrix is read once, as it is stored.

As in `projection.few_rows_kernels`, matrices are the first operand of the matmul, whose instructions have 64 rows, and
the few tokens its second. Rows of x are those of one expert each, as `RowTiles` tabulates them.

The first programs of a launch multiply rows by their experts' first matrices of an adapter, while others read the
experts' own matrices; these wait for the rows' low ranks at the end, as in that file, each for those of its tile. So
adapters take no launches, and their matrices are read beside the others.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.moe.kernels import activate
from jaxglue.ops.projection.few_rows_kernels import (
    arrive,
    await_low_ranks,
    nf4_codes,
    nf4_scales,
    nf4_values,
    settled,
)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Constants of `experts_kernel`: sizes of the arrays, storage, activation, and tiles."""

    E: int
    K: int
    N: int
    """Columns of the result before zeros: of a gated product half of the matrices'."""
    x_columns: int
    """Columns of x, in the order of what is stored."""
    out_columns: int
    tiles: int
    """Most tiles that groups of any sizes could need."""
    transposed: bool
    """Matrices are [E, N, K]."""
    stored: str
    """Of the matrices: "plain", "mxfp4", "bytes", whose rows have scales · factor, or "nf4"."""
    factor: float
    order: str
    """Of the result's columns, as `_places` takes it."""
    plain: bool
    """For the interpreter, without instructions of a GPU."""
    gated: bool
    """The matrices have 2N columns: alternately gate and up for GPT-OSS, else in two halves."""
    gpt_oss: bool
    gelu: bool
    alpha: float
    limit: float
    block_m: int
    """Rows of a tile."""
    fewer: tuple[tuple[int, int], ...]
    """Fewer rows by which programs of a tile with as few multiply: pairs of consecutive powers of two, of which the
    second may be zero, the fewest first."""
    block_n: int
    block_k: int
    R: int = 0
    """Rank of the experts' adapter; 0 without."""
    block_r: int = 16
    low_columns: int = 0
    """Columns of the low ranks' array, where it has more than `block_r`."""
    shrinks: int = 1
    """Programs that share the sum of a tile's low ranks, of `shrink_steps` steps each."""
    shrink_steps: int = 0
    S: int = 0
    """Rows of all tiles, whose low ranks have parts; 0 where one program sums them."""
    factor_of_adapter: float = 1.0
    """Multiplies the adapter's second matrices."""
    exact: bool = False
    """The activation has training's bits."""


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
def _mxfp4_words(blocks, rows, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of some rows of matrices in MXFP4, eight in a word."""
    word = step * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
    at = blocks.to(tl.pointer_type(tl.int32), bitcast=True) + rows[:, None] * (K // 8) + word[None, :]
    if K % BLOCK_K != 0:
        return tl.load(at, mask=(word < K // 8)[None, :], other=0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _part(values, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Return one of 1, 2 or 4 equal parts of columns."""
    HALVINGS: tl.constexpr = COUNT // 2
    for halving in tl.static_range(HALVINGS):
        halves = tl.permute(tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        values = second if INDEX >> (HALVINGS - 1 - halving) & 1 else first
    return values


@triton.jit
def _words_of_part(words, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return two words of each of four blocks: the first two of 128 columns in even parts, the last two in odd ones."""
    words = _part(words, PART // 2, BLOCK_K // 128)
    first, last = tl.split(tl.permute(tl.reshape(words, (ROWS, 4, 2, 2)), (0, 1, 3, 2)))
    return tl.reshape(last if PART % 2 else first, (ROWS, 8))


@triton.jit
def _mxfp4_tile(words, factors, ROWS: tl.constexpr, PLAIN: tl.constexpr):
    """Return the 64 columns of two words of each of four blocks, in the order "codes".

    A thread's operands of 64 columns are neighboring pairs 0, 4, 8, … of 32: in that order one block's, in one factor.
    """
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], (ROWS, 4, 2)), (ROWS, 8))
    a, b, c, d, e, f, g, h = _decode(words, factors, PLAIN)
    values = tl.join(tl.join(tl.join(a, b), tl.join(e, f)), tl.join(tl.join(c, d), tl.join(g, h)))
    values = tl.reshape(values, (ROWS, 4, 2, 2, 4))  # blocks, words, halves, pairs
    return tl.reshape(tl.permute(values, (0, 2, 4, 1, 3)), (ROWS, 64))


@triton.jit
def _byte_tile(matrices, rows, scales, step, dtype: tl.constexpr, FACTOR: tl.constexpr, K: tl.constexpr,
               ROWS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return BLOCK_K columns of rows of matrices of one byte a value, in the order "pairs": rounded as training's, or
    without scales as they are stored."""
    columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
    at = matrices + rows[:, None] * K + columns[None, :]
    if K % BLOCK_K != 0:
        values = tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(at, eviction_policy="evict_first")
    values = _in_pairs(values, ROWS, BLOCK_K)
    if scales is None:
        return values.to(dtype)
    else:
        return (values.to(tl.float32) * (scales * FACTOR)[:, None]).to(dtype)


@triton.jit
def _in_pairs(values, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return columns in the order "pairs"; see `few_rows.ordered`."""
    return tl.reshape(tl.permute(tl.reshape(values, (ROWS, BLOCK_K // 32, 4, 4, 2)), (0, 1, 3, 2, 4)), (ROWS, BLOCK_K))


@triton.jit
def _in_codes(values, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return columns in the order "codes"; see `few_rows.ordered`."""
    values = tl.permute(tl.reshape(values, (ROWS, BLOCK_K // 128, 4, 4, 2, 4)), (0, 1, 3, 5, 2, 4))
    return tl.reshape(values, (ROWS, BLOCK_K))


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
def _powers(powers, tokens, first, end, BLOCK_M: tl.constexpr):
    """Load the powers of two by which BLOCK_M rows of x are smaller than they were."""
    row = first + tl.arange(0, BLOCK_M)
    source = row
    if tokens is not None:
        source = tl.load(tokens + row, mask=row < end, other=0)
    return tl.load(powers + source, mask=row < end, other=0.0)


@triton.jit
def _load_x(at, ours, columns, X_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    if X_COLUMNS % BLOCK_K != 0:
        return tl.load(at + columns[None, :], mask=ours[:, None] & (columns < X_COLUMNS)[None, :], other=0.0)
    else:
        return tl.load(at + columns[None, :], mask=ours[:, None], other=0.0)


@triton.jit
def _shrink(
    x, tokens, down, used, parts, low_ranks, unread, group, first, end, number, spec: tl.constexpr
):  # fmt: skip
    """Multiply a part of a tile's rows by their expert's first matrix [R, K]; the last program sums the parts.

    low_ranks [S, block_r] are rounded to x's dtype, as training's; with used [S, R], others are zeros. Their readers
    are then counted in `unread`, beyond whose counts of tiles those of the parts are.
    """
    ranks = tl.arange(0, spec.block_r)
    ours, at_x = _rows(x, tokens, first, end, spec.x_columns, spec.block_m)
    at_down = down + (group.to(tl.int64) * spec.R + ranks)[:, None] * spec.K
    acc = tl.full((spec.block_m, spec.block_r), 0.0, tl.float32)
    # As much shared memory as the other programs' loops take at most, so that no fewer of these run at a time.
    STAGES: tl.constexpr = 3 if spec.block_k * (2 * spec.block_m + 4 * spec.block_r) <= 24_576 else 2
    begin, steps = 0, tl.cdiv(spec.K, spec.block_k)
    if spec.shrinks > 1:
        begin = number * spec.shrink_steps
        steps = tl.minimum(steps, begin + spec.shrink_steps)
    for step in tl.range(begin, steps, num_stages=STAGES):
        columns = step * spec.block_k + tl.arange(0, spec.block_k)
        inside = (ranks < spec.R)[:, None] & (columns < spec.K)[None, :]
        a = tl.load(at_down + columns[None, :], mask=inside, other=0.0)
        values = _load_x(at_x, ours, columns, spec.x_columns, spec.block_k)
        a = a.to(values.dtype)
        if spec.stored == "mxfp4":
            a = _in_codes(a, spec.block_r, spec.block_k)
        elif spec.stored != "plain":
            a = _in_pairs(a, spec.block_r, spec.block_k)
        acc = tl.dot(values, tl.trans(a), acc)
    row = first + tl.arange(0, spec.block_m)
    at = row.to(tl.int64)[:, None] * spec.block_r + ranks[None, :]
    last = True
    if spec.shrinks > 1:
        tl.store(parts + number * spec.S * spec.block_r + at, acc, mask=ours[:, None])
        last = arrive(unread + spec.tiles) == spec.shrinks - 1
    if last:
        if spec.shrinks > 1:
            acc = tl.full((spec.block_m, spec.block_r), 0.0, tl.float32)
            SHRINKS: tl.constexpr = spec.shrinks
            for other in tl.static_range(SHRINKS):
                part = parts + other * spec.S * spec.block_r + at
                acc += tl.load(part, mask=ours[:, None], other=0.0, cache_modifier=".cg")
            tl.store(unread + spec.tiles, 0)
        if used is not None:
            mask = ours[:, None] & (ranks < spec.R)[None, :]
            uses = tl.load(used + row[:, None] * spec.R + ranks[None, :], mask=mask, other=0)
            acc = tl.where(uses != 0, acc, 0.0)
        if spec.low_columns > 0:
            at = row.to(tl.int64)[:, None] * spec.low_columns + ranks[None, :]
        tl.store(low_ranks + at, acc.to(low_ranks.dtype.element_ty), mask=ours[:, None])
        tl.debug_barrier()  # one thread signals that all have stored
        tl.atomic_add(unread, tl.cdiv(spec.N, spec.block_n), sem="release")


@triton.jit
def _load_up(up, rows, dtype: tl.constexpr, spec: tl.constexpr):
    """Load rows of an adapter's second matrices [N, R] times its factor."""
    ranks = tl.arange(0, spec.block_r)
    b = tl.load(up + rows[:, None] * spec.R + ranks[None, :], mask=(ranks < spec.R)[None, :], other=0.0)
    return (b.to(tl.float32) * spec.factor_of_adapter).to(dtype)


@triton.jit
def _expand(acc, b, low_ranks, first, end, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add the products of rows b [ROWS, R] of an adapter's second matrix: the sum goes on, and is rounded once."""
    row = first + tl.arange(0, BLOCK_M)
    at = low_ranks + row.to(tl.int64)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    # Written by another program of this launch.
    ranks = tl.load(at, mask=(row < end)[:, None], other=0.0, cache_modifier=".cg")
    return tl.dot(b, tl.trans(ranks), acc)


@triton.jit
def _store(acc, biases, row_weights, out, first, end, column, BLOCK_M: tl.constexpr, spec: tl.constexpr):
    """Store a tile's products, or activations, and zeros beyond N columns."""
    row = first + tl.arange(0, BLOCK_M)
    ours = row < end
    if biases is not None:
        acc += biases[:, None]
    if row_weights is not None:  # training stores what it activates
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
    if spec.gated:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (spec.block_n, 2, BLOCK_M)), (0, 2, 1)))
        weights = tl.load(row_weights + row, mask=ours, other=0.0)
        if spec.exact:
            acc, _, _ = activate(gate, up, spec.gpt_oss, spec.gelu, spec.alpha, spec.limit)
        else:
            acc = _activate(gate, up, spec.gpt_oss, spec.gelu, spec.alpha, spec.limit)
        acc *= weights[None, :]
    elif row_weights is not None:  # the one activation without a gate: max(up, 0)²
        positive = tl.maximum(acc, 0.0)
        acc = positive * positive * tl.load(row_weights + row, mask=ours, other=0.0)[None, :]
    columns = column + tl.arange(0, spec.block_n)
    mask = (columns < spec.N)[:, None] & ours[None, :]
    at = out + row.to(tl.int64)[None, :] * spec.out_columns
    tl.store(at + _places(columns, spec.order)[:, None], acc.to(out.dtype.element_ty), mask=mask)
    if spec.out_columns != spec.N and column + spec.block_n >= spec.N:
        beyond = spec.N + tl.arange(0, 128)
        zeros = tl.full((128, BLOCK_M), 0.0, out.dtype.element_ty)
        rest = (beyond < spec.out_columns)[:, None] & ours[None, :]
        tl.store(at + _places(beyond, spec.order)[:, None], zeros, mask=rest)


@triton.jit
def _multiply(
    x, powers, tokens, matrices, scales, nf4, lookup, bias, row_weights, up, unread, low_ranks, out, group, first, end,
    n, column, BLOCK_M: tl.constexpr, MORE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows, and MORE after them, by rows n of the group's matrix; see `experts_kernel`."""
    ROWS: tl.constexpr = 2 * spec.block_n if spec.gated else spec.block_n
    ALL: tl.constexpr = 2 * spec.N if spec.gated else spec.N
    matrix = group.to(tl.int64) * ALL
    ours, at_x = _rows(x, tokens, first, end, spec.x_columns, BLOCK_M)
    acc = tl.full((ROWS, BLOCK_M), 0.0, tl.float32)
    if MORE:
        ours_too, at_more = _rows(x, tokens, first + BLOCK_M, end, spec.x_columns, MORE)
        more = tl.full((ROWS, MORE), 0.0, tl.float32)
    if spec.stored == "mxfp4":
        exponents = _exponents(scales, matrix + n, 0, spec.K, spec.block_k)
    elif spec.stored == "nf4":
        offset = tl.load(nf4[1])
        scale, factor = nf4_scales(scales, nf4[0], matrix + n, 0, spec.K, spec.block_k)
    elif spec.stored == "bytes":
        row_scales = tl.load(scales + matrix + n)
    if spec.R > 0:  # read before the sum, so that nothing but the low ranks is waited for after it
        b = _load_up(up, matrix + n, low_ranks.dtype.element_ty, spec)
    # Values of a part of a step are decoded into registers, of which fewer leave room for more programs. Where a step
    # reads 64 bytes of a row, longer steps read more of it at once: 256 columns a whole line of 128.
    WIDTH: tl.constexpr = 64 if spec.stored == "mxfp4" else 128 if spec.stored == "nf4" else spec.block_k
    PARTS: tl.constexpr = spec.block_k // WIDTH if spec.block_k > WIDTH else 1
    COLUMNS: tl.constexpr = spec.block_k // PARTS
    for step in range(0, tl.cdiv(spec.K, spec.block_k)):
        if spec.stored == "mxfp4":
            words = _mxfp4_words(matrices, matrix + n, step, spec.K, spec.block_k)
            factors = _factors(exponents, spec.plain)  # single bytes are not loaded ahead by the compiler
            exponents = _exponents(scales, matrix + n, step + 1, spec.K, spec.block_k)
        elif spec.stored == "nf4":
            codes = nf4_codes(matrices, matrix + n, step, spec.K, spec.block_k)
            next_scale, next_factor = nf4_scales(scales, nf4[0], matrix + n, step + 1, spec.K, spec.block_k)
            block_scales = tl.load(nf4[2] + scale.to(tl.int32)) * factor + offset
            scale, factor = next_scale, next_factor
        for part in tl.static_range(PARTS):
            columns = step * spec.block_k + part * COLUMNS + tl.arange(0, COLUMNS)
            values = _load_x(at_x, ours, columns, spec.x_columns, spec.block_k)
            if MORE:
                values_too = _load_x(at_more, ours_too, columns, spec.x_columns, spec.block_k)
            if spec.stored == "mxfp4":
                factor = _part(factors, part // 2, PARTS // 2)
                these = _words_of_part(words, part, ROWS, spec.block_k)
                w = _mxfp4_tile(these, factor, ROWS, spec.plain).to(values.dtype)
            elif spec.stored == "nf4":
                code, block_scale = _part(codes, part, PARTS), _part(block_scales, part, PARTS)
                w = nf4_values(code, block_scale, lookup, values.dtype, ROWS, COLUMNS)
            elif spec.stored == "bytes":
                each = None if powers is not None else row_scales
                w = _byte_tile(matrices, matrix + n, each, step, values.dtype, spec.factor, spec.K, ROWS, spec.block_k)
            elif spec.transposed:
                at = matrices + (matrix + n)[:, None] * spec.K + columns[None, :]
                if spec.K % spec.block_k != 0:
                    w = tl.load(at, mask=(columns < spec.K)[None, :], other=0.0, eviction_policy="evict_first")
                else:
                    w = tl.load(at, eviction_policy="evict_first")
            else:
                at = matrices + (group.to(tl.int64) * spec.K + columns)[:, None] * ALL + n[None, :]
                w = tl.trans(tl.load(at, mask=(columns < spec.K)[:, None], other=0.0, eviction_policy="evict_first"))
            acc = tl.dot(w, tl.trans(values), acc)
            if MORE:
                more = tl.dot(w, tl.trans(values_too), more)
        if spec.stored != "plain" and not spec.plain:
            acc = settled(acc)
            if MORE:
                more = settled(more)

    if powers is not None:
        acc *= (row_scales * spec.factor)[:, None] * _powers(powers, tokens, first, end, BLOCK_M)[None, :]
        if MORE:
            more *= (row_scales * spec.factor)[:, None] * _powers(powers, tokens, first + BLOCK_M, end, MORE)[None, :]
    if spec.R > 0:
        await_low_ranks(unread, tl.cdiv(spec.N, spec.block_n))
        acc = _expand(acc, b, low_ranks, first, end, BLOCK_M, spec.block_r)
        if MORE:
            more = _expand(more, b, low_ranks, first + BLOCK_M, end, MORE, spec.block_r)
    biases = None
    if bias is not None:
        biases = tl.load(bias + group * ALL + n).to(tl.float32)
    _store(
        acc=acc, biases=biases, row_weights=row_weights, out=out, first=first, end=end, column=column, BLOCK_M=BLOCK_M,
        spec=spec,
    )  # fmt: skip
    if MORE:
        _store(
            acc=more, biases=biases, row_weights=row_weights, out=out, first=first + BLOCK_M, end=end, column=column,
            BLOCK_M=MORE, spec=spec,
        )  # fmt: skip


@triton.jit
def experts_kernel(
    x, powers, x_of_adapter, tokens, matrices, scales, nf4, lookup, bias, row_weights, table, adapter, used, parts,
    low_ranks, out, spec: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by block_n columns of their expert's matrix; grid (tiles, ⌈N / block_n⌉).

    x [S, x_columns], or with `tokens` [S] x [M, x_columns], of which these are the rows; matrices [E, N, K], or
    [E, K, N] where they are not transposed, with 2N columns where they are gated. Scales are [E, N, K / 64] for NF4,
    with nf4 the groups' factors, the offset and the scales' values. out [S, out_columns], with zeros beyond N columns,
    is the product, or with `row_weights` the activation times these. With `powers` [S or M], x are rows divided by
    these in float16, which holds values of one byte exactly, so that scales multiply sums; adapters then multiply
    x_of_adapter, the rows as they were.

    An adapter is first matrices [E, R, K], second ones [E, N or 2N, R], and for each tile counts of programs that have
    yet to read its low ranks and of those that summed parts of them, zeros before and after the launch; see
    `few_rows_kernels` of projections. The grid then has `shrinks` rows of programs more, the first ones, that compute
    low_ranks [S, block_r], from parts [shrinks, S, block_r] where there are several. A row may use some of them alone.
    """
    table += tl.program_id(0)
    group, start = tl.load(table), tl.load(table + spec.tiles)
    end, before = tl.load(table + 2 * spec.tiles), tl.load(table + 3 * spec.tiles)
    if group == spec.E:  # the grid has room for the most tiles that groups of any sizes could need
        return
    first = start + (tl.program_id(0) - before) * spec.block_m
    tile, up, unread = tl.program_id(1), None, None
    if spec.R > 0:
        down, up, unread = adapter[0], adapter[1], adapter[2] + tl.program_id(0)
        if tile < spec.shrinks:
            _shrink(
                x=x if x_of_adapter is None else x_of_adapter, tokens=tokens, down=down, used=used, parts=parts,
                low_ranks=low_ranks, unread=unread, group=group, first=first, end=end, number=tile, spec=spec,
            )  # fmt: skip
            return
        tile -= spec.shrinks
    ROWS: tl.constexpr = 2 * spec.block_n if spec.gated else spec.block_n
    column, lane = tile * spec.block_n, tl.arange(0, ROWS)
    if not spec.gated:
        n = column + lane
        inside = n < spec.N
    elif spec.gpt_oss:
        n = 2 * column + lane
        inside = n < 2 * spec.N
    else:
        n = lane % 2 * spec.N + column + lane // 2
        inside = column + lane // 2 < spec.N
    if spec.N % spec.block_n != 0:
        n = tl.where(inside, n, 0)  # columns beyond the matrix are others, and not stored
    FORMS: tl.constexpr = len(spec.fewer)
    for i in tl.static_range(FORMS):
        if end - first <= spec.fewer[i][0] + spec.fewer[i][1]:
            _multiply(
                x=x, powers=powers, tokens=tokens, matrices=matrices, scales=scales, nf4=nf4, lookup=lookup, bias=bias,
                row_weights=row_weights, up=up, unread=unread, low_ranks=low_ranks, out=out, group=group, first=first,
                end=end, n=n, column=column, BLOCK_M=spec.fewer[i][0], MORE=spec.fewer[i][1], spec=spec,
            )  # fmt: skip
            return
    _multiply(
        x=x, powers=powers, tokens=tokens, matrices=matrices, scales=scales, nf4=nf4, lookup=lookup, bias=bias,
        row_weights=row_weights, up=up, unread=unread, low_ranks=low_ranks, out=out, group=group, first=first, end=end,
        n=n, column=column, BLOCK_M=spec.block_m, MORE=0, spec=spec,
    )  # fmt: skip


@triton.jit
def shrink_kernel(x, table, down, counts, used, parts, low_ranks, spec: tl.constexpr):
    """Multiply rows by their experts' first matrices of an adapter, for another launch; grid (tiles, shrinks).

    x [S, x_columns]; counts [2, tiles] are zeros before and after the launch; see `experts_kernel`, of N = 0.
    """
    table += tl.program_id(0)
    group, start = tl.load(table), tl.load(table + spec.tiles)
    end, before = tl.load(table + 2 * spec.tiles), tl.load(table + 3 * spec.tiles)
    if group < spec.E:
        _shrink(
            x=x, tokens=None, down=down, used=used, parts=parts, low_ranks=low_ranks,
            unread=counts + tl.program_id(0), group=group, first=start + (tl.program_id(0) - before) * spec.block_m,
            end=end, number=tl.program_id(1), spec=spec,
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
    expert, index, bins = tl.program_id(0), tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_E)
    ids = tl.load(expert_ids + index, mask=index < A, other=BLOCK_E - 1)  # a bin beyond the experts
    counts = tl.histogram(ids, BLOCK_E)
    before = tl.sum(tl.where(bins < expert, (counts + ROWS - 1) // ROWS, 0), 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tile = before + tl.arange(0, BLOCK_T)
    tl.store(offsets + expert, first)
    if expert == E:
        tl.store(table + tile, tl.full([BLOCK_T], E, tl.int32), mask=tile < TILES)
        return
    ours = (ids == expert) & (index < A)
    row = first + tl.cumsum(ours.to(tl.int32), 0) - 1
    tl.store(permutation + row, index, mask=ours)
    tl.store(inverse + index, row, mask=ours)
    tl.store(sizes + expert, count)
    mask = tile < before + (count + ROWS - 1) // ROWS
    one = tl.full([BLOCK_T], 1, tl.int32)
    tl.store(table + tile, one * expert, mask=mask)
    tl.store(table + TILES + tile, one * first, mask=mask)
    tl.store(table + 2 * TILES + tile, one * (first + count), mask=mask)
    tl.store(table + 3 * TILES + tile, one * before, mask=mask)
