"""Differentiation rule of the fused backend."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jaxglue.ops.lora import lora_expand_gradients

Matrices = tuple[Float[Array, "F R"], Float[Array, "F R"], Float[Array, "R F"]]
"""float32: the second matrices of gate's and up's adapters, times their scale, and the first one of down's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ScaledProducts:
    """gate and up, e4m3 or wider, without their scales, which are float32. A pytree."""

    gate: Float[Array, "M F"]
    up: Float[Array, "M F"]
    row_scales: Float[Array, "M 1"]
    gate_scales: Float[Array, " F"]
    up_scales: Float[Array, " F"]

    @property
    def scales(self) -> tuple[Array, Array, Array]:
        """Return the scales of rows, of gate's columns and of up's."""
        return self.row_scales, self.gate_scales, self.up_scales


class LoraSwigluBackend(Protocol):
    """Kernels of a forward and backward pass over rows; hashable."""

    def forward(self, gate, up, hidden, matrices: Matrices) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
        """See `lora_swiglu`."""

    def backward(self, gate, up, hidden, matrices: Matrices, dout, dranks) -> tuple[Array, Array, Array]:
        """Return the gradients to gate and up in their dtype, and to down in float32."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_lora_swiglu(
    backend: LoraSwigluBackend,
    gate: Float[Array, "M F"],
    up: Float[Array, "M F"],
    hidden: Float[Array, "M ranks"],
    matrices: Matrices,
) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
    """See `lora_swiglu`."""
    return backend.forward(gate, up, hidden, matrices)


def _forward(backend, *arguments):
    return backend.forward(*arguments), arguments


def _backward(backend, arguments, cotangents):
    _, _, hidden, (*second, _) = arguments
    dgate, dup, ddown = backend.backward(*arguments, *cotangents)
    dhidden, dsecond = lora_expand_gradients(hidden, second, (dgate, dup))
    return dgate, dup, dhidden, (*dsecond, ddown)


fused_lora_swiglu.defvjp(_forward, _backward)
