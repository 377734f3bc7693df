"""The definitions, in float32, as XLA fuses them."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.rope import apply_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """RMS norms over the head dim, of queries and of keys."""

    q_weight: Float[Array, " H"]
    k_weight: Float[Array, " H"]
    eps: float = field(metadata={"static": True})

    @property
    def weights(self) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Of queries and of keys."""
        return self.q_weight, self.k_weight


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """x over its root mean square, rounded to x's dtype, times the weight (`LlamaRMSNorm` of transformers)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def reference_rotate(q, k, cos, sin, norms: HeadNorms | None) -> tuple[Array, Array]:
    """(q, k), normed where there are norms, then rotated."""
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)
