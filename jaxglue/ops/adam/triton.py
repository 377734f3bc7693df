"""AdamW of many tensors in a few launches; XLA launches kernels for each tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from jaxtyping import Array, Float

from jaxglue.ops.adam.kernels import adam_8bit_kernel, adam_kernel, square_norm_kernel
from jaxglue.ops.adam.reference import BLOCK, AdamW, EightBit, StepScalars
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.quant.blocks import dynamic_code, midpoints

_TILE = 4096
"""Values of a program."""
_ADDRESSES = 480
"""Most arrays in a launch: their addresses fit the 4 KiB of arguments that every driver takes, and more compile slowly
without running faster."""
_PARTS = ("codes", "absmax")
_COST = KernelCost(kind=KernelKind.ROWS)


@dataclass(frozen=True, kw_only=True)
class TritonAdam(Launcher):
    """AdamW by our own kernels, in place."""

    adam: AdamW

    def square_norm(self, gradients: Sequence[Float[Array, "*S"]]) -> Float[Array, ""]:
        """Compute Σ g² over all tensors, deterministically."""
        parts = []
        for some in batched(gradients, _per_launch(len(gradients), 1)):
            tiles = _tiles(some, [True] * len(some))
            out = jax.new_ref(jax.lax.empty((len(tiles),), jnp.float32))
            arrays = jnp.asarray(tiles), some, out
            self._launch(square_norm_kernel, arrays, (), (len(tiles),), {"TILE": _TILE}, cost=_COST)
            parts.append(jax.freeze(out))
        return jnp.sum(jnp.concatenate(parts))

    def update(
        self, parameters: Sequence[Any], mus, nus, gradients, decays: Sequence[bool], scalars: StepScalars
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return (parameters, mus, nus) after a step; moments may have any format."""
        values = jnp.stack(scalars)
        refs = jax.tree.map(jax.new_ref, (list(parameters), list(mus), list(nus)))
        eight = [number for number, mu in enumerate(mus) if isinstance(mu, EightBit)]
        float_moments = [number for number, mu in enumerate(mus) if not isinstance(mu, EightBit)]
        for numbers, launch, each in ((float_moments, self._update_whole, 4), (eight, self._update_eight, 6)):
            for some in batched(numbers, _per_launch(len(numbers), each)):
                p, m, v = ([ref[i] for i in some] for ref in refs)
                tiles = jnp.asarray(_tiles([parameters[i] for i in some], [decays[i] for i in some]))
                launch(tiles, values, tuple(gradients[i] for i in some), tuple(p), m, v)
        return jax.tree.map(jax.freeze, refs)

    def _update_whole(self, tiles, scalars, gradients, parameters, mus, nus) -> None:
        kind = tl.bfloat16 if self.adam.moments == "bfloat16" else tl.float32
        arrays = (tiles, scalars, gradients, parameters, tuple(mus), tuple(nus))
        self._launch(adam_kernel, arrays, (), (len(tiles),), {**self._constants, "MU": kind}, cost=_COST)

    def _update_eight(self, tiles, scalars, gradients, parameters, mus, nus) -> None:
        codes = dynamic_code(), dynamic_code(signed=False)
        tables = jnp.asarray(np.stack([row for code in codes for row in (code, np.append(midpoints(code), code[-1]))]))
        moments = (tuple(getattr(moment, part) for moment in some) for some in (mus, nus) for part in _PARTS)
        arrays = (tiles, scalars, tables, gradients, parameters, *moments)
        constants = {**self._constants, "BLOCK": BLOCK}
        self._launch(adam_8bit_kernel, arrays, (), (len(tiles),), constants, cost=_COST)

    @property
    def _constants(self) -> dict[str, float]:
        adam = self.adam
        numbers = {"BETA1": adam.beta1, "BETA2": adam.beta2, "EPSILON": adam.epsilon, "DECAY": adam.weight_decay}
        return {**numbers, "TILE": _TILE}


def _per_launch(count: int, each: int) -> int:
    """Return the tensors, of `each` arrays, in a launch; the same in all launches if possible, to share one program."""
    most = _ADDRESSES // each
    least = -(-count // most)
    even = (count // launches for launches in range(least, 2 * least) if count % launches == 0)
    return next(even, most)


def _tiles(tensors: Sequence[Any], decays: Sequence[bool]) -> np.ndarray:
    """Return the table of `jaxglue.ops.adam.kernels`."""
    rows = [
        (number, tile, tensor.size, decay)
        for number, (tensor, decay) in enumerate(zip(tensors, decays, strict=True))
        for tile in range(-(-tensor.size // _TILE))
    ]
    return np.array(rows, np.int32)
