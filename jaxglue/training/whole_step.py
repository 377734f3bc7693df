"""The step of a small model as one program: loss, gradients and update.

A program's arrays take the host as long as a short step the GPU, and an update of its own would take half as many more.
As in `jaxglue.engine.whole_program`, results take the places of earlier ones.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced
from jaxtyping import Array

from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_step
from jaxglue.engine.executor import LayerExecutor
from jaxglue.engine.lowering import on_device
from jaxglue.engine.whole_program import separate_small_arrays
from jaxglue.models.parameters import Params, without_parts
from jaxglue.training.optimizer import Optimizer


class WholeStep:
    """Compiled step of one micro-batch on one device.

    Args:
        executor: with one program for all layers.
        optimizer: whose update can be a part of a program.
    """

    def __init__(self, executor: LayerExecutor, optimizer: Optimizer):
        self._executor, self._optimizer = executor, optimizer
        donated = "trainable", "state", "values"
        self._program = jit_step(self._run, donate_argnames=donated, keep_unused=True)
        self._copy = jax.jit(lambda values: jax.tree.map(jnp.copy, values))
        self._values: dict[str, Array] | None = None

    def __call__(
        self, trainable: Params, state: Params, frozen: Params, batch, total_weight: float, key, step: int
    ) -> tuple[Params, Params, dict[str, Array]]:
        """Return new trainable, new state, and the loss beside the values of `Optimizer.update`.

        Args:
            trainable, state: of the step; donated.
            frozen, total_weight, key: as in `LayerExecutor.loss_and_gradients`.
            batch: of one micro-batch; a program takes arrays on the host sooner than `jax.device_put` copies them.
            step: optimizer steps done before.
        """
        trainable, state, frozen = transfer.commit((trainable, state, frozen))
        if self._values is None:
            self._values = transfer.commit({name: jnp.zeros(shape) for name, shape in self._shapes().items()})
            self._bound = separate_small_arrays(self._values["loss"].device)
        scalars = np.float32(1 / total_weight), key, np.int32(step)
        trainable, state, self._values = self._program(trainable, state, frozen, batch, *scalars, self._values)
        return trainable, state, self._copy(self._values)

    def trace(self, trainable: Params, frozen: Params, batch, key) -> Iterator[Traced]:
        """Trace the program for shapes of parameters."""
        trainable, frozen = on_device((trainable, frozen))
        state = on_device(self._optimizer.state_shapes(trainable))
        values = on_device({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes().items()})
        yield self._program.trace(trainable, state, frozen, batch, np.float32(1), key, np.int32(0), values)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._program.compilations()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"loss": self._executor.loss_shape, "grad_norm": (), "learning_rate": ()}

    def _run(self, trainable: Params, state: Params, frozen: Params, batch, scale, key, step, values):
        """Return trainable, state and values after the step, which XLA writes to the donated arrays."""
        loss, gradients = self._executor.loss_and_sums(trainable, frozen, batch, scale, key, without_parts(trainable))
        trainable, state, reported = self._optimizer.update(trainable, state, gradients, step)
        return trainable, state, {"loss": loss, **reported}
