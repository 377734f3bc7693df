"""AdamW of many tensors in a few launches, where XLA would launch kernels for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from jax_triton import triton_call
from jaxtyping import Array, Float

from jaxglue.training.adam import AdamW, Hyper
from jaxglue.training.adam_kernels import adam_kernel, square_norm_kernel

_TILE = 4096
"""Values that a program takes."""
_TENSORS = 112
"""Tensors in a launch at most: their addresses fit into the 4 KiB of arguments that every driver takes. All in one
launch are no faster on the GPU, and the kernel takes longer to compile."""


@dataclass(frozen=True, kw_only=True)
class TritonAdam:
    """Updates in place."""

    adam: AdamW
    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    def square_norm(self, gradients: Sequence[Float[Array, "*S"]]) -> Float[Array, ""]:
        """Σ g² over all tensors, the same on every run."""
        parts = []
        for some in batched(gradients, _per_launch(len(gradients))):
            tiles = _tiles(some, [True] * len(some))
            out = jax.new_ref(jax.lax.empty((len(tiles),), jnp.float32))
            self._launch(square_norm_kernel, (jnp.asarray(tiles), some, out), len(tiles), {})
            parts.append(jax.freeze(out))
        return jnp.sum(jnp.concatenate(parts))

    def update(
        self, parameters: Sequence[Any], means, squares, gradients, decays: Sequence[bool], hyper: Hyper
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """(parameters, means, squares) after a step: float32, but for the means, which may be bfloat16."""
        values, kind = jnp.stack(hyper), tl.bfloat16 if self.adam.moments == "bfloat16" else tl.float32
        adam = self.adam
        constants = {"BETA1": adam.beta1, "BETA2": adam.beta2, "EPSILON": adam.epsilon, "DECAY": adam.weight_decay}
        refs = [[jax.new_ref(array) for array in arrays] for arrays in (parameters, means, squares)]
        for some in batched(range(len(parameters)), _per_launch(len(parameters))):
            here = slice(some[0], some[-1] + 1)
            tiles = _tiles(parameters[here], decays[here])
            arrays = (jnp.asarray(tiles), values, tuple(gradients[here]), *(tuple(ref[here]) for ref in refs))
            self._launch(adam_kernel, arrays, len(tiles), {**constants, "MEAN": kind})
        after = [[jax.freeze(ref) for ref in some] for some in refs]
        return after[0], after[1], after[2]

    def _launch(self, kernel, arrays, programs: int, constants) -> None:
        triton_call(
            *arrays,
            kernel=kernel,
            out_type=(),
            grid=(programs,),
            num_warps=4,
            num_stages=1,
            compute_capability=self.compute_capability,
            TILE=_TILE,
            **constants,
        )


def _per_launch(count: int) -> int:
    """Tensors in a launch: the same for all launches if it can be, so that one program serves them."""
    least = -(-count // _TENSORS)
    even = (count // launches for launches in range(least, 2 * least) if count % launches == 0)
    return next(even, _TENSORS)


def _tiles(tensors: Sequence[Any], decays: Sequence[bool]) -> np.ndarray:
    """See `adam_kernels`."""
    rows = [
        (number, tile, tensor.size, decay)
        for number, (tensor, decay) in enumerate(zip(tensors, decays, strict=True))
        for tile in range(-(-tensor.size // _TILE))
    ]
    return np.array(rows, np.int32)
