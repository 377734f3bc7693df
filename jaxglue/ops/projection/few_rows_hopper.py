"""Projections of few rows in Gluon: one warp loads tiles through TMA, and warpgroups multiply 64 rows of weights each.

Weights are the matmul's first operand, so that an instruction multiplies 64 of their rows by as many as 256 rows of x.
Each program has all rows of x, so weights are read once. Programs have equal parts of the weights, in one turn for gate
and up of usual sizes, which alternate by eight rows in shared memory, so that a thread has both of an output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from jaxglue.ops.tile_ring import GROUP_ROWS, Ring, await_place, barriers, release, vacate

LOG2_E = gl.constexpr(1.4426950408889634)
BAND = gl.constexpr(8)
"""Rows of gate or up in a row: a thread has the outputs of row r and of row r + 8 of 16."""
BANDS = gl.constexpr(8)
"""Bands of 64 rows."""


@aggregate
class Sizes:
    """Shape of a launch.

    A unit is the sum of a tile of GROUPS slabs, which have 64 rows of the weights; behind the first WHOLE tiles
    it is one of SPLITS parts of the sum.
    """

    M: gl.constexpr
    N: gl.constexpr
    GATED: gl.constexpr
    GELU: gl.constexpr
    GROUPS: gl.constexpr
    SLABS: gl.constexpr
    TOKEN_TILES: gl.constexpr
    WHOLE: gl.constexpr
    SPLITS: gl.constexpr
    STEPS: gl.constexpr
    UNITS: gl.constexpr
    PROGRAMS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, M, N, GATED, GELU, GROUPS, SLABS, TOKEN_TILES, WHOLE, SPLITS, STEPS, UNITS, PROGRAMS):
        """Bundle the sizes; N are the rows of the three weights."""
        self.M, self.N = gl.constexpr(M), gl.constexpr(N)
        self.GATED, self.GELU = gl.constexpr(GATED), gl.constexpr(GELU)
        self.GROUPS, self.SLABS = gl.constexpr(GROUPS), gl.constexpr(SLABS)
        self.TOKEN_TILES, self.WHOLE = gl.constexpr(TOKEN_TILES), gl.constexpr(WHOLE)
        self.SPLITS, self.STEPS = gl.constexpr(SPLITS), gl.constexpr(STEPS)
        self.UNITS, self.PROGRAMS = gl.constexpr(UNITS), gl.constexpr(PROGRAMS)


@gluon.jit
def _place_of(unit, sizes):
    """Return (tile of weights, first step of the sum, steps, tile of x) of a unit."""
    EACH: gl.constexpr = (sizes.STEPS + sizes.SPLITS - 1) // sizes.SPLITS
    tile, row = unit // sizes.TOKEN_TILES, unit % sizes.TOKEN_TILES
    if sizes.SPLITS == 1:
        return tile, 0, sizes.STEPS, row
    beyond = gl.maximum(tile - sizes.WHOLE, 0)
    is_whole = tile < sizes.WHOLE
    steps = gl.where(is_whole, sizes.STEPS, EACH)
    gl.assume(steps > 0)
    split = gl.where(is_whole, 0, beyond % sizes.SPLITS)
    return gl.where(is_whole, tile, sizes.WHOLE + beyond // sizes.SPLITS), split * EACH, steps, row


@gluon.jit
def _load_slab(w_0, w_1, w_2, slab, k, full, slabs, index, sizes):
    """Load a slab's step of the sum."""
    FIRST_1: gl.constexpr = sizes.N[0] // GROUP_ROWS
    FIRST_2: gl.constexpr = FIRST_1 + sizes.N[1] // GROUP_ROWS
    if sizes.GATED:
        for band in gl.static_range(BANDS):
            row = slab * (GROUP_ROWS // 2) + band // 2 * BAND
            if band % 2 == 0:
                tma.async_copy_global_to_shared(w_0, [row, k], full, slabs.index(index * BANDS + band))
            else:
                tma.async_copy_global_to_shared(w_1, [row, k], full, slabs.index(index * BANDS + band))
    elif sizes.N[1] == 0:
        tma.async_copy_global_to_shared(w_0, [slab * GROUP_ROWS, k], full, slabs.index(index))
    else:
        if slab < FIRST_1:
            tma.async_copy_global_to_shared(w_0, [slab * GROUP_ROWS, k], full, slabs.index(index))
        elif slab < FIRST_2:
            tma.async_copy_global_to_shared(w_1, [(slab - FIRST_1) * GROUP_ROWS, k], full, slabs.index(index))
        else:
            tma.async_copy_global_to_shared(w_2, [(slab - FIRST_2) * GROUP_ROWS, k], full, slabs.index(index))


@gluon.jit
def _load_tiles(x, w_0, w_1, w_2, tokens, slabs, sizes):
    """Load the tiles of all units of a program."""
    BM: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    BYTES: gl.constexpr = x.block_type.nbytes // BM * (BM + sizes.GROUPS * GROUP_ROWS)
    n = 0
    for unit in range(gl.program_id(0), sizes.UNITS, sizes.PROGRAMS):
        tile, first, steps, row = _place_of(unit, sizes)
        for step in range(steps):
            k = (first + step) * BK
            place, full = vacate(tokens, n, BYTES)
            for group in gl.static_range(sizes.GROUPS):
                _load_slab(w_0, w_1, w_2, tile * sizes.GROUPS + group, k, full, slabs, place * sizes.GROUPS + group,
                           sizes)  # fmt: skip
            tma.async_copy_global_to_shared(x, [row * BM, k], full, tokens.tiles.index(place))
            n += 1


@gluon.jit
def _multiply(tokens, slabs, n, steps, GROUP: gl.constexpr, LAYOUT: gl.constexpr, sizes):
    """Return a slab's part of the sum [64, BM], from the n-th loaded tiles on, and the number of the next ones."""
    BM: gl.constexpr = tokens.tiles.shape[1]
    acc = gl.zeros([GROUP_ROWS, BM], gl.float32, layout=LAYOUT)
    for step in range(steps):
        place = await_place(tokens, n)
        rows = slabs.index(place * sizes.GROUPS + GROUP)
        acc = warpgroup_mma(rows, tokens.tiles.index(place).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if step > 0:
            release(tokens, n - 1)
        n += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(tokens, n - 1)
    return acc, n


@gluon.jit
def _multiply_halves(tokens, slabs, n, steps, GROUP: gl.constexpr, LAYOUT: gl.constexpr, sizes):
    """Do as `_multiply` for 256 rows of x, as two sums [64, 128]: a launch of 16 warps has no registers for one."""
    HALF: gl.constexpr = tokens.tiles.shape[1] // 2
    left = gl.zeros([GROUP_ROWS, HALF], gl.float32, layout=LAYOUT)
    right = gl.zeros([GROUP_ROWS, HALF], gl.float32, layout=LAYOUT)
    for step in range(steps):
        place = await_place(tokens, n)
        rows, x = slabs.index(place * sizes.GROUPS + GROUP), tokens.tiles.index(place)
        left = warpgroup_mma(rows, x.slice(0, HALF).permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(rows, x.slice(HALF, HALF).permute((1, 0)), right, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=[left, right])
        if step > 0:
            release(tokens, n - 1)
        n += 1
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    release(tokens, n - 1)
    return left, right, n


@gluon.jit
def _summed(acc, parts, counters, slab, split, row, HALVES: gl.constexpr, sizes):
    """Return (the sum of all parts, whether this is the last program to finish one)."""
    LAYOUT: gl.constexpr = acc.type.layout
    BM: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = GROUP_ROWS * BM
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    at = lane[:, None] * BM + column[None, :]
    index = (slab - sizes.WHOLE * sizes.GROUPS) * (HALVES * sizes.TOKEN_TILES) + row
    own = parts + index.to(gl.int64) * (sizes.SPLITS * SIZE)
    gl.store(own + split * SIZE + at, acc)
    gl.barrier()  # one thread counts for all
    last = gl.atomic_add(counters + index, 1, sem="acq_rel") == sizes.SPLITS - 1
    if last:
        gl.store(counters + index, 0)
        acc = gl.load(own + at, cache_modifier=".cg")
        for other in range(1, sizes.SPLITS):
            acc += gl.load(own + other * SIZE + at, cache_modifier=".cg")
    return acc, last


@gluon.jit
def _activate(x, GELU: gl.constexpr):
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + gl.exp2(inner * (-2.0 * LOG2_E)))
    else:
        return x / (1.0 + gl.exp2(x * (-1.0 * LOG2_E)))


@gluon.jit
def _store(value, bias, stream, out, first, row, N: gl.constexpr, M: gl.constexpr):
    """Store outputs [rows of the weight, rows of x] to out [M, N], after adding bias and stream, if any."""
    LAYOUT: gl.constexpr = value.type.layout
    rows = first + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    tokens = row + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at, mask = tokens[None, :] * N + rows[:, None], (tokens < M)[None, :] & (rows < N)[:, None]
    if bias is not None:
        value += gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if stream is not None:
        value += gl.load(stream + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(acc, arrays, slab, row, sizes):
    """Apply scales and activation, and store a slab's outputs."""
    x_scales, s_0, s_1, s_2, b_0, b_1, b_2, stream, o_0, o_1, o_2 = arrays
    LAYOUT: gl.constexpr = acc.type.layout
    BM: gl.constexpr = acc.shape[1]
    FIRST_1: gl.constexpr = sizes.N[0] // GROUP_ROWS
    FIRST_2: gl.constexpr = FIRST_1 + sizes.N[1] // GROUP_ROWS
    token = row * BM
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    if x_scales is not None:
        columns = token + gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
        acc *= gl.load(x_scales + columns, mask=columns < sizes.M, other=0.0)[None, :]
    if sizes.GATED:
        first = slab * (GROUP_ROWS // 2)
        if s_0 is not None:
            own, is_up = first + lane // (2 * BAND) * BAND + lane % BAND, lane // BAND % 2 == 1
            inside = own < sizes.N[0]
            scale = gl.load(s_0 + own, mask=inside & (is_up == 0), other=0.0)
            acc *= (scale + gl.load(s_1 + own, mask=inside & is_up, other=0.0))[:, None]
        gate, up = acc.reshape([BANDS // 2, 2, BAND, BM]).permute((0, 2, 3, 1)).split()
        gate, up = gate.reshape([GROUP_ROWS // 2, BM]), up.reshape([GROUP_ROWS // 2, BM])
        if b_0 is not None:
            rows = first + gl.arange(0, GROUP_ROWS // 2, layout=gl.SliceLayout(1, gate.type.layout))
            gate += gl.load(b_0 + rows, mask=rows < sizes.N[0], other=0.0).to(gl.float32)[:, None]
            up += gl.load(b_1 + rows, mask=rows < sizes.N[0], other=0.0).to(gl.float32)[:, None]
        _store(_activate(gate, sizes.GELU) * up, None, None, o_0, first, token, sizes.N[0], sizes.M)
    elif sizes.N[1] == 0:
        _scaled(acc, s_0, b_0, stream, o_0, slab, token, sizes.N[0], sizes.M)
    else:
        if slab < FIRST_1:
            _scaled(acc, s_0, b_0, None, o_0, slab, token, sizes.N[0], sizes.M)
        elif slab < FIRST_2:
            _scaled(acc, s_1, b_1, None, o_1, slab - FIRST_1, token, sizes.N[1], sizes.M)
        else:
            if sizes.N[2] > 0:
                _scaled(acc, s_2, b_2, None, o_2, slab - FIRST_2, token, sizes.N[2], sizes.M)


@gluon.jit
def _scaled(acc, scales, bias, stream, out, slab, token, N: gl.constexpr, M: gl.constexpr):
    """Store a slab of one weight."""
    if scales is not None:
        rows = slab * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        acc *= gl.load(scales + rows, mask=rows < N, other=0.0)[:, None]
    _store(acc, bias, stream, out, slab * GROUP_ROWS, token, N, M)


@gluon.jit
def _project(arrays, parts, counters, tokens, slabs, GROUP: gl.constexpr, sizes):
    """Compute a warpgroup's slab of each unit of a program."""
    BM: gl.constexpr = tokens.tiles.shape[1]
    HALVES: gl.constexpr = 2 if BM * sizes.GROUPS > 512 else 1
    DEPTH: gl.constexpr = 256 // tokens.tiles.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM // HALVES, DEPTH])
    n = 0
    for unit in range(gl.program_id(0), sizes.UNITS, sizes.PROGRAMS):
        tile, first, steps, row = _place_of(unit, sizes)
        slab = tile * sizes.GROUPS + GROUP
        if HALVES == 2:
            left, right, n = _multiply_halves(tokens, slabs, n, steps, GROUP, LAYOUT, sizes)
            _store_sum(left, arrays, parts, counters, slab, tile, first, 2 * row, HALVES, sizes)
            _store_sum(right, arrays, parts, counters, slab, tile, first, 2 * row + 1, HALVES, sizes)
        else:
            acc, n = _multiply(tokens, slabs, n, steps, GROUP, LAYOUT, sizes)
            _store_sum(acc, arrays, parts, counters, slab, tile, first, row, HALVES, sizes)


@gluon.jit
def _store_sum(acc, arrays, parts, counters, slab, tile, first, row, HALVES: gl.constexpr, sizes):
    """Store a slab's outputs once its sum is whole."""
    EACH: gl.constexpr = (sizes.STEPS + sizes.SPLITS - 1) // sizes.SPLITS
    if slab < sizes.SLABS:
        if sizes.SPLITS == 1:
            _finish(acc, arrays, slab, row, sizes)
        else:
            last = tile < sizes.WHOLE
            if tile >= sizes.WHOLE:
                acc, last = _summed(acc, parts, counters, slab, first // EACH, row, HALVES, sizes)
            if last:
                _finish(acc, arrays, slab, row, sizes)


@gluon.jit
def hopper_kernel(
    x, w_0, w_1, w_2, x_scales, s_0, s_1, s_2, b_0, b_1, b_2, stream, counters, parts, o_0, o_1, o_2,
    M: gl.constexpr, N_0: gl.constexpr, N_1: gl.constexpr, N_2: gl.constexpr, GATED: gl.constexpr,
    GELU: gl.constexpr, GROUPS: gl.constexpr, SLABS: gl.constexpr, TOKEN_TILES: gl.constexpr, WHOLE: gl.constexpr,
    SPLITS: gl.constexpr, STEPS: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply x [M, K] by up to three weights [N, K], or activate gate and up; grid (PROGRAMS).

    `x` and the weights describe tiles, whose rows are zeros beyond; those of gate and up have eight rows.
    """
    sizes = Sizes(M, (N_0, N_1, N_2), GATED, GELU, GROUPS, SLABS, TOKEN_TILES, WHOLE, SPLITS, STEPS, UNITS,
                  PROGRAMS)  # fmt: skip
    BM: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    PLACES: gl.constexpr = STAGES * GROUPS
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    tokens = Ring(rows, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    if GATED:
        loaded = gl.allocate_shared_memory(x.dtype, [PLACES * BANDS, BAND, BK], w_0.layout)
        slabs = loaded._reinterpret(x.dtype, [PLACES, GROUP_ROWS, BK], w_0.layout)
    else:
        loaded = gl.allocate_shared_memory(x.dtype, [PLACES, GROUP_ROWS, BK], w_0.layout)
        slabs = loaded
    fence_async_shared()
    gl.barrier()
    arrays = x_scales, s_0, s_1, s_2, b_0, b_1, b_2, stream, o_0, o_1, o_2
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_project, (arrays, parts, counters, tokens, slabs, 0, sizes)),
                (_project, (arrays, parts, counters, tokens, slabs, 1, sizes)),
                (_project, (arrays, parts, counters, tokens, slabs, 2, sizes)),
                (_load_tiles, (x, w_0, w_1, w_2, tokens, loaded, sizes)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_project, (arrays, parts, counters, tokens, slabs, 0, sizes)),
                (_project, (arrays, parts, counters, tokens, slabs, 1, sizes)),
                (_load_tiles, (x, w_0, w_1, w_2, tokens, loaded, sizes)),
            ],
            [4, 1],
            [240, 24],
        )
