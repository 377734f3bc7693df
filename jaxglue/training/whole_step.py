"""The step of a small model as one program: loss, gradients and update.

Handing a program its arrays takes the host as long as a short step takes the GPU; a separate update would hand over
half as many again. As in `jaxglue.engine.layer_groups`, the program writes over the arrays of the last call.
"""

from collections.abc import Iterator

import numpy as np
from jax.stages import Traced
from jaxtyping import Array

from jaxglue.engine.compiler import jit_step, on_device
from jaxglue.engine.executor import LayerExecutor
from jaxglue.engine.layer_groups import SmallResults
from jaxglue.models.parameters import Params, without_parts
from jaxglue.training.optimizer import Optimizer


class WholeStep:
    """Runs a step of one micro-batch on one device as one compiled program.

    Args:
        executor: with one program for all layers.
        optimizer: whose update can be a part of a program.
    """

    def __init__(self, executor: LayerExecutor, optimizer: Optimizer):
        self._executor, self._optimizer = executor, optimizer
        self._results = SmallResults({"loss": executor.loss_shape, "grad_norm": (), "learning_rate": ()})
        donated = "trainable", "state", "places"
        self._program = jit_step(self._run, donate_argnames=donated, keep_unused=True)

    def __call__(
        self, trainable: Params, state: Params, frozen: Params, batch, total_weight: float, key, step: int
    ) -> tuple[Params, Params, dict[str, Array]]:
        """Return new trainable, new state, and the loss beside the values of `Optimizer.update`.

        Args:
            trainable, state: of the step; donated. Both are committed to the device, as is `frozen`.
            frozen, total_weight, key: as in `LayerExecutor.loss_and_gradients`.
            batch: of one micro-batch; a program takes arrays on the host sooner than `jax.device_put` copies them.
            step: optimizer steps done before.
        """
        arguments = frozen, batch, np.float32(1 / total_weight), key, np.int32(step), self._results.take()
        trainable, state, results = self._program(trainable, state, *arguments)
        return trainable, state, self._results.keep(results)

    def trace(self, trainable: Params, frozen: Params, batch, key) -> Iterator[Traced]:
        """Trace the program for shapes of parameters."""
        trainable, frozen = on_device((trainable, frozen))
        state, places = self._optimizer.state_shapes(trainable), self._results.abstract()
        yield self._program.trace(trainable, state, frozen, batch, np.float32(1), key, np.int32(0), places)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._program.compilations()

    def _run(self, trainable: Params, state: Params, frozen: Params, batch, scale, key, step, places):
        """Return trainable, state and results of the step, which XLA writes to the donated arrays."""
        loss, gradients = self._executor.loss_and_sums(trainable, frozen, batch, scale, key, without_parts(trainable))
        trainable, state, reported = self._optimizer.update(trainable, state, gradients, step)
        return trainable, state, {"loss": loss, **reported}
