"""Cross-entropy fused with the output projection: the logits of one chunk of tokens exist at a time."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import compute_capability, triton_capability, why_not_triton

__all__ = ["CrossEntropy", "chunk_size", "linear_cross_entropy", "reference_cross_entropy"]

CrossEntropy = Callable[..., tuple[Float[Array, " M"], Float[Array, "M V"]]]
"""(float32 logits [M, V], targets, weights, dtype) → each token's loss and the gradient to the logits in `dtype`."""

LOGITS_BYTES = 2**30
"""Memory that the float32 logits of a chunk may take."""


def chunk_size(vocab_size: int) -> int:
    """Tokens in a chunk: the largest power of two whose logits fit `LOGITS_BYTES`."""
    return 1 << max(LOGITS_BYTES // (4 * vocab_size), 1).bit_length() - 1


def _losses(logits, targets) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """(cross-entropy, log-sum-exp) of every token."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], lse


def reference_cross_entropy(logits, targets, weights, dtype) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """`CrossEntropy` as XLA computes it, in three passes over the logits."""
    losses, lse = _losses(logits, targets)
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    dlogits = (jnp.exp(logits - lse[:, None]) - is_target) * weights[:, None]
    return weights * losses, dlogits.astype(dtype)


def _backend(dtype) -> CrossEntropy:
    """Ours on GPUs, which needs two passes; imported here, for only GPU installations have what it needs."""
    capability = compute_capability()
    if capability is None or why_not_triton(dtype, capability):
        return reference_cross_entropy
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

    return TritonCrossEntropy(compute_capability=triton_capability(capability))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
    chunk: int | None = None,
) -> Float[Array, ""]:
    """Σ loss_weights · cross-entropy(x·Wᵀ, targets), accumulated in float32.

    The gradients to `x` and `weight` are formed chunk by chunk while the logits are there, so the backward pass
    computes no logits again; the gradient to `weight` only where it is asked for.

    Args:
        x: hidden states of M tokens, after the final norm.
        weight: the output projection.
        targets: the token that each token predicts.
        loss_weights: weight of each prediction; 0 leaves it out. Not differentiated.
        chunk: tokens whose logits exist at a time; by default as many as `LOGITS_BYTES` allows.
    """
    return _scan_chunks(x, weight, targets, loss_weights, chunk, wants_x=False, wants_weight=False)[0]


def _scan_chunks(x, weight, targets, loss_weights, chunk, *, wants_x: bool, wants_weight: bool):
    """(loss, dx, dweight); a gradient is None where it is not wanted."""
    M, D = x.shape
    chunk = min(chunk or chunk_size(weight.shape[0]), M)
    padding = -M % chunk
    chunks = [
        jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)).reshape(-1, chunk, *array.shape[1:])
        for array in (x, targets, loss_weights)
    ]
    w, cross_entropy = weight.astype(x.dtype), _backend(x.dtype)

    def step(carry, inputs):
        loss, dweight = carry
        x_chunk, target, token_weight = inputs
        logits = lax.dot_general(x_chunk, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if not (wants_x or wants_weight):
            return (loss + jnp.sum(token_weight * _losses(logits, target)[0]), dweight), None
        losses, dlogits = cross_entropy(logits, target, token_weight, x.dtype)
        loss += jnp.sum(losses)
        if wants_weight:
            dweight += lax.dot_general(dlogits, x_chunk, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (loss, dweight), dlogits @ w if wants_x else None

    dweight = jnp.zeros(weight.shape, jnp.float32) if wants_weight else None
    (loss, dweight), dx = lax.scan(step, (jnp.float32(0), dweight), chunks)
    dx = dx.reshape(-1, D)[:M] if wants_x else None
    return loss, dx, dweight


def _forward(x, weight, targets, loss_weights, chunk):
    wants = {"wants_x": x.perturbed, "wants_weight": weight.perturbed}
    arguments = (x.value, weight.value, targets.value, loss_weights.value)
    loss, dx, dweight = _scan_chunks(*arguments, chunk, **wants)
    dweight = None if dweight is None else dweight.astype(weight.value.dtype)
    return loss, (dx, dweight)


def _backward(chunk, residuals, dloss):
    if isinstance(dloss, SymbolicZero):
        return None, None, None, None
    dx, dweight = (None if g is None else (g * dloss).astype(g.dtype) for g in residuals)
    return dx, dweight, None, None


linear_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
