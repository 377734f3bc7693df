"""The definition: every group on every row, and each row keeps its own. E times the work: for small models."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.moe.groups import GroupMetadata


def reference_grouped_matmul(
    lhs: Float[Array, "S K"], rhs: Float[Array, "E K N"], groups: GroupMetadata, bias: Float[Array, "E N"] | None
) -> Float[Array, "S N"]:
    """out[s] = lhs[s] · rhs[group of s] (+ bias[group of s]), summed in float32; lhs's dtype."""
    group = groups.row_group(lhs.shape[0])[:, None, None]
    every = jnp.einsum("sk,ekn->sen", lhs, rhs.astype(lhs.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        every += bias.astype(jnp.float32)
    return jnp.take_along_axis(every, group, axis=1)[:, 0].astype(lhs.dtype)
