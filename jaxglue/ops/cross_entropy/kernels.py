"""Triton kernel of the loss and its gradient; it reads the logits twice and writes the gradient once."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(logits, targets, weights, losses, dlogits, V: tl.constexpr, BLOCK: tl.constexpr):
    """Compute losses [M] and dlogits [M, V] of logits [M, V], one token in a program; weight 0 skips it. Grid (M)."""
    row = tl.program_id(0).to(tl.int64)
    logits, dlogits, lanes = logits + row * V, dlogits + row * V, tl.arange(0, BLOCK)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    counted = tl.where(weight != 0.0, V, 0)
    # Each lane sums relative to its own largest logit.
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, counted, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < V, other=-1e30)
        now = tl.maximum(largest, x)
        total = total * tl.exp(largest - now) + tl.exp(x - now)
        largest = now
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.maximum(tl.sum(total * tl.exp(largest - top), 0), 1.0))  # the largest adds 1
    tl.store(losses + row, weight * (lse - tl.load(logits + target)))
    dtype = dlogits.dtype.element_ty
    for start in range(0, counted, BLOCK):
        columns = start + lanes
        x = tl.load(logits + columns, mask=columns < V, other=-1e30)
        gradient = (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0)) * weight
        tl.store(dlogits + columns, gradient.to(dtype), mask=columns < V)
    for start in range(counted, V, BLOCK):
        tl.store(dlogits + start + lanes, tl.full((BLOCK,), 0.0, dtype), mask=start + lanes < V)
