"""SwiGLU between adapters by XLA, which differentiates it."""

import jax
from jaxtyping import Array, Float

from jaxglue.ops.lora import lora_expand, lora_shrink


def reference_lora_swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    hidden: Float[Array, "*B ranks"],
    matrices: tuple[Float[Array, "F R"], Float[Array, "F R"], Float[Array, "R F"]],
) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """See `lora_swiglu`."""
    *second, down = matrices
    gate_adapter, up_adapter = lora_expand(hidden, second)
    out = jax.nn.silu(gate + gate_adapter) * (up + up_adapter)
    return out, lora_shrink(out, down)
