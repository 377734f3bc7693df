"""Drawing the next token from a model's logits."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn, and when to stop."""

    max_tokens: int = 512
    """New tokens at most."""
    temperature: float = 0.7
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float = 0.95
    """Draw from the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling, arXiv 1904.09751)."""
    seed: int = 0
    """Draws the tokens."""

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


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
