"""Gluon kernel for Hopper of experts in MXFP4 with few tokens each: one warp loads tiles through TMA into a ring.

Warpgroups of a program multiply 64 rows of a matrix each by the same few tokens: they decode a tile's codes in
registers, the first operand of the matmul, while the ring's other places are filled. Programs compute one part of the
result after another, so that the ring is full when a part begins.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxglue.ops.moe.few_rows_kernels import MXFP4_ASSEMBLY
from jaxglue.ops.tile_ring import GROUP_ROWS, Ring, await_place, barriers, release, vacate

WIDTH = gl.constexpr(128)
"""Columns of a matrix in a tile, in whose order "codes" a thread has one block of 32."""


@dataclass(frozen=True, kw_only=True)
class RingSpec:
    """Constants of `ring_kernel`: sizes of the arrays, activation, and tiles."""

    E: int
    K: int
    rows: int
    """Rows of an expert's matrix."""
    out_columns: int
    tiles: int
    """Most tiles that groups of any sizes could need."""
    gated: bool
    """Rows are alternately gate and up, activated as GPT-OSS does."""
    alpha: float
    limit: float
    block_m: int
    """Rows of a tile of tokens: 16, 32 or 64."""
    groups: int
    """Warpgroups that multiply, two or three."""
    stages: int
    """Places of the ring."""
    programs: int
    registers: tuple[int, int]
    """Registers of a thread that multiplies, and of one that loads."""
    R: int = 0
    """Rank of the experts' adapter; 0 without."""
    factor: float = 1.0
    """Multiplies the adapter's second matrices."""

    @property
    def ranks(self) -> int:
        """Return the ranks that are multiplied, zeros among them: 16, 32 or 64."""
        return max(16, 1 << (self.R - 1).bit_length())

    @property
    def places(self) -> int:
        """Return the places that a part of the result takes: tiles of a row, and the low ranks."""
        return self.steps + (self.R > 0)

    @property
    def steps(self) -> int:
        """Return the tiles of a row."""
        return -(-self.K // 128)

    @property
    def blocks(self) -> int:
        """Return the parts of a matrix's rows."""
        return -(-self.rows // (64 * self.groups))

    @property
    def items(self) -> int:
        """Return the parts of the result."""
        return self.tiles * self.blocks

    @property
    def columns(self) -> int:
        """Return the columns of the result before zeros."""
        return self.rows // 2 if self.gated else self.rows


@gluon.constexpr_function
def _words_layout():
    """Return the layout of two words of each of four blocks, of 64 rows; rows 2i and 2i + 1 are one thread's."""
    lanes = [[0, 1, 0], [0, 2, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [1, 0, 0]], lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 2])


@gluon.constexpr_function
def _flat_words_layout():
    """Return the layout of 16 words of 64 rows, those of `_words_layout`."""
    lanes = [[0, 4], [0, 8], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [1, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.constexpr_function
def _sums_layout(rows: int):
    """Return the layout of every other sum: [4, 8] of a warpgroup's rows, by so many tokens."""
    more = [[0, 0, 1 << bit] for bit in range(3, rows.bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], *more], lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 8, rows])


@gluon.jit
def _assignment(table, item, spec: gl.constexpr):
    """Return (group, first row, row after the group's last, row of the matrix) of a part of the result."""
    BLOCKS: gl.constexpr = spec.blocks
    tile, block = item // BLOCKS, item % BLOCKS
    group, start = gl.load(table + tile), gl.load(table + spec.tiles + tile)
    end, before = gl.load(table + 2 * spec.tiles + tile), gl.load(table + 3 * spec.tiles + tile)
    return group, start + (tile - before) * spec.block_m, end, block * (GROUP_ROWS * spec.groups)


@gluon.jit
def _as_rows(values, ROWS: gl.constexpr):
    """Return places of 64 columns for so many rows of x; there are as many times more of them."""
    LAYOUT: gl.constexpr = values.layout
    COUNT: gl.constexpr = values.shape[0] * (values.shape[1] // ROWS)
    return values._reinterpret(values.dtype, [COUNT, ROWS, 64], LAYOUT)


@gluon.jit
def _load_values(x, values, place, full, row, step, FIRST: gl.constexpr, HALVES: gl.constexpr):
    """Load rows of x of a step, or of its first half, to their place from its FIRST row on."""
    ROWS: gl.constexpr = x.block_type.shape[0]
    PARTS: gl.constexpr = values.shape[1] // ROWS
    view = _as_rows(values, ROWS)
    for half in gl.static_range(HALVES):
        to = view.index((2 * place + half) * PARTS + FIRST // ROWS)
        tma.async_copy_global_to_shared(x, [row, step * WIDTH + half * 64], full, to)


@gluon.jit
def _load_part(codes, x, more, low, low_more, ring, values, n, row, first, MORE: gl.constexpr, spec: gl.constexpr):
    """Load all tiles of a part of the result, from the n-th place on, and then low ranks."""
    GROUPS: gl.constexpr = spec.groups
    LEAST: gl.constexpr = GROUPS * codes.block_type.nbytes + 2 * x.block_type.nbytes
    BYTES: gl.constexpr = LEAST + 2 * more.block_type.nbytes if MORE else LEAST
    FIRST: gl.constexpr = x.block_type.shape[0]
    STEPS: gl.constexpr = spec.steps
    for step in range(0, STEPS):
        place, full = vacate(ring, n + step, BYTES)
        for group in gl.static_range(GROUPS):
            at = [row + group * GROUP_ROWS, step * (WIDTH // 2)]
            tma.async_copy_global_to_shared(codes, at, full, ring.tiles.index(place * GROUPS + group))
        _load_values(x, values, place, full, first, step, 0, 2)
        if MORE:
            _load_values(more, values, place, full, first + FIRST, step, FIRST, 2)
    if spec.R > 0:
        LOW: gl.constexpr = low.block_type.nbytes
        place, full = vacate(ring, n + STEPS, LOW + low_more.block_type.nbytes if MORE else LOW)
        _load_values(low, values, place, full, first, 0, 0, 1)
        if MORE:
            _load_values(low_more, values, place, full, first + FIRST, 0, FIRST, 1)


@gluon.jit
def _load_tiles(codes, x_16, x_32, x_64, low_16, low_32, low_64, table, ring, values, spec: gl.constexpr):
    """Load the tiles of all parts of a program."""
    n = 0
    ITEMS: gl.constexpr = spec.items
    PLACES: gl.constexpr = spec.places
    for item in range(gl.program_id(0), ITEMS, spec.programs):
        group, first, end, row = _assignment(table, item, spec)
        if group < spec.E:
            row += group * spec.rows
            count = end - first
            if spec.block_m == 16:
                _load_part(codes, x_16, x_16, low_16, low_16, ring, values, n, row, first, False, spec)
            elif spec.block_m == 32:
                if count <= 16:
                    _load_part(codes, x_16, x_16, low_16, low_16, ring, values, n, row, first, False, spec)
                else:
                    _load_part(codes, x_32, x_32, low_32, low_32, ring, values, n, row, first, False, spec)
            else:
                if count <= 32:
                    _load_part(codes, x_32, x_32, low_32, low_32, ring, values, n, row, first, False, spec)
                elif count <= 48:
                    _load_part(codes, x_32, x_16, low_32, low_16, ring, values, n, row, first, True, spec)
                else:
                    _load_part(codes, x_64, x_64, low_64, low_64, ring, values, n, row, first, False, spec)
            n += PLACES


@gluon.jit
def _exponents(scales, rows, step, spec: gl.constexpr):
    """Load the exponents of a tile of rows, one of each 32 columns; beyond the last column this one's."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, rows.type.layout.parent)
    blocks = gl.minimum(step * (WIDTH // 32) + gl.arange(0, 4, layout=LAYOUT), spec.K // 32 - 1)
    return gl.load(scales + rows[:, None] * (spec.K // 32) + blocks[None, :]).to(gl.int32)


@gluon.jit
def _decode(words, exponents, OPERAND: gl.constexpr):
    """Return 64 columns of values of two words of each of four blocks, rows 2i and 2i + 1 of 16 as i and i + 8."""
    # 2^(exponent − 1) in both halves of a word; see `few_rows_kernels`.
    factors = gl.minimum(exponents, 129) * 0x800080 + 126 * 0x800080
    words, factors = gl.broadcast(words, factors[:, :, None])
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        MXFP4_ASSEMBLY,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factors],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    values = gl.join(gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h)))
    values = values.reshape([4, 8, 2, 4, 2, 2, 4])  # warps, pairs of rows, rows; blocks, words, halves, pairs
    values = values.permute((0, 2, 1, 4, 6, 3, 5)).reshape([64, 64])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _multiply(scales, up, ring, values, n, row, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, spec: gl.constexpr):
    """Return products of 64 rows with BLOCK_M tokens, from the n-th place on."""
    WORDS: gl.constexpr = _words_layout()
    FLAT: gl.constexpr = _flat_words_layout()
    CODES: gl.constexpr = gl.NVMMASharedLayout(64, 32, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    GROUPS: gl.constexpr = spec.groups
    STEPS: gl.constexpr = spec.steps
    PARTS: gl.constexpr = values.shape[1] // BLOCK_M
    codes = ring.tiles._reinterpret(gl.int32, [ring.tiles.shape[0], 64, 16], CODES)
    x = _as_rows(values, BLOCK_M)
    acc = gl.zeros([64, BLOCK_M], gl.float32, layout=ACC)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    rows = gl.minimum(rows, spec.E * spec.rows - 1)
    now, then = _exponents(scales, rows, 0, spec), _exponents(scales, rows, 1, spec)
    if spec.R > 0:  # asked for before the sum, which hides it
        b = _second_matrix(up, row, OPERAND, spec)
    for step in range(0, STEPS):
        place = await_place(ring, n + step)
        words = codes.index(place * GROUPS + GROUP).load(FLAT)
        first, second = words.reshape([64, 4, 2, 2]).permute((0, 1, 3, 2)).split()
        w = _decode(gl.convert_layout(first, WORDS, assert_trivial=True), now, OPERAND)
        acc = warpgroup_mma(w, x.index(2 * place * PARTS).permute((1, 0)), acc, is_async=True)
        v = _decode(gl.convert_layout(second, WORDS, assert_trivial=True), now, OPERAND)
        acc = warpgroup_mma(v, x.index((2 * place + 1) * PARTS).permute((1, 0)), acc, is_async=True)
        acc, w, v = warpgroup_mma_wait(0, deps=[acc, w, v])
        release(ring, n + step)
        now, then = then, _exponents(scales, rows, step + 2, spec)
    if spec.R > 0:
        RANKS: gl.constexpr = spec.ranks
        b = (b.to(gl.float32) * spec.factor).to(x.dtype)
        place = await_place(ring, n + STEPS)
        low_ranks = x.index(2 * place * PARTS).slice(0, RANKS, dim=1).permute((1, 0))
        acc = warpgroup_mma(b, low_ranks, acc, is_async=True)
        acc, b = warpgroup_mma_wait(0, deps=[acc, b])
        release(ring, n + STEPS)
    return acc


@gluon.jit
def _second_matrix(up, row, OPERAND: gl.constexpr, spec: gl.constexpr):
    """Return 64 rows of the adapter's second matrices, in the order of `_decode`."""
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))
    rows = gl.minimum(row + lane // 16 * 16 + lane % 8 * 2 + lane // 8 % 2, spec.E * spec.rows - 1)
    ranks = gl.arange(0, spec.ranks, layout=gl.SliceLayout(0, OPERAND))
    return gl.load(up + rows[:, None] * spec.R + ranks[None, :], mask=(ranks < spec.R)[None, :], other=0.0)


@gluon.jit
def _places(columns):
    """Return the places of columns in the order "codes"; see `few_rows.ordered`."""
    within = columns % 128
    return columns - within + within // 8 % 4 * 32 + within % 4 * 8 + within // 32 * 2 + within // 4 % 2


@gluon.jit
def _store(acc, bias, row_weights, out, group, first, end, row, spec: gl.constexpr):
    """Store products of 64 rows of a group's matrix, or activations, and zeros beyond N columns."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    SUMS: gl.constexpr = _sums_layout(BLOCK_M)
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SUMS))
    dtype: gl.constexpr = out.dtype.element_ty
    even, odd = acc.reshape([4, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)).split()
    even = gl.convert_layout(even, SUMS, assert_trivial=True)
    odd = gl.convert_layout(odd, SUMS, assert_trivial=True)
    pair = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None] * 8
    pair += gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    pair = row // 2 + pair[:, :, None]
    tokens = gl.arange(0, BLOCK_M, layout=TOKENS) + first
    inside = (tokens < end)[None, None, :] & (pair < spec.rows // 2)
    at = out + (tokens.to(gl.int64) * spec.out_columns)[None, None, :]
    if bias is not None:
        matrix = bias + group * spec.rows + 2 * pair
        even += gl.load(matrix, mask=pair < spec.rows // 2, other=0.0).to(gl.float32)
        odd += gl.load(matrix + 1, mask=pair < spec.rows // 2, other=0.0).to(gl.float32)
    if spec.gated:
        weights = gl.load(row_weights + tokens, mask=tokens < end, other=0.0)[None, None, :]
        gate = gl.minimum(even.to(dtype).to(gl.float32), spec.limit)  # training stores what it activates
        up = gl.minimum(gl.maximum(odd.to(dtype).to(gl.float32), -spec.limit), spec.limit) + 1.0
        activated = gate / (1.0 + gl.exp(gate * (-1.0 * spec.alpha))) * up * weights
        gl.store(at + _places(pair), activated.to(dtype), mask=inside)
        if (row + 64 >= spec.rows) & (row < spec.rows):
            for i in gl.static_range((spec.out_columns - spec.columns + 31) // 32):
                beyond = pair - row // 2 + spec.columns + 32 * i
                mask = (tokens < end)[None, None, :] & (beyond < spec.out_columns)
                gl.store(at + _places(beyond), gl.zeros_like(activated).to(dtype), mask=mask)
    else:
        gl.store(at + 2 * pair, even.to(dtype), mask=inside)
        gl.store(at + 2 * pair + 1, odd.to(dtype), mask=inside)


@gluon.jit
def _part(arrays, ring, values, n, group, first, end, row, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
          spec: gl.constexpr):  # fmt: skip
    """Compute a warpgroup's rows of a part of the result."""
    scales, up, bias, row_weights, out = arrays
    acc = _multiply(scales, up, ring, values, n, group * spec.rows + row, GROUP, BLOCK_M, spec)
    _store(acc, bias, row_weights, out, group, first, end, row, spec)


@gluon.jit
def _compute(scales, up, bias, row_weights, out, table, ring, values, GROUP: gl.constexpr, spec: gl.constexpr):
    """Compute a warpgroup's rows of all parts of a program.

    Half of a tile's tokens are multiplied or all, 16 at least, of which the last may be others that are not stored.
    """
    arrays = scales, up, bias, row_weights, out
    n = 0
    ITEMS: gl.constexpr = spec.items
    PLACES: gl.constexpr = spec.places
    ALL: gl.constexpr = spec.block_m
    for item in range(gl.program_id(0), ITEMS, spec.programs):
        group, first, end, row = _assignment(table, item, spec)
        if group < spec.E:
            row += GROUP * GROUP_ROWS
            if ALL == 16:
                _part(arrays, ring, values, n, group, first, end, row, GROUP, ALL, spec)
            elif end - first <= ALL // 2:
                _part(arrays, ring, values, n, group, first, end, row, GROUP, ALL // 2, spec)
            else:
                _part(arrays, ring, values, n, group, first, end, row, GROUP, ALL, spec)
            n += PLACES


@gluon.jit
def ring_kernel(
    codes, x_16, x_32, x_64, scales, low_16, low_32, low_64, up, bias, row_weights, table, out,
    spec: gl.constexpr,
):  # fmt: skip
    """Multiply rows of x by their experts' matrices; grid (programs).

    codes describes [E · rows, K / 2] by tiles [64, 64]; x_16, x_32 and x_64 describe [S, columns], columns in the order
    "codes" with zeros beyond K, by tiles of as many rows and 64 columns; scales [E · rows, K / 32]. Likewise low_16,
    low_32 and low_64 describe [S, 64], products with an adapter's first matrices and zeros, of whose second ones, up
    [E · rows, R], products are added. out [S, out_columns] is the product, or with `row_weights` [S] the activation
    times these, in the order "codes", with zeros beyond N columns.
    """
    GROUPS: gl.constexpr = spec.groups
    STAGES: gl.constexpr = spec.stages
    tiles = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS, 64, 64], codes.layout)
    values = gl.allocate_shared_memory(x_16.dtype, [2 * STAGES, spec.block_m, 64], x_16.layout)
    ring = Ring(tiles, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    # Barriers were initialized by one thread, and TMA, which signals them, sees shared memory after a fence alone.
    fence_async_shared()
    gl.barrier()
    REGISTERS: gl.constexpr = spec.registers[0]
    LOADER: gl.constexpr = spec.registers[1]
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (scales, up, bias, row_weights, out, table, ring, values, 0, spec)),
                (_compute, (scales, up, bias, row_weights, out, table, ring, values, 1, spec)),
                (_load_tiles, (codes, x_16, x_32, x_64, low_16, low_32, low_64, table, ring, values, spec)),
            ],
            [4, 1],
            [REGISTERS, LOADER],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (scales, up, bias, row_weights, out, table, ring, values, 0, spec)),
                (_compute, (scales, up, bias, row_weights, out, table, ring, values, 1, spec)),
                (_compute, (scales, up, bias, row_weights, out, table, ring, values, 2, spec)),
                (_load_tiles, (codes, x_16, x_32, x_64, low_16, low_32, low_64, table, ring, values, spec)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER],
        )
