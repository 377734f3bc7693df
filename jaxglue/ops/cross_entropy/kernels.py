"""Triton kernels of the loss and its gradient, from logits read once or twice, or from their factors."""

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale

RANGE = tl.constexpr(40.0)
WIDE_RANGE = tl.constexpr(60.0)


@triton.jit
def _scales(column_scales, columns, V: tl.constexpr):
    return tl.load(column_scales + columns, mask=columns < V, other=1.0)


@triton.jit
def _cross_entropy(
    logits, row_scales, column_scales, targets, weights, losses, dlogits, dscales,
    V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, dlogits, lanes = logits + row * WIDTH, dlogits + row * WIDTH, tl.arange(0, BLOCK)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    counted = tl.where(weight != 0.0, V, 0)
    # Each lane sums relative to its own largest logit.
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    if SCALED:
        row_scale, widest = tl.load(row_scales + row), tl.full((BLOCK,), -1e30, tl.float32)
    for start in range(0, counted, BLOCK):
        x, _ = _logits(logits, start + lanes, V, SOFTCAP)
        if SCALED:
            scales = _scales(column_scales, start + lanes, V)
            x *= row_scale * scales
            widest = tl.maximum(widest, x + tl.log(scales))
        now = tl.maximum(largest, x)
        total = total * tl.exp(largest - now) + tl.exp(x - now)
        largest = now
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.maximum(tl.sum(total * tl.exp(largest - top), 0), 1.0))  # the largest adds 1
    correct, _ = _capped(tl.load(logits + target), SOFTCAP)
    if SCALED:
        target_scale = tl.load(column_scales + target)
        correct *= row_scale * target_scale
        others = tl.where(weight != 0.0, tl.exp(tl.max(widest, 0) - lse), 0.0)
        absmax = tl.maximum(others, (1.0 - tl.exp(correct - lse)) * target_scale) * tl.abs(weight)
        dscale = e4m3_scale(absmax)
        tl.store(dscales + row, dscale)
    tl.store(losses + row, weight * (lse - correct))
    dtype = dlogits.dtype.element_ty
    for start in range(0, counted, BLOCK):
        columns = start + lanes
        x, slope = _logits(logits, columns, V, SOFTCAP)
        if SCALED:
            scales = _scales(column_scales, columns, V)
            x *= row_scale * scales
        gradient = (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0)) * (weight * slope)
        if SCALED:
            gradient = clip_e4m3(gradient * scales / dscale)
        tl.store(dlogits + columns, gradient.to(dtype), mask=columns < WIDTH)
    for start in range(counted, V, BLOCK):
        tl.store(dlogits + start + lanes, tl.full((BLOCK,), 0.0, tl.float32).to(dtype), mask=start + lanes < WIDTH)


@triton.jit
def cross_entropy_kernel(
    logits, targets, weights, losses, dlogits, V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute losses [M] and dlogits [M, WIDTH] of logits [M, WIDTH], of which the first V in a row count.

    One token in a program; weight 0 skips it. With a cap, logits are read before it, and the gradient is to these.
    Grid (M).
    """
    _cross_entropy(
        logits=logits, row_scales=weights, column_scales=weights, targets=targets, weights=weights, losses=losses,
        dlogits=dlogits, dscales=losses, V=V, WIDTH=WIDTH, BLOCK=BLOCK, SOFTCAP=SOFTCAP, SCALED=False,
    )  # fmt: skip


@triton.jit
def _capped(products, SOFTCAP: tl.constexpr):
    """Return logits of products, and their slopes: products themselves without a cap, else its tanh."""
    if SOFTCAP is None:
        return products, 1.0
    else:
        rest = 2.0 / (1.0 + tl.exp(products * (2.0 / SOFTCAP)))  # 1 - tanh
        return (1.0 - rest) * SOFTCAP, rest * (2.0 - rest)


@triton.jit
def _logits(products, columns, V: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return some columns' logits, -1e30 from the V-th on, and their slopes."""
    mask = columns < V
    x, slope = _capped(tl.load(products + columns, mask=mask, other=-1e30), SOFTCAP)
    if SOFTCAP is not None:
        x = tl.where(mask, x, -1e30)
    return x, slope


@triton.jit
def _exponentials(logits, numerators, counted, reference, lanes, V: tl.constexpr, WIDTH: tl.constexpr,
                  BLOCK: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Write exp(logits - reference) of a row, times slopes; return the largest logit and the exponentials' sum."""
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, counted, BLOCK):
        columns = start + lanes
        x, slope = _logits(logits, columns, V, SOFTCAP)
        exponentials = tl.exp(x - reference)
        largest, total = tl.maximum(largest, x), total + exponentials
        values = (exponentials * slope).to(numerators.dtype.element_ty)
        tl.store(numerators + columns, values, mask=columns < WIDTH)
    return tl.max(largest, 0), tl.sum(total, 0)


@triton.jit
def softmax_gradient_kernel(
    logits, targets, weights, losses, numerators, factors, V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute losses [M], and numerators [M, WIDTH] whose products with factors [M] are the gradient to logits.

    The first V logits of WIDTH in a row count.

    One token in a program; weight 0 skips it. Exponentials are relative to the largest logit of the first block, so
    that the logits are read once; again only where another exceeds it by more than RANGE. With a cap, logits are read
    before it, and the gradient is to these. Grid (M).
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits, numerators = logits + row * WIDTH, numerators + row * WIDTH
    target, weight = tl.load(targets + row), tl.load(weights + row)
    counted = tl.where(weight != 0.0, V, 0)
    reference, _ = _capped(tl.max(tl.load(logits + lanes, mask=lanes < V, other=-1e30), 0), SOFTCAP)
    largest, total = _exponentials(logits, numerators, counted, reference, lanes, V, WIDTH, BLOCK, SOFTCAP)
    if largest > reference + RANGE:
        reference = largest
        largest, total = _exponentials(logits, numerators, counted, reference, lanes, V, WIDTH, BLOCK, SOFTCAP)
    total = tl.where(weight != 0.0, total, 1.0)
    correct, slope = _capped(tl.load(logits + target), SOFTCAP)
    correct -= reference
    tl.store(losses + row, weight * (tl.log(total) - correct))
    tl.store(factors + row, weight / total)
    dtype = numerators.dtype.element_ty
    for start in range(counted, V, BLOCK):
        tl.store(numerators + start + lanes, tl.full((BLOCK,), 0.0, tl.float32).to(dtype), mask=start + lanes < WIDTH)
    tl.debug_barrier()  # other threads wrote the target's exponential
    tl.store(numerators + target, tl.where(weight != 0.0, (tl.exp(correct) - total) * slope, 0.0).to(dtype))


@triton.jit
def _differences(x, w, reference, start, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return BLOCK logits of one row less its reference; -1e30 beyond the vocabulary."""
    columns, features = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for k in range(0, D, BLOCK_D):
        inside = k + features < D
        mask = (columns < V)[:, None] & inside[None, :]
        row = tl.load(x + k + features, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(w + columns[:, None].to(tl.int64) * D + k + features[None, :], mask=mask, other=0.0)
        total += tl.sum(tile.to(tl.float32) * row[None, :], 1)
    return tl.where(columns < V, total - reference, -1e30)


@triton.jit
def exponentials_loss_kernel(
    x, w, references, sums, tops, weights, numerators, losses, factors,
    V: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute losses and factors [M] as `softmax_gradient_kernel`, from the results of `exponentials_kernel`. Grid (M).

    A row with a logit far above its reference, the target's, is computed again relative to its largest one.
    """
    row, lanes, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_TILES)
    mask, at = tiles < TILES, row * TILES + tiles
    total = tl.sum(tl.load(sums + at, mask=mask, other=0.0), 0)
    top = tl.max(tl.load(tops + at, mask=mask, other=-1e30), 0)
    shift = 0.0
    if top > WIDE_RANGE:
        shift, reference = top, tl.load(references + row) + top
        total, x, numerators = 0.0, x + row * D, numerators + row * WIDTH
        for start in range(0, V, BLOCK):
            exponentials = tl.exp(_differences(x, w, reference, start, V, D, BLOCK, BLOCK_D))
            total += tl.sum(exponentials, 0)
            to = numerators + start + lanes
            tl.store(to, exponentials.to(numerators.dtype.element_ty), mask=start + lanes < WIDTH)
    weight = tl.load(weights + row)
    total = tl.where(weight != 0.0, total, 1.0)
    tl.store(losses + row, weight * (shift + tl.log(total)))
    tl.store(factors + row, weight / total)


@triton.jit
def scaled_cross_entropy_kernel(
    products,
    row_scales,
    column_scales,
    targets,
    weights,
    losses,
    dlogits,
    dscales,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute as `cross_entropy_kernel`, of logits without their scales of rows [M] and columns [WIDTH].

    Write the gradient times the columns' scales as e4m3 dlogits [M, WIDTH], by its largest value in a row, dscales [M].
    """
    _cross_entropy(
        logits=products, row_scales=row_scales, column_scales=column_scales, targets=targets, weights=weights,
        losses=losses, dlogits=dlogits, dscales=dscales, V=V, WIDTH=WIDTH, BLOCK=BLOCK, SOFTCAP=None, SCALED=True,
    )  # fmt: skip
