"""Gradients and update of a small model's optimizer step as one program."""

from typing import Any

import jax
import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import Program, jit_step
from jaxglue.engine.model_executor import Executor
from jaxglue.models.parameters import Params
from jaxglue.training.optimizer import Optimizer


class FusedStep:
    """One optimizer step of one micro-batch, which is one program of `executor` and of this one.

    The host takes about 10 µs for each array of a program: here gradients are none, and parameters pass once.
    """

    def __init__(self, executor: Executor, optimizer: Optimizer, trainable: Params):
        self._executor, self._optimizer = executor, optimizer
        self._kernels = optimizer.kernels(trainable)
        self.program: Program = jit_step(self._step, donate_argnames=("trainable", "state"))

    def __call__(
        self, trainable: Params, state: Params, frozen: Params, batch: Batch, total_weight: float, key: Any, step: int
    ) -> tuple[jax.Array, Params, Params, dict[str, jax.Array]]:
        """Return loss, trainable, optimizer state and reported values after a step; the old trees are donated.

        Args:
            trainable, state, frozen: trees of committed arrays.
            batch: the micro-batch.
            total_weight, key: as of `LayerExecutor.loss_and_gradients`.
            step: optimizer steps done before.
        """
        key = None if key is None else jax.random.fold_in(key, 0)
        return self.program(trainable, state, frozen, batch, np.float32(1.0 / total_weight), key, np.int32(step))

    def _step(self, trainable, state, frozen, batch, scale, key, step):
        loss, gradients = self._executor.micro_batch(trainable, frozen, batch, scale, key)
        return loss, *self._optimizer.update_inside(trainable, state, gradients, step, self._kernels)
