"""Losses and predictions of single tokens, without gradients."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import extend, split_chunks, times_transposed
from jaxglue.ops.cross_entropy.reference import cap_logits, token_losses


def linear_scores(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    chunk: int,
    softcap: float | None = None,
) -> tuple[Float[Array, " M"], Int[Array, " M"]]:
    """Return each token's cross-entropy, and the token with the largest logit.

    Args:
        x: hidden states of M tokens, after the final norm.
        weight: the output projection.
        targets: the token to predict at each position.
        chunk: tokens whose logits exist at a time.
        softcap: bound of the logits; None for none.
    """
    w = extend(weight, None, x.dtype)

    def step(_, inputs):
        x_chunk, target = inputs
        logits = times_transposed(x_chunk, w)[:, : len(weight)]
        return None, (token_losses(cap_logits(logits, softcap), target)[0], jnp.argmax(logits, axis=-1))

    _, (losses, best) = lax.scan(step, None, split_chunks(chunk, x, targets))
    return losses.ravel()[: len(targets)], best.ravel()[: len(targets)]


def linear_likely(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    chunk: int,
    count: int,
    softcap: float | None = None,
) -> tuple[Float[Array, " M"], Int[Array, "M count"], Float[Array, "M count"]]:
    """Return each target's log-probability, and the most likely tokens in its place with theirs.

    Arguments are those of `linear_scores`, and the number of likely tokens.
    """
    w = extend(weight, None, x.dtype)

    def step(_, inputs):
        x_chunk, target = inputs
        logits = cap_logits(times_transposed(x_chunk, w)[:, : len(weight)], softcap)
        losses, _ = token_losses(logits, target)
        own = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        values, ids = lax.top_k(logits, count)
        return None, (-losses, ids, values - (losses + own)[:, None])

    _, (log_probs, ids, likely) = lax.scan(step, None, split_chunks(chunk, x, targets))
    M = len(targets)
    return log_probs.ravel()[:M], ids.reshape(-1, count)[:M], likely.reshape(-1, count)[:M]
