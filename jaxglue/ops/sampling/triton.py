"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.sampling import kernels
from jaxglue.ops.sampling.reference import BLOCK, Choice


@dataclass(frozen=True, kw_only=True)
class TritonSampling(Launcher):
    """`choose` by our own kernels."""

    def choose(self, logits, temperature, uniform) -> Choice:
        """See `jaxglue.ops.sampling.choose_tokens`."""
        (B, V), draws = logits.shape, temperature is not None
        blocks = triton.cdiv(V, BLOCK)
        sizes = {"V": V, "BLOCKS": blocks, "BLOCK": BLOCK}
        each, row = jax.ShapeDtypeStruct((B, blocks), jnp.float32), jax.ShapeDtypeStruct((B,), jnp.float32)
        constants = sizes if draws else sizes | {"sums_at_temperature": None}
        arrays, cost = (logits, temperature), KernelCost(kind=KernelKind.ROWS)
        sums = self._launch(kernels.sums_kernel, arrays, (each,) * (2 + draws), (B, blocks), constants, cost=cost)
        constants = sizes | {"LANES": triton.next_power_of_2(blocks)} | ({} if draws else {"log_probs": None})
        arrays = logits, *sums, *(() if draws else (None,)), temperature, uniform
        out_type = jax.ShapeDtypeStruct((B,), jnp.int32), *(row,) * (2 + draws)
        cost = KernelCost(kind=KernelKind.ROWS, bytes=4 * B * (BLOCK + 3 * blocks))
        tokens, model_log_probs, normalizers, *others = self._launch(
            kernels.choose_kernel, arrays, out_type, (B,), constants, cost=cost
        )
        return Choice(tokens, others[0] if draws else model_log_probs, model_log_probs, normalizers)
