"""Triton kernel that merges an adapter into a matrix and rounds the sum to the grid on which it is served."""

import triton
import triton.language as tl


@triton.jit
def _nearest_e2m1(units):
    """Round to the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 with either sign; of two equally near to the even one."""
    magnitude = tl.abs(units)
    level = tl.where(magnitude > 0.25, 0.5, 0.0)
    level = tl.where(magnitude >= 0.75, 1.0, level)
    level = tl.where(magnitude > 1.25, 1.5, level)
    level = tl.where(magnitude >= 1.75, 2.0, level)
    level = tl.where(magnitude > 2.5, 3.0, level)
    level = tl.where(magnitude >= 3.5, 4.0, level)
    level = tl.where(magnitude > 5.0, 6.0, level)
    return tl.where(units < 0, -level, level)


@triton.jit
def _nearest_of(units, table, COUNT: tl.constexpr):
    """Round to the nearest of COUNT ascending values: comparisons with their middles, as a look-up would gather."""
    below = tl.load(table)
    level = units * 0.0 + below
    for index in tl.static_range(1, COUNT):
        above = tl.load(table + index)
        level = tl.where(units > (below + above) * 0.5, above, level)
        below = above
    return level


@triton.jit
def _places(seeds, columns):
    """Return `served.dither` of rows with these seeds at these columns."""
    mixed = (seeds.to(tl.uint32)[:, None] * 0x9E3779B1) ^ (columns[None, :].to(tl.uint32) * 0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    share = (mixed ^ (mixed >> 15)) >> 20
    return (share.to(tl.float32) + 0.5) / 4096.0 - 0.5


@triton.jit
def _stored_units(matrix, seeds, table, place, columns, inside, HIGH_FIRST: tl.constexpr):
    """Return values that are stored as codes, two in a byte, in units of their steps, at their places in their cells.

    The table holds each code's value and `Codes.cells`.
    """
    shift = (columns % 2) * 4
    if HIGH_FIRST:
        shift = 4 - shift
    codes = (tl.load(matrix + place // 2, mask=inside, other=0).to(tl.int32) >> shift[None, :]) & 15
    share = _places(seeds, columns)
    room = tl.load(table + tl.where(share < 0, 32, 48) + codes)
    return tl.load(table + 16 + codes) + share * room


@triton.jit
def merge_kernel(
    matrix, A, up, step, low, top, seeds, table, gain, out,
    OUT: tl.constexpr, IN: tl.constexpr, R: tl.constexpr, SHARED: tl.constexpr, VALUES: tl.constexpr,
    LEVELS: tl.constexpr, STORED: tl.constexpr, HIGH_FIRST: tl.constexpr, GAIN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write matrix + up·A [E, OUT, IN] on its grid, whose SHARED neighbors have a step (and a low) each.

    Levels are e2m1 where VALUES is 0, else VALUES of a table; with LEVELS, integers from 0 to the row's top. A STORED
    matrix is codes of these levels, the first of two in the high half of a byte with HIGH_FIRST. With GAIN, rows of the
    sum are multiplied by one factor each. A program has BLOCK_N rows of BLOCK_K columns of one of E matrices; grid
    (⌈OUT / BLOCK_N⌉, ⌈IN / BLOCK_K⌉, E).
    """
    expert = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert * OUT + row
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ranks = tl.arange(0, BLOCK_R)
    inside = (row < OUT)[:, None] & (columns < IN)[None, :]
    left = tl.load(up + rows[:, None] * R + ranks[None, :], mask=(row < OUT)[:, None] & (ranks < R)[None, :], other=0.0)
    right = tl.load(
        A + (expert * R + ranks)[:, None] * IN + columns[None, :],
        mask=(ranks < R)[:, None] & (columns < IN)[None, :], other=0.0,
    )  # fmt: skip
    # A delta is a hundredth of its weight and a step a tenth, so that TF32's error moves one rounding in 10⁵.
    delta = tl.dot(left, right, input_precision=PRECISION)
    place = rows.to(tl.int64)[:, None] * IN + columns[None, :]
    block = rows.to(tl.int64)[:, None] * (IN // SHARED) + columns[None, :] // SHARED
    scale = tl.load(step + block, mask=inside, other=0.0)
    if STORED:
        seed = tl.load(seeds + rows, mask=row < OUT, other=0)
        values = _stored_units(matrix, seed, table, place, columns, inside, HIGH_FIRST) * scale + delta
    else:
        values = tl.load(matrix + place, mask=inside, other=0.0).to(tl.float32) + delta
    if GAIN:
        values *= tl.load(gain + rows, mask=row < OUT, other=0.0)[:, None]
    units = tl.where(scale != 0, values, 0.0)
    if LEVELS:
        lowest = tl.load(low + block, mask=inside, other=0.0)
        highest = tl.load(top + rows, mask=row < OUT, other=0).to(tl.float32)[:, None]
        units = tl.where(scale != 0, values + lowest, 0.0) / tl.where(scale != 0, scale, 1.0)
        # Adding 1.5 · 2²³ leaves no bits below one: rounds to even, as XLA does.
        units = tl.minimum(tl.maximum(units, 0.0), highest)
        level = (units + 12582912.0) - 12582912.0
        values = level * scale - lowest
    else:
        units = units / tl.where(scale != 0, scale, 1.0)
        level = _nearest_e2m1(units) if VALUES == 0 else _nearest_of(units, table, VALUES)
        values = level * scale
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)
