"""Evaluation between steps: loss on held-out data, and load of experts."""

import math

import jax
import numpy as np
from jax.sharding import Mesh

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.models.parameters import Params
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.expert_load import ExpertLoadProbe
from jaxglue.training.setup import Setup


class Evaluation:
    """Evaluates a model during training.

    Args:
        setup: the run, perhaps with held-out batches.
        executor: runs the model.
        probe: reads its routers.
        mesh: devices that share the work; None for one device.
    """

    def __init__(self, setup: Setup, executor: Executor, probe: ExpertLoadProbe, mesh: Mesh | None):
        self._batches, self._executor, self._mesh = setup.eval_batches, executor, mesh
        self._probe = None if setup.model.moe is None else probe
        self.best: tuple[float, int] | None = None
        """The lowest loss on held-out data, and its step."""

    @property
    def is_needed(self) -> bool:
        """Whether the run has held-out data or routers."""
        return self._batches is not None or self._probe is not None

    def read(self, step: int, trainable: Params, frozen: Params, last_batch: Batch | None) -> dict[str, float]:
        """Return `eval_loss`, the mean per held-out target token, and expert load, where the run has them.

        Args:
            step: optimizer steps done.
            trainable, frozen: parameter trees of `split_model`.
            last_batch: batch for the routers where nothing is held out.
        """
        values = {}
        if self._batches is not None:
            losses = [self._executor.loss(trainable, frozen, place_batch(batch, self._mesh)) for batch in self._batches]
            loss = values["eval_loss"] = float(np.sum(jax.device_get(losses))) / self._batches.targets
            if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
                self.best = (loss, step)
        if self._probe is not None:
            batch = last_batch if self._batches is None else next(iter(self._batches))
            values |= self._probe.read(trainable, frozen, place_batch(batch, self._mesh))
        return values
