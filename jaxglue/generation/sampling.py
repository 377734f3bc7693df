"""Sampling of the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32


def request_key(seed: int, index: int) -> UInt32[Array, " words"]:
    """Return the data of the random key of the prompt at this index; what else is answered does not change it."""
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), index))


@jax.jit
def sample_tokens(
    logits: Float[Array, "S V"],
    keys: UInt32[Array, "S words"],
    positions: Int[Array, " S"],
    temperatures: Float[Array, " S"],
    top_ps: Float[Array, " S"],
) -> Int[Array, " S"]:
    """Sample the token at each row's position from float32 logits.

    Args:
        logits: of S prompts.
        keys: of the prompts, from `request_key`.
        positions: of the tokens to sample.
        temperatures, top_ps: of the prompts, as in `SamplingConfig`.
    """
    likeliest = jnp.argmax(logits, axis=-1)

    def draw():
        at_position = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), positions)
        return jnp.where(temperatures > 0, jax.vmap(sample_token)(logits, at_position, temperatures, top_ps), likeliest)

    return jax.lax.cond((temperatures > 0).any(), draw, lambda: likeliest)


def sample_token(logits: Float[Array, " V"], key: PRNGKeyArray, temperature, top_p) -> Int[Array, ""]:
    """Sample a token from float32 logits at a temperature above 0."""
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    kept = _in_nucleus(jax.nn.softmax(logits), top_p) | (top_p >= 1)  # rounding would drop the least likely tokens
    return jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))


def _in_nucleus(probabilities: Float[Array, " V"], top_p) -> Bool[Array, " V"]:
    """Return a mask of the most likely tokens until they reach `top_p`, at least one; ties are all in or out.

    Bisect the bits of the least probability whose more likely tokens do not reach `top_p`: sorting takes much longer.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        falls_short = jnp.where(probabilities > threshold, probabilities, 0.0).sum() < top_p
        return jnp.where(falls_short, low, middle), jnp.where(falls_short, middle, high)

    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    _, bits = jax.lax.fori_loop(0, 31, halve, (jnp.int32(-1), one))
    return probabilities >= jax.lax.bitcast_convert_type(bits, jnp.float32)
