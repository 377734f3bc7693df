"""The program of a whole micro-batch, whose buffers keep their addresses from call to call.

XLA dispatches a program's kernels as CUDA graphs, and updates a kernel's node wherever one of its buffers has another
address than in the last call. Updating all nodes takes longer than a short step's kernels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.stages import Traced
from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_exchanging, jit_step, on_devices
from jaxglue.models.parameters import Params, without_parts
from jaxglue.ops.zeros import zeros_on
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout

_HOLE, _BOUND = 16 << 20, 2 << 20
"""Bytes for small arrays, and of the array behind them."""
SMALL_ARRAYS = _HOLE + _BOUND
"""Bytes of both."""


def separate_small_arrays(device: jax.Device) -> Array | None:
    """Leave a hole in JAX's pool for small arrays; return the array that bounds it while it is kept.

    Temporaries begin with the pool's largest free block. Batches and losses that come and go at its start would move
    them in each step.
    """
    if device.platform == "cpu":
        return None
    hole, bound = (jax.block_until_ready(zeros_on(device, size, jnp.uint8)) for size in (_HOLE, _BOUND))
    hole.delete()
    return bound


class SmallResults:
    """Keeps the places of a program's small results, which the program donates to itself from call to call.

    Args:
        shapes: of the results, float32.
        layout: of the model's arrays.
        spec: of the results on a mesh, by default whole on all devices.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        layout: Layout = SINGLE_DEVICE,
        spec: PartitionSpec | None = None,
    ):
        self._shapes, self._layout = shapes, layout
        self._spec = PartitionSpec() if spec is None else spec
        self._copy = jax.jit(lambda results: jax.tree.map(jnp.copy, results))
        self._places: dict[str, Array] | None = None

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the places."""
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes.items()}
        return on_devices(self._layout, shapes, self._spec)

    def take(self) -> dict[str, Array]:
        """Return the places, to donate; make them, and the hole for small arrays, in the first call."""
        if self._places is None:
            zeros = jax.jit(
                lambda: {name: jnp.zeros(shape) for name, shape in self._shapes.items()},
                out_shardings=self._layout.sharding(self._spec),
            )
            self._places = transfer.commit(zeros())
            devices = next(iter(self._places.values())).sharding.addressable_devices
            self._bounds = [separate_small_arrays(device) for device in devices]
        return self._places

    def keep(self, results: dict[str, Array]) -> dict[str, Array]:
        """Keep results as the next call's places; return copies, which a caller may hold until they are logged."""
        self._places = results
        return self._copy(results)


class MicroBatchProgram:
    """Computes a micro-batch's loss and gradients into the arrays of the last call.

    Args:
        loss_and_sums: (trainable, frozen, batch, scale, key, sums) → loss, and `sums` plus the gradients, on a mesh
            each device's own.
        loss_shape: of the loss.
        layout: of the model's arrays.
    """

    def __init__(
        self,
        loss_and_sums: Callable[..., tuple[Array, Params]],
        loss_shape: tuple[int, ...],
        layout: Layout = SINGLE_DEVICE,
    ):
        self._loss_and_sums = loss_and_sums
        self._results = SmallResults({"loss": loss_shape}, layout, layout.device_spec)
        self._program = (jit_exchanging if layout.gathers else jit_step)(
            self._run, static_argnames="accumulates", donate_argnames=("into", "places"), keep_unused=True
        )

    def __call__(
        self, trainable: Params, frozen: Params, batch, scale, key, into: Params, *, accumulates: bool
    ) -> tuple[Float[Array, "..."], Params]:
        """Return the loss and the gradients; add these to `into`, which is donated, or overwrite it."""
        arguments = trainable, frozen, batch, scale, key, into, self._results.take()
        results, gradients = self._program(*arguments, accumulates=accumulates)
        return self._results.keep(results)["loss"], gradients

    def trace(self, trainable: Params, frozen: Params, batch, scale, key, into: Params, *, accumulates: bool) -> Traced:
        """Trace the program on shapes of arrays."""
        places = self._results.abstract()
        return self._program.trace(trainable, frozen, batch, scale, key, into, places, accumulates=accumulates)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._program.compilations()

    def _run(self, trainable, frozen, batch, scale, key, into: Params, places: dict[str, Array], accumulates: bool):
        """Return loss and gradients, which XLA writes to the donated arrays."""
        sums = into if accumulates else without_parts(into)
        loss, gradients = self._loss_and_sums(trainable, frozen, batch, scale, key, sums)
        return {"loss": loss}, gradients
