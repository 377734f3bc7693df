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

    def choose(self, logits, temperature, uniform) -> Choice:
        """See `jaxglue.ops.sampling.choose_tokens`."""
        B, V = logits.shape
        blocks, draws = triton.cdiv(V, BLOCK), temperature is not None
        sizes = {"V": V, "BLOCKS": blocks, "BLOCK": BLOCK}
        cost = KernelCost(kind=KernelKind.ROWS)
        each = jax.ShapeDtypeStruct((B, blocks), jnp.float32)
        grid, absent = (B, triton.cdiv(blocks, self.count)), {} if draws else {"sums_at_temperature": None}
        constants = sizes | {"COUNT": self.count} | absent
        largest, sums, *at_temperature = self._launch(
            kernels.sums_kernel,
            (logits, temperature),
            (each,) * (2 + draws),
            grid,
            constants,
            self.num_warps,
            cost=cost,
        )
        row = jax.ShapeDtypeStruct((B,), jnp.float32)
        out_type = jax.ShapeDtypeStruct((B,), jnp.int32), *(row,) * (2 + draws)
        constants = sizes | {"LANES": triton.next_power_of_2(blocks)} | ({} if draws else {"log_probs": None})
        arrays = logits, largest, sums, *(at_temperature or (None,)), temperature, uniform
        cost = KernelCost(kind=KernelKind.ROWS, bytes=4 * B * (BLOCK + 3 * blocks))
        tokens, model_log_probs, normalizers, *others = self._launch(
            kernels.choose_kernel, arrays, out_type, (B,), constants, 4, cost=cost
        )
        return Choice(tokens, others[0] if draws else model_log_probs, model_log_probs, normalizers)
