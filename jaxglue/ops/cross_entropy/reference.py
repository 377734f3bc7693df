"""Cross-entropy of logits and its gradient by XLA, in three passes over the logits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def token_losses(
    logits: Float[Array, "M V"], targets: Int[Array, " M"]
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Return (cross-entropy, log-sum-exp) of every token."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], lse


def reference_cross_entropy(logits, targets, weights, dtype) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """Return each token's weighted loss and the gradient to float32 logits [M, V] in `dtype`."""
    losses, lse = token_losses(logits, targets)
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    dlogits = (jnp.exp(logits - lse[:, None]) - is_target) * weights[:, None]
    return weights * losses, dlogits.astype(dtype)
