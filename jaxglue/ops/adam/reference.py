"""AdamW (arXiv 1711.05101) of one tensor by XLA, its moments in float32, bfloat16 or 8 bits."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxglue.ops.choices import MomentFormat
from jaxglue.ops.quant.blocks import dynamic_code, nearest

BLOCK = 256
"""Values with a common scale in 8 bits."""
SMALLEST = 4096
"""Tensors of fewer values keep their moments in float32 instead of 8 bits, as in bitsandbytes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EightBit:
    """A moment in 8 bits (arXiv 2110.02861), a pytree: blocks of 256 codes of the dynamic type, in row-major order."""

    codes: UInt8[Array, "*S"]
    absmax: Float[Array, " blocks"]
    """Each block's largest magnitude."""


class StepScalars(NamedTuple):
    """Scalars common to all updates of a step, float32."""

    scale: Float[Array, ""]
    """Factor on the gradients, for clipping."""
    learning_rate: Float[Array, ""]
    mu_correction: Float[Array, ""]
    """1 − beta1^t."""
    nu_correction: Float[Array, ""]
    """1 − beta2^t."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Constants of AdamW, and its update of one tensor."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    moments: MomentFormat

    def init(self, parameter: Float[Array, "*S"]) -> tuple[Any, Any]:
        """Return (mu, nu) before the first step.

        nu stays in float32 beside a bfloat16 mu: bfloat16's 8 bits of precision cannot follow a decay of 0.999.
        """
        if self.moments == "8bit" and parameter.size >= SMALLEST:
            blocks = -(-parameter.size // BLOCK)
            zeros = EightBit(jnp.zeros_like(parameter, jnp.uint8), jnp.zeros(blocks, jnp.float32))
            return zeros, jax.tree.map(jnp.copy, zeros)
        mu = jnp.bfloat16 if self.moments == "bfloat16" else jnp.float32
        return jnp.zeros_like(parameter, mu), jnp.zeros_like(parameter, jnp.float32)

    def update(self, parameter, mu, nu, gradient, scalars: StepScalars, *, decays: bool) -> tuple[Any, Any, Any]:
        """Return (parameter, mu, nu) after a step."""
        gradient = gradient * scalars.scale
        m = self.beta1 * _values(mu, signed=True) + (1 - self.beta1) * gradient
        v = self.beta2 * _values(nu, signed=False) + (1 - self.beta2) * gradient * gradient
        step = m / scalars.mu_correction / (jnp.sqrt(v / scalars.nu_correction) + self.epsilon)
        if decays:
            step += self.weight_decay * parameter
        return parameter - scalars.learning_rate * step, _stored(mu, m, signed=True), _stored(nu, v, signed=False)

    def scalars(self, scale, learning_rate, step) -> StepScalars:
        """Return the scalars of step number `step`, counted from 0."""

        def correction(beta: float) -> Array:  # 1 − beta^t without cancellation; log in float64, as beta is near 1
            return -jnp.expm1((step + 1) * jnp.float32(math.log(beta))) if beta else jnp.float32(1)

        return StepScalars(scale, learning_rate, correction(self.beta1), correction(self.beta2))


def is_moment(leaf: object) -> bool:
    """Return whether this is an 8-bit moment, for `jax.tree.map(…, is_leaf=is_moment)`."""
    return isinstance(leaf, EightBit)


def _values(moment: Array | EightBit, *, signed: bool) -> Float[Array, "*S"]:
    if not isinstance(moment, EightBit):
        return moment.astype(jnp.float32)
    scales = jnp.repeat(moment.absmax, BLOCK)[: moment.codes.size].reshape(moment.codes.shape)
    return jnp.asarray(dynamic_code(signed=signed))[moment.codes] * scales


def _stored(moment: Array | EightBit, values: Float[Array, "*S"], *, signed: bool) -> Array | EightBit:
    """Return the values in this moment's format."""
    if not isinstance(moment, EightBit):
        return values.astype(moment.dtype)
    blocks = jnp.pad(values.ravel(), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    codes, absmax = nearest(blocks, dynamic_code(signed=signed))
    return EightBit(codes.ravel()[: values.size].reshape(values.shape), absmax)
