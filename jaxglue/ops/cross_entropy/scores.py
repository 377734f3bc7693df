"""Losses and predictions of single tokens, without gradients."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, extend, split_chunks
from jaxglue.ops.cross_entropy.reference import token_losses


def chunked_scores(
    spec: ChunkSpec, x: Float[Array, "M D"], weight: Float[Array, "V D"], targets: Int[Array, " M"]
) -> tuple[Float[Array, " M"], Int[Array, " M"]]:
    """See `linear_scores`."""
    w = extend(weight, None, x.dtype)

    def step(_, inputs):
        x_chunk, target = inputs
        logits = spec.multiply(x_chunk, w)
        return None, (_losses(spec, x_chunk, w, logits, target), jnp.argmax(logits[:, : len(weight)], axis=-1))

    _, (losses, best) = lax.scan(step, None, split_chunks(spec.chunk, x, targets))
    return losses.ravel()[: len(targets)], best.ravel()[: len(targets)]


def chunked_likely(
    spec: ChunkSpec, x: Float[Array, "M D"], weight: Float[Array, "V D"], targets: Int[Array, " M"], count: int
) -> tuple[Float[Array, " M"], Int[Array, "M count"], Float[Array, "M count"]]:
    """See `linear_likely`."""
    w = extend(weight, None, x.dtype)

    def step(_, inputs):
        x_chunk, target = inputs
        logits = spec.multiply(x_chunk, w)
        losses, capped = _losses(spec, x_chunk, w, logits, target), spec.cap(logits)
        own = jnp.take_along_axis(capped, target[:, None], axis=-1)[:, 0]
        values, ids = lax.top_k(capped, count)
        return None, (-losses, ids, values - (losses + own)[:, None])

    _, (log_probs, ids, likely) = lax.scan(step, None, split_chunks(spec.chunk, x, targets))
    M = len(targets)
    return log_probs.ravel()[:M], ids.reshape(-1, count)[:M], likely.reshape(-1, count)[:M]


def _losses(spec: ChunkSpec, x, w, logits, targets) -> Float[Array, " M"]:
    """Return the cross-entropy of logits x·wᵀ, in the order of training's where the spec is exact."""
    if spec.exact:
        return spec.losses_of(x, w, logits, targets, jnp.ones(len(targets), jnp.float32))
    return token_losses(spec.cap(logits), targets)[0]
