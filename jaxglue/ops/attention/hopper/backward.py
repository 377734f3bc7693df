"""The backward pass in Gluon: one kernel for the gradients of queries, keys and values, five matmuls for each tile.

A program owns a tile of keys, 64 for each of two warpgroups, and walks over the tiles of queries that see them, from
the last to the first, which one warp loads through TMA. Scores are transposed, [keys, queries], so that weights and
their gradients are operands in registers. The next tile's scores are multiplied while a tile's gradient of queries is
handed over. `visits` has the order of heads that do not fit a tile.

The gradient of a tile of queries is a sum over programs: two other warps, in turns, store the first program's share in
global memory and add the others', in the order of keys, by a number for each tile that says whose turn it is. Results
are therefore the same in every run. Programs start in the order of keys, so none waits for one that has not started.
They begin with their last queries, which they share, so that each follows the one before it by a tile; from the first
queries on, it would wait until that one came to its own keys. The programs that start last round finished sums to the
gradient's dtype, while the last of the others still compute.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxglue.ops.attention.hopper.backward_tiles import allocate, load_tiles, query_range
from jaxglue.ops.attention.hopper.sums import add_shares, load_sums, round_sums, visible_end
from jaxglue.ops.attention.hopper.tiles import AttentionSizes, TileRange, store_rows
from jaxglue.ops.attention.hopper.visits import visited_between
from jaxglue.ops.attention.kernels import LOG2_E, MASKED
from jaxglue.ops.tile_ring import GROUP_ROWS, await_place, release, turn


@gluon.jit
def _await_place_of_dq(tiles, n):
    """Return the place of the n-th tile's gradient of queries once it is free."""
    slot, parity = turn(tiles.dq, n)
    mbarrier.wait(tiles.dq.empty.index(slot), parity ^ 1)
    return slot


@gluon.jit
def _hand_over(dq, tiles, n, GROUP: gl.constexpr):
    """Hand over a warpgroup's half of the n-th tile's gradient of queries."""
    slot = _await_place_of_dq(tiles, n)
    tiles.dq.tiles.index(2 * slot + GROUP).store(dq.reshape([1, GROUP_ROWS, dq.shape[1]]))
    fence_async_shared()  # TMA reads the half from shared memory
    mbarrier.arrive(tiles.dq.full.index(slot), count=1)


@gluon.jit
def _hold(tiles, SCORES: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr):
    """Return a warpgroup's keys and values in registers, where narrow heads leave room there."""
    if H <= 64:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
        keys = tiles.keys.index(0).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        values = tiles.keys.index(1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        return keys.load(OPERAND), values.load(OPERAND)
    else:
        return 0, 0


@gluon.jit
def _own(held, which: gl.constexpr, tiles, zero, H: gl.constexpr, GROUP: gl.constexpr):
    """Return a warpgroup's keys (0) or values (1) as an operand."""
    if H <= 64:
        return held[which]
    else:
        return tiles.keys.index(zero + which).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)


@gluon.jit
def _begin_scores(operand, tiles, n, zero, SCORES: gl.constexpr, sizes, GROUP: gl.constexpr):
    """Begin the n-th tile's scores."""
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, layout=SCORES)
    slot = await_place(tiles.queries, n)
    query = tiles.queries.tiles.index(2 * slot).reshape([GROUP_ROWS, sizes.V])
    if sizes.REST > 0:  # begin with −lse, for which there are no registers beside the sums
        begun, _ = gl.broadcast(tiles.statistics.index(2 * slot).load(SCORES), none)
        scores = warpgroup_mma(operand, query.permute((1, 0)), begun, is_async=True)
        rest = tiles.queries_rest.index(slot).reshape([GROUP_ROWS, sizes.REST])
        keys = tiles.keys_rest.index(zero).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)
        return warpgroup_mma(keys, rest.permute((1, 0)), scores, is_async=True)
    else:
        return warpgroup_mma(operand, query.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _begin_half(dscores, keys, WIDTH: gl.constexpr, GROUP: gl.constexpr):
    """Begin a warpgroup's half of the product of a tile's scores' gradients and all keys."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    none = gl.zeros([GROUP_ROWS, WIDTH // 2], gl.float32, layout=HALF)
    keys = keys.slice(GROUP * (WIDTH // 2), WIDTH // 2, dim=1)
    return warpgroup_mma(dscores.permute((1, 0)), keys, none, use_acc=False, is_async=True)


@gluon.jit
def _begin_dq(tiles, n, zero, sizes, GROUP: gl.constexpr):
    """Begin a warpgroup's half of the n-th tile's gradient of queries, once both have stored the scores' gradients."""
    mbarrier.wait(tiles.stored.index(0), n & 1)
    return _begin_half(tiles.dscores.index(n & 1), tiles.keys.index(zero), sizes.V, GROUP)


@gluon.jit
def _hand_over_parts(tiles, n, zero, sizes, GROUP: gl.constexpr):
    """Multiply and hand over a warpgroup's halves of both parts of the n-th tile's gradient of queries.

    The sums leave no registers for other products meanwhile; the other warpgroup's matmuls fill the time.
    """
    mbarrier.wait(tiles.stored.index(0), n & 1)
    dscores = tiles.dscores.index(zero)
    dq = warpgroup_mma_wait(0, deps=[_begin_half(dscores, tiles.keys.index(zero), sizes.V, GROUP)])
    half = 2 * (_await_place_of_dq(tiles, n) + zero) + GROUP
    tiles.dq.tiles.index(half).store(dq.reshape([1, GROUP_ROWS, sizes.V // 2]))
    dq = warpgroup_mma_wait(0, deps=[_begin_half(dscores, tiles.keys_rest.index(zero), sizes.REST, GROUP)])
    mbarrier.arrive(tiles.read.index(0), count=1)
    tiles.dq_rest.index(half).store(dq.reshape([1, GROUP_ROWS, sizes.REST // 2]))
    fence_async_shared()  # TMA reads it from shared memory
    mbarrier.arrive(tiles.dq.full.index(half // 2), count=1)


@gluon.jit
def _widened(x):
    """Return 16-bit values as float32; of bfloat16, LLVM would keep each in a register of its own."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def _differentiate_tile(scores, sums, n, token, MASK: gl.constexpr, operands, sizes, GROUP: gl.constexpr):
    """Add the n-th tile's products to (dk, dv, rest of dk), and store the gradients of its scores."""
    dk, dv, dk_rest = sums
    _, keys, stops, tiles, held = operands
    SCORES: gl.constexpr = keys.type.layout.parent
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    position = turn(tiles.queries, n)[0]
    half, zero = 2 * position, token >> 31
    query = tiles.queries.tiles.index(half).reshape([GROUP_ROWS, sizes.V])
    dout = tiles.queries.tiles.index(half + 1).reshape([GROUP_ROWS, sizes.V])
    values = _own(held, 1, tiles, zero, sizes.V, GROUP)
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, layout=SCORES)
    if sizes.REST > 0:  # the sums leave no registers for both products
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        dweights = warpgroup_mma(values, dout.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
    if MASK:
        tokens = token + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(0, SCORES)) // sizes.P
        visible = (keys[:, None] <= tokens[None, :]) & (tokens[None, :] < stops[:, None])
        scores = gl.where(visible, scores, MASKED)
    scores *= sizes.SCALE * LOG2_E
    weights = gl.exp2(scores if sizes.REST > 0 else scores - tiles.statistics.index(half).load(SCORES))
    operand = gl.convert_layout(weights.to(query.dtype), OPERAND)
    if sizes.REST > 0:  # the exponentials come before the product with values begins
        dv = warpgroup_mma(operand, dout, dv, is_async=True)
        dweights = warpgroup_mma(values, dout.permute((1, 0)), none, use_acc=False, is_async=True)
        dv, dweights = warpgroup_mma_wait(0, deps=[dv, dweights])
        weights = gl.convert_layout(_widened(operand), SCORES)
    else:
        # The tile came long ago: branches keep the assembler from moving a wait up, and a matmul's parts down.
        await_place(tiles.queries, n)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        dv = warpgroup_mma(operand, dout, dv, is_async=True)
        await_place(tiles.queries, n)
    dscores = (weights * (dweights - tiles.statistics.index(half + 1).load(SCORES))).to(query.dtype)
    operand = gl.convert_layout(dscores, OPERAND)
    dk = warpgroup_mma(operand, query, dk, is_async=True)
    if sizes.REST > 0:
        REST: gl.constexpr = gl.DotOperandLayout(0, dk_rest.type.layout, 2)
        rest = tiles.queries_rest.index(position).reshape([GROUP_ROWS, sizes.REST])
        dk_rest = warpgroup_mma(gl.convert_layout(dscores, REST), rest, dk_rest, is_async=True)
        mbarrier.wait(tiles.read.index(0), (n & 1) ^ 1)  # both have left the tile before
        tiles.dscores.index(zero).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0).store(dscores)
    else:
        # The other warpgroup has left the tile of two tiles ago, for it has stored its part of the tile before.
        tiles.dscores.index(n & 1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0).store(dscores)
    fence_async_shared()  # the tensor cores read both warpgroups' scores from shared memory
    mbarrier.arrive(tiles.stored.index(0), count=1)
    if sizes.REST > 0:
        return warpgroup_mma_wait(0, deps=[dk, dv, dk_rest])
    else:
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        return dk, dv, dk_rest


@gluon.jit
def _tiles(begin, end, MASK: gl.constexpr, operands, sums, sizes, GROUP: gl.constexpr):
    """Add the tiles from `begin` to `end`, but for the very first, to the sums; a tile's dq comes one tile late."""
    PARTS: gl.constexpr = sizes.G // sizes.P
    bounds, keys, _, tiles, held = operands
    dk, dv, dk_rest = sums
    SCORES: gl.constexpr = keys.type.layout.parent
    for n in range(gl.maximum(begin * PARTS, 1), end * PARTS):
        token = bounds.first + n  # any one, where no mask needs it
        if MASK:
            token = bounds.first + visited_between(n, begin, end, bounds, sizes)[1] * (GROUP_ROWS // sizes.P)
        zero = token >> 31  # 0, which the compiler cannot know: it would keep every address of keys in registers
        own_keys = _own(held, 0, tiles, zero, sizes.V, GROUP)
        if sizes.REST > 0:
            release(tiles.queries, n - 1)
            _hand_over_parts(tiles, n - 1, zero, sizes, GROUP)
            scores = _begin_scores(own_keys, tiles, n, zero, SCORES, sizes, GROUP)
        else:
            dq = _begin_dq(tiles, n - 1, zero, sizes, GROUP)
            release(tiles.queries, n - 1)
            scores = _begin_scores(own_keys, tiles, n, zero, SCORES, sizes, GROUP)
            dq = warpgroup_mma_wait(1, deps=[dq])
            _hand_over(dq, tiles, n - 1, GROUP)
        dk, dv, dk_rest = _differentiate_tile(scores, (dk, dv, dk_rest), n, token, MASK, operands, sizes, GROUP)
    return dk, dv, dk_rest


@gluon.jit
def _all_tiles(operands, sums, sizes, GROUP: gl.constexpr):
    """Add all tiles, of which there is at least one, to (dk, dv, rest of dk)."""
    bounds, keys, _, tiles, held = operands
    first, count = bounds.first, bounds.count
    token, zero = first + (count - 1) * (GROUP_ROWS // sizes.P), first >> 31
    late, early, last = count - bounds.cut, count - bounds.full, count * (sizes.G // sizes.P) - 1
    own_keys = _own(held, 0, tiles, zero, sizes.V, GROUP)
    scores = _begin_scores(own_keys, tiles, 0, zero, keys.type.layout.parent, sizes, GROUP)
    sums = _differentiate_tile(scores, sums, 0, token, True, operands, sizes, GROUP)
    sums = _tiles(0, late, True, operands, sums, sizes, GROUP)
    sums = _tiles(late, early, False, operands, sums, sizes, GROUP)
    sums = _tiles(early, count, True, operands, sums, sizes, GROUP)
    if sizes.REST > 0:
        _hand_over_parts(tiles, last, zero, sizes, GROUP)
        release(tiles.queries, last)
    else:
        dq = warpgroup_mma_wait(0, deps=[_begin_dq(tiles, last, zero, sizes, GROUP)])
        release(tiles.queries, last)
        _hand_over(dq, tiles, last, GROUP)
    return sums


@gluon.jit
def _differentiate(ends, dk_out, dv_out, tiles, row, head, first, bounds, sizes, HEADS: gl.constexpr,
                   GROUP: gl.constexpr):  # fmt: skip
    """Compute the gradients of a warpgroup's keys and values, and its halves of those of queries."""
    S: gl.constexpr = sizes.S
    H: gl.constexpr = sizes.H
    V: gl.constexpr = sizes.V
    REST: gl.constexpr = sizes.REST if sizes.REST > 0 else 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP_ROWS, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    first = (first if sizes.SPLIT else bounds.first) + GROUP * GROUP_ROWS
    keys = first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
    stops = gl.load(ends + keys, mask=keys < S, other=0)
    if sizes.WINDOW > 0:
        stops = gl.minimum(stops, keys + sizes.WINDOW)
    if sizes.SPLIT:  # a key's first query
        keys = gl.load(ends + S + keys, mask=keys < S, other=0)
    dk = gl.zeros([GROUP_ROWS, V], gl.float32, layout=GRADIENT)
    dv = gl.zeros([GROUP_ROWS, V], gl.float32, layout=GRADIENT)
    dk_rest = bounds.first  # unused
    if sizes.REST > 0:
        dk_rest = gl.zeros([GROUP_ROWS, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16]))
    if bounds.count > 0:
        mbarrier.wait(tiles.loaded.index(0), 0)
        held = _hold(tiles, SCORES, V, GROUP)
        dk, dv, dk_rest = _all_tiles((bounds, keys, stops, tiles, held), (dk, dv, dk_rest), sizes, GROUP)
    values = tiles.keys.index(1).slice(GROUP * GROUP_ROWS, GROUP_ROWS, dim=0)  # only this warpgroup's
    store_rows(dk_out, dk * sizes.SCALE, values, row, first, head, S, HEADS, H, 1)
    if sizes.REST > 0:
        part = values.slice(0, REST, dim=1)
        store_rows(dk_out + V, dk_rest * sizes.SCALE, part, row, first, head, S, HEADS, H, 1)
    store_rows(dv_out, dv, values, row, first, head, S, HEADS, V, 1)


@gluon.jit
def _compute(ends, dk, dv, sums, dq, tiles, row, head, first, bounds, rounded, sizes, HEADS: gl.constexpr,
             GROUP: gl.constexpr):  # fmt: skip
    """Differentiate keys from `first` on, or round so many tiles of sums; without SPLIT from the bounds' first one."""
    if rounded > 0:
        token = first if sizes.SPLIT else bounds.first
        main, rest = sums
        round_sums(main, rest, dq, tiles.queries, ends, row, head, token, rounded, sizes, HEADS, GROUP)
    else:
        _differentiate(ends, dk, dv, tiles, row, head, first, bounds, sizes, HEADS, GROUP)


@gluon.jit
def _load(source, finished):
    """Load a program's tiles to differentiate, or its finished sums."""
    q, k, v, lse, delta, dout, q_rest, k_rest, tiles, start, key, plane, kv_head, bounds, sizes = source
    load_tiles(
        q=q, k=k, v=v, lse=lse, delta=delta, dout=dout, q_rest=q_rest, k_rest=k_rest, tiles=tiles, start=start,
        key=key, plane=plane, kv_head=kv_head, bounds=bounds, sizes=sizes,
    )  # fmt: skip
    sums, sums_rest, turns, queries, ends, dq_plane, first, count, _ = finished
    load_sums(sums, sums_rest, turns, queries, ends, dq_plane, first, count, sizes)


@gluon.jit
def _add(shares, ADDER: gl.constexpr):
    """Add one warp's shares of a program to the gradients of queries."""
    sums, sums_rest, turns, ring, ring_rest, plane, tile, before, bounds, sizes = shares
    add_shares(sums, sums_rest, turns, ring, ring_rest, plane, tile, before, bounds, sizes, ADDER)


@gluon.jit
def backward_kernel(
    q, k, v, q_rest, k_rest, ends, lse, delta, dout, first_head, turns, sums, sums_rest, dk, dv, dq, T: gl.constexpr,
    S: gl.constexpr, K: gl.constexpr, G: gl.constexpr, P: gl.constexpr, H: gl.constexpr, V: gl.constexpr,
    WINDOW: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, SPAN: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile, summed over the group of query heads, and its share of dq; or round sums to dq.

    The grid is ROWS · HEADS · tiles, one head after another: sums of one stay in the L2 cache. As many again over SPAN
    then round the sums, each of SPAN tiles of tokens, while the last of the others compute. dq, dk and dv are those of
    HEADS key/value heads from `first_head` on. lse is in units of exponentials of 2; turns begin as zeros. Sums [ROWS ·
    HEADS · G // P, T · P, V] float32 are left as they were where no query sees a key. With SPLIT, ends [B, 2 · S + T]
    have the end of each key's queries, the first of them, and each query's own key.

    Columns of queries and keys beyond those of values have tiles and sums of their own, `rest`. They leave few
    registers, so a warpgroup then has one product in flight at a time, and the other's fill the time; lse is then
    −lse / SCALE, with which scores begin.
    """
    sizes = AttentionSizes(T, S, K, G, P, H, WINDOW, SCALE, SPLIT, V, CHUNK)
    KEYS: gl.constexpr = 2 * GROUP_ROWS
    TILES: gl.constexpr = (S + KEYS - 1) // KEYS
    ROUNDED: gl.constexpr = (T + KEYS - 1) // KEYS
    index = gl.program_id(0)
    rounds = index >= ROWS * HEADS * TILES
    index = gl.where(rounds, index - ROWS * HEADS * TILES, index)
    tiles_of_head = gl.where(rounds, (ROUNDED + SPAN - 1) // SPAN, TILES)
    tile, plane = index % tiles_of_head, index // tiles_of_head
    head, row = plane % HEADS, (plane // HEADS).to(gl.int64)
    kv_head = gl.load(first_head) + head
    first, row_ends = tile * gl.where(rounds, SPAN * KEYS, KEYS), ends + row * (2 * S + T if SPLIT else S)
    plane = (row.to(gl.int32) * K + kv_head) * (G // P)
    dq_plane = (row.to(gl.int32) * HEADS + head) * (G // P)
    bounds = query_range(row_ends, first, gl.minimum(first + KEYS, S) - 1, sizes)
    bounds = TileRange(bounds.first, bounds.full, bounds.cut, gl.where(rounds, 0, bounds.count))
    tokens = gl.minimum(first + SPAN * KEYS, T) - first
    rounded = gl.where(rounds, (tokens * P + GROUP_ROWS - 1) // GROUP_ROWS * (G // P), 0)
    before = gl.where(tile > 0, visible_end(row_ends, gl.maximum(first - 1, 0), WINDOW), 0)
    tiles = allocate(q, k, lse, sums, q_rest, k_rest, sums_rest, STAGES, P, sizes)
    # Barriers were initialized by one thread, and TMA, which signals them, sees shared memory after a fence alone.
    fence_async_shared()
    gl.barrier()
    start = (row * T + bounds.first).to(gl.int32)
    # Without SPLIT the same numbers: no registers for them twice.
    key, other = ((row * S + first).to(gl.int32), first) if SPLIT else (0, 0)
    source = (q, k, v, lse, delta, dout, q_rest, k_rest, tiles, start, key, plane, kv_head, bounds, sizes)
    finished = (sums, sums_rest, turns, tiles.queries, row_ends, dq_plane, first, rounded, sizes)
    all_sums = (sums, sums_rest)
    shares = (sums, sums_rest, turns, tiles.dq, tiles.dq_rest, dq_plane, tile, before, bounds, sizes)
    gl.warp_specialize(
        [
            (_compute, (row_ends, dk, dv, all_sums, dq, tiles, row, head, other, bounds, rounded, sizes, HEADS, 0)),
            (_compute, (row_ends, dk, dv, all_sums, dq, tiles, row, head, other, bounds, rounded, sizes, HEADS, 1)),
            (_load, (source, finished)),
            (_add, (shares, 0)),
            (_add, (shares, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
