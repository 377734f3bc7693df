"""Sums over programs in global memory, in the programs' order, so that they are the same in every run."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxglue.ops.attention.hopper.tiles import GROUP_ROWS, await_place, release


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
        " setp.lt.s32 early, seen, $2; @early bra again; fence.proxy.async; mov.b32 $0, seen; }",
        "=r,l,r", [number + lanes * 0, value + lanes * 0], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _end_turn(number, value):
    """Set a number in global memory once the warp's additions are done."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred first; cp.async.bulk.wait_group 0; fence.acq_rel.gpu; setp.eq.s32 first, $3, 0;"
        " @first st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r", [number + lanes * 0, value + lanes * 0, lanes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_shares(dq, turns, shares, plane, tile, before, bounds, sizes):
    """Add a program's shares to the gradients of queries; programs before add theirs up to token `before`."""
    P: gl.constexpr = sizes.P
    TOKENS: gl.constexpr = GROUP_ROWS // P
    n = gl.to_tensor(0)
    for part in range(sizes.G // P):
        for late in range(bounds.count):
            token = bounds.first + (bounds.count - 1 - late) * TOKENS
            number = turns + (plane + part) * ((sizes.T + TOKENS - 1) // TOKENS) + token // TOKENS
            columns = [plane + part, token * P, 0], [plane + part, token * P, sizes.H // 2]
            if token < before:
                _await_turn(number, tile)
            place = 2 * await_place(shares, n)
            for half in gl.static_range(2):
                if token < before:
                    _add_tile(dq, columns[half], shares.tiles.index(place + half))
                else:
                    tma.async_copy_shared_to_global(dq, columns[half], shares.tiles.index(place + half))
            tma.store_wait(0)
            release(shares, n)
            _end_turn(number, tile + 1)
            n += 1
