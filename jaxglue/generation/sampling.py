"""Sampling of the next token from logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@partial(jax.jit, static_argnames=("temperature", "top_p"))
def sample_token(logits: Float[Array, " V"], key: PRNGKeyArray, temperature: float, top_p: float) -> Int[Array, ""]:
    """Sample a token from float32 logits; arguments as in `SamplingConfig`."""
    if temperature == 0:
        return jnp.argmax(logits)
    logits = logits / temperature
    if top_p == 1:  # rounding in the cumulative sum would drop the least likely tokens
        return jax.random.categorical(key, logits)
    return jax.random.categorical(key, jnp.where(_in_nucleus(logits, top_p), logits, -jnp.inf))


def _in_nucleus(logits: Float[Array, " V"], top_p: float):
    """Return a mask of the most likely tokens until their probabilities reach `top_p`, at least one."""
    order = jnp.argsort(logits, descending=True)
    probabilities = jax.nn.softmax(logits)[order]
    before = jnp.cumsum(probabilities) - probabilities
    return jnp.zeros(logits.shape, bool).at[order].set(before < top_p)
