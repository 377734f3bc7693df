"""Cross-entropy of logits and its gradient by XLA, in three passes over the logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxglue.ops.row_sums import row_sums


def token_losses(
    logits: Float[Array, "M V"], targets: Int[Array, " M"], *, exact: bool = False
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Return (cross-entropy, log-sum-exp) of every token; see `log_sum_exp` for `exact`."""
    lse = log_sum_exp(logits) if exact else jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], lse


def log_sum_exp(logits: Float[Array, "M V"]) -> Float[Array, " M"]:
    """Return the log-sum-exp of rows by `row_sums`."""
    highest = jnp.max(logits, axis=-1)
    return highest + jnp.log(row_sums(jnp.exp(logits - highest[:, None])))


def cap_logits(logits: Float[Array, "*B V"], softcap: float | None, temperature: float = 1.0) -> Float[Array, "*B V"]:
    """Return c·tanh(logits / c), or the logits where there is no cap, over the temperature."""
    capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return _over(capped, temperature)


@dataclass(frozen=True)
class ReferenceCrossEntropy:
    """`reference_cross_entropy` of a vocabulary's logits, the first ones, that `cap_logits` bounds and divides."""

    vocab_size: int
    softcap: float | None = None
    temperature: float = 1.0
    exact: bool = False
    """Sum exponentials in one order."""

    def __call__(self, logits, targets, weights, dtype) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Return each token's weighted loss and the gradient to the logits as they were given, in `dtype`."""
        beyond = logits.shape[1] - self.vocab_size
        capped = cap_logits(logits[:, : self.vocab_size], self.softcap)
        divided = _over(capped, self.temperature)
        losses, gradient = reference_cross_entropy(divided, targets, weights, jnp.float32, exact=self.exact)
        gradient = _over(gradient, self.temperature)
        if self.softcap is not None:
            gradient *= 1 - jnp.square(capped / self.softcap)
        return losses, jnp.pad(gradient.astype(dtype), ((0, 0), (0, beyond)))


def _over(values: Float[Array, "M V"], temperature: float) -> Float[Array, "M V"]:
    return values if temperature == 1 else values / temperature


def reference_cross_entropy(
    logits, targets, weights, dtype, *, exact: bool = False
) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """Return each token's weighted loss and the gradient to float32 logits [M, V] in `dtype`."""
    losses, lse = token_losses(logits, targets, exact=exact)
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    dlogits = (jnp.exp(logits - lse[:, None]) - is_target) * weights[:, None]
    return weights * losses, dlogits.astype(dtype)
