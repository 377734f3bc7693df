"""The only program of a micro-batch of a small model, whose buffers keep their addresses.

XLA dispatches a program's kernels as CUDA graphs, and updates a kernel's node wherever one of its buffers has another
address than in the last call. For all nodes this takes longer than a short step's kernels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.stages import Traced
from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_step
from jaxglue.engine.lowering import on_device
from jaxglue.models.parameters import Params, without_parts

_HOLE, _BOUND = 16 << 20, 2 << 20
"""Bytes for small arrays, and of the array behind them."""
SMALL_ARRAYS = _HOLE + _BOUND
"""Bytes of both."""


def separate_small_arrays(device: jax.Device) -> Array | None:
    """Leave a hole in JAX's pool for small arrays, and return the array that bounds it, to be kept.

    A program's temporaries begin where the pool's largest free block does: not at the same address in each step where
    batches and losses come and go there.
    """
    if device.platform == "cpu":
        return None
    hole, bound = (jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=device)) for size in (_HOLE, _BOUND))
    hole.delete()
    return bound


class WholeProgram:
    """Compiled loss and gradients of a micro-batch, in the places of earlier ones.

    Args:
        loss_and_sums: (trainable, frozen, batch, scale, key, sums) → loss, and `sums` plus the gradients.
        loss_shape: of the loss.
    """

    def __init__(self, loss_and_sums: Callable[..., tuple[Array, Params]], loss_shape: tuple[int, ...]):
        self._loss_and_sums, self._loss_shape = loss_and_sums, loss_shape
        self._program = jit_step(
            self._run, static_argnames="accumulates", donate_argnames=("into", "loss"), keep_unused=True
        )
        self._copy = jax.jit(jnp.copy)
        self._loss: Array | None = None

    def __call__(
        self, trainable: Params, frozen: Params, batch, scale, key, into: Params, *, accumulates: bool
    ) -> tuple[Float[Array, "..."], Params]:
        """Return the loss and the gradients; add these to `into`, which is donated, or take only its place."""
        if self._loss is None:
            self._loss = transfer.commit(jnp.zeros(self._loss_shape))
            self._bound = separate_small_arrays(self._loss.device)
        arguments = trainable, frozen, batch, scale, key, into, self._loss
        self._loss, gradients = self._program(*arguments, accumulates=accumulates)
        return self._copy(self._loss), gradients  # the caller keeps losses until they are logged

    def trace(self, trainable: Params, frozen: Params, batch, scale, key, into: Params, *, accumulates: bool) -> Traced:
        """Trace the program on shapes of arrays."""
        place = on_device(jax.ShapeDtypeStruct(self._loss_shape, jnp.float32))
        return self._program.trace(trainable, frozen, batch, scale, key, into, place, accumulates=accumulates)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._program.compilations()

    def _run(self, trainable, frozen, batch, scale, key, into: Params, loss: Array, accumulates: bool):
        """Return loss and gradients, which XLA writes to the donated arrays."""
        sums = into if accumulates else without_parts(into)
        return self._loss_and_sums(trainable, frozen, batch, scale, key, sums)
