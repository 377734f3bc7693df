"""Drawing the next token from a model's logits."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxglue.config import Config, NonNegativeFloat, PositiveInt, Range


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """How tokens are drawn, and when to stop."""

    max_tokens: PositiveInt = 512
    """New tokens at most."""
    temperature: NonNegativeFloat = 0.7
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 0.95
    """Draw from the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling, arXiv 1904.09751)."""
    seed: int = 0
    """Draws the tokens."""


GREEDY = SamplingConfig(temperature=0.0)
"""Always the likeliest token."""


@partial(jax.jit, static_argnames=("temperature", "top_p"))
def sample_token(logits: Float[Array, " V"], key: PRNGKeyArray, temperature: float, top_p: float) -> Int[Array, ""]:
    """One token drawn from float32 logits; the arguments are those of `SamplingConfig`."""
    if temperature == 0:
        return jnp.argmax(logits)
    logits = logits / temperature
    return jax.random.categorical(key, jnp.where(_in_nucleus(logits, top_p), logits, -jnp.inf))


def _in_nucleus(logits: Float[Array, " V"], top_p: float):
    """The likeliest tokens, until their probabilities reach `top_p`; the likeliest one in any case."""
    order = jnp.argsort(logits, descending=True)
    probabilities = jax.nn.softmax(logits)[order]
    before = jnp.cumsum(probabilities) - probabilities
    return jnp.zeros(logits.shape, bool).at[order].set(before < top_p)
