"""Launches of the kernels that expand quantized weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jaxtyping import Array, Float

from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.kernels import nf4_kernel
from jaxglue.ops.quant.nf4 import GROUP, NF4, VALUES

_BLOCK = 64
"""Blocks of 64 values that a program of 128 threads expands."""


@dataclass(frozen=True, kw_only=True)
class TritonExpander(Launcher):
    """Writes each weight to its rows of one array."""

    def expand(self, weights: Sequence[NF4], dtype) -> Float[Array, "out in"]:
        """See `jaxglue.ops.quant.expand.expand`."""
        rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        tables = jnp.asarray(dynamic_code()), jnp.asarray(np.array(VALUES, np.float32))
        out, first = jax.new_ref(jax.lax.empty((rows, columns), dtype)), 0
        for weight in weights:
            count = weight.scales.size
            parts = weight.codes, weight.scales, weight.scale_absmax, weight.scale_offset
            constants = {"FIRST": first, "COUNT": count, "GROUP": GROUP, "BLOCK": _BLOCK}
            self._launch(nf4_kernel, (*parts, *tables, out), (), (triton.cdiv(count, _BLOCK),), constants)
            first += prod(weight.shape)
        return jax.freeze(out)
