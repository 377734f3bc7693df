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

    count: int = 4
    """Blocks of a program, all in its registers."""
    num_warps: int = 4
    kept_count: int = 4
    """Blocks that a row's program reads at a time to find its threshold."""
    kept_warps: int = 8

    def choose(self, logits, temperature, uniform, truncation) -> Choice:
        """See `jaxglue.ops.sampling.choose_tokens`."""
        B, V = logits.shape
        blocks, draws = triton.cdiv(V, BLOCK), temperature is not None
        sizes, lanes = {"V": V, "BLOCKS": blocks, "BLOCK": BLOCK}, triton.next_power_of_2(blocks)
        each, row = jax.ShapeDtypeStruct((B, blocks), jnp.float32), jax.ShapeDtypeStruct((B,), jnp.float32)
        cost = KernelCost(kind=KernelKind.ROWS)
        constants = sizes | {"COUNT": self.count} | ({} if draws else {"sums_at_temperature": None})
        grid, out_type = (B, triton.cdiv(blocks, self.count)), (each,) * (2 + draws)
        largest, sums, *at_temperature = self._launch(
            kernels.sums_kernel, (logits, temperature), out_type, grid, constants, self.num_warps, cost=cost
        )
        kept = [None, None]
        if draws and truncation is not None:
            out_type = each, row, jax.ShapeDtypeStruct((B, lanes), jnp.int32)
            constants = sizes | {"LANES": lanes, "COUNT": self.kept_count, "VALUES": 8}
            arrays = logits, largest, *at_temperature, temperature, *truncation
            *kept, _ = self._launch(kernels.keep_kernel, arrays, out_type, (B,), constants, self.kept_warps, cost=cost)
        out_type = jax.ShapeDtypeStruct((B,), jnp.int32), *(row,) * (2 + draws)
        constants = sizes | {"LANES": lanes} | ({} if draws else {"log_probs": None})
        arrays = logits, largest, sums, *(at_temperature or [None]), *kept, temperature, uniform
        cost = KernelCost(kind=KernelKind.ROWS, bytes=4 * B * (BLOCK + 3 * blocks))
        tokens, model_log_probs, normalizers, *others = self._launch(
            kernels.choose_kernel, arrays, out_type, (B,), constants, cost=cost
        )
        return Choice(tokens, others[0] if draws else model_log_probs, model_log_probs, normalizers)
