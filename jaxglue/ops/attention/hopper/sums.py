"""Sums over programs in global memory, in the programs' order, so that they are the same in every run."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxglue.ops.attention.hopper.tiles import rows
from jaxglue.ops.attention.hopper.visits import visited
from jaxglue.ops.tile_ring import GROUP_ROWS, await_place, release, vacate

_ADDERS = gl.constexpr(2)
"""Warps that add a program's shares in turns: one waits for its additions to be done while another begins its own.

Of a ring of one place the first adds all: a barrier tells two turns apart, and the second would take the place before
its first turn for that after it.
"""


@builtin
def _add_tile(descriptor, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory, asynchronously; Gluon has no function for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


@gluon.jit
def _await_turn(number, value):
    """Wait until a number in global memory has reached a value."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred early; .reg .b32 seen; again: ld.acquire.gpu.global.b32 seen, [$1];"
        " setp.lt.s32 early, seen, $2; @early bra again; fence.proxy.async.global; mov.b32 $0, seen; }",
        "=r,l,r", [number + lanes * 0, value + lanes * 0], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _end_turn(number, value):
    """Set a number in global memory once the warp's additions are done."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred first; cp.async.bulk.wait_group 0; setp.eq.s32 first, $3, 0;"
        " @first st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r", [number + lanes * 0, value + lanes * 0, lanes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add_or_store(dq, corner, tile, add):
    """Add a tile to global memory, or store it as the first share."""
    if add:
        _add_tile(dq, corner, tile)
    else:
        tma.async_copy_shared_to_global(dq, corner, tile)


@gluon.jit
def add_shares(dq, dq_rest, turns, shares, shares_rest, plane, tile, before, bounds, sizes, ADDER: gl.constexpr):
    """Add one warp's shares of a program to the gradients of queries; programs before add up to token `before`."""
    P: gl.constexpr = sizes.P
    PARTS: gl.constexpr = sizes.G // P
    TOKENS: gl.constexpr = GROUP_ROWS // P
    TILES: gl.constexpr = (sizes.T + TOKENS - 1) // TOKENS
    ADDERS: gl.constexpr = 1 if sizes.REST > 0 else _ADDERS
    last = 0 if ADDER >= ADDERS else PARTS * bounds.count
    for n in range(ADDER, last, ADDERS):
        part, i = visited(n, bounds, sizes)
        token = bounds.first + i * TOKENS
        number = turns + (plane + part) * TILES + token // TOKENS
        if token < before:
            _await_turn(number, tile)
        slot = 2 * await_place(shares, n)
        for half in gl.static_range(2):
            corner = [plane + part, token * P, half * (sizes.V // 2)]
            _add_or_store(dq, corner, shares.tiles.index(slot + half), token < before)
            if sizes.REST > 0:
                corner = [plane + part, token * P, half * (sizes.REST // 2)]
                _add_or_store(dq_rest, corner, shares_rest.index(slot + half), token < before)
        tma.store_wait(0)
        release(shares, n)
        _end_turn(number, tile + 1)


@gluon.jit
def visible_end(ends, key, WINDOW: gl.constexpr):
    """Return the token after the last that sees a key."""
    end = gl.load(ends + key)
    if WINDOW > 0:
        end = gl.minimum(end, key + WINDOW)
    return end


@gluon.jit
def _locate(first, n, ends, sizes):
    """Return (part, token, number of the program that adds last, end of its queries) of the n-th tile of sums."""
    PARTS: gl.constexpr = sizes.G // sizes.P
    KEYS: gl.constexpr = 2 * GROUP_ROWS
    TOKENS: gl.constexpr = GROUP_ROWS // sizes.P
    token = first + n // PARTS * TOKENS
    if sizes.SPLIT:  # the program of the last query's own key
        program = gl.load(ends + 2 * sizes.S + gl.minimum(token + TOKENS, sizes.T) - 1) // KEYS
    else:
        program = token // KEYS
    last = gl.minimum(program * KEYS + KEYS, sizes.S) - 1
    return n % PARTS, token, program, visible_end(ends, last, sizes.WINDOW)


@gluon.jit
def _load_halves(sums, ring, n, plane, line, WIDTH: gl.constexpr):
    """Load the halves of a tile of sums as the ring's n-th tile."""
    slot, full = vacate(ring, n, 2 * sums.block_type.nbytes)
    for half in gl.static_range(2):
        tile = ring.tiles.index(2 * slot + half)._reinterpret(gl.float32, sums.block_type.shape, sums.layout)
        tma.async_copy_global_to_shared(sums, [plane, line, half * (WIDTH // 2)], full, tile)


@gluon.jit
def load_sums(sums, sums_rest, turns, ring, ends, plane, first, count, sizes):
    """Load tiles of the gradients of queries from a token on, each as soon as it has all shares."""
    TOKENS: gl.constexpr = GROUP_ROWS // sizes.P
    TILES: gl.constexpr = (sizes.T + TOKENS - 1) // TOKENS
    for n in range(count):
        part, token, program, end = _locate(first, n, ends, sizes)
        if token < end:
            _await_turn(turns + (plane + part) * TILES + token // TOKENS, program + 1)
        if sizes.REST > 0:
            _load_halves(sums, ring, 2 * n, plane + part, token * sizes.P, sizes.V)
            _load_halves(sums_rest, ring, 2 * n + 1, plane + part, token * sizes.P, sizes.REST)
        else:
            _load_halves(sums, ring, n, plane + part, token * sizes.P, sizes.V)


@gluon.jit
def _round_half(sums, out, ring, n, row, token, end, head, sizes, HEADS: gl.constexpr, GROUP: gl.constexpr,
                WIDTH: gl.constexpr):  # fmt: skip
    """Store a warpgroup's half of the ring's n-th tile."""
    P: gl.constexpr = sizes.P
    HALF: gl.constexpr = WIDTH // 2
    N: gl.constexpr = HEADS * sizes.G
    base, offsets, mask = rows(row, token, head, sizes.T, N, sizes.H, P, HALF)
    tile = ring.tiles.index(2 * await_place(ring, n) + GROUP)
    tile = tile._reinterpret(gl.float32, sums.block_type.shape, sums.layout).reshape([GROUP_ROWS, HALF])
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, offsets.type.layout))
    value = gl.where((token + lane // P < end)[:, None], tile.load(offsets.type.layout) * sizes.SCALE, 0.0)
    gl.store(out + base + GROUP * HALF + offsets, value.to(out.dtype.element_ty), mask=mask)
    gl.barrier()  # all threads have read the tile before another is loaded over it
    release(ring, n)


@gluon.jit
def round_sums(sums, sums_rest, out, ring, ends, row, head, first, count, sizes, HEADS: gl.constexpr,
               GROUP: gl.constexpr):  # fmt: skip
    """Store a warpgroup's half of each loaded tile, scaled and rounded; zeros for padding."""
    for n in range(count):
        part, token, _, end = _locate(first, n, ends, sizes)
        query_head = head * sizes.G + part * sizes.P
        if sizes.REST > 0:
            _round_half(sums, out, ring, 2 * n, row, token, end, query_head, sizes, HEADS, GROUP, sizes.V)
            _round_half(
                sums_rest, out + sizes.V, ring, 2 * n + 1, row, token, end, query_head, sizes, HEADS, GROUP, sizes.REST
            )
        else:
            _round_half(sums, out, ring, n, row, token, end, query_head, sizes, HEADS, GROUP, sizes.V)
