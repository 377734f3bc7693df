"""Noise on embeddings in training (NEFTune, arXiv 2310.05914)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.ops.collectives import device_key
from jaxglue.ops.segments import PackedSegments

_SALT = 0x4E454654
"""Apart from the keys of dropout, which are split from the same one."""


def add_noise(
    x: Float[Array, "B T D"], segments: PackedSegments, alpha: float, key: PRNGKeyArray
) -> Float[Array, "B T D"]:
    """Add uniform noise within ± alpha / √(L·D), L being the length of each token's document; none to padding.

    Per device: the key of a mesh's device follows from its part of the batch.
    """
    lengths = (segments.ends - segments.starts)[..., None]
    bound = jnp.where(segments.segment_ids[..., None] > 0, alpha, 0) / jnp.sqrt(jnp.maximum(lengths, 1) * x.shape[-1])
    noise = jax.random.uniform(jax.random.fold_in(device_key(key), _SALT), x.shape, minval=-1, maxval=1)
    return (x + bound * noise).astype(x.dtype)
