"""What a run looks at between steps: the loss on held-out data, and how routers spread tokens over experts."""

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
    """Figures about a model as it stands.

    Args:
        setup: of the run; its held-out batches, if there are any.
        executor: runs the model.
        probe: reads its routers.
        mesh: the devices that share the work; None for one device.
    """

    def __init__(self, setup: Setup, executor: Executor, probe: ExpertLoadProbe, mesh: Mesh | None):
        self._batches, self._executor, self._mesh = setup.eval_batches, executor, mesh
        self._probe = None if setup.model.moe is None else probe
        self.best: tuple[float, int] | None = None
        """The lowest loss on held-out data, and its step."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to look at: held-out data, or routers."""
        return self._batches is not None or self._probe is not None

    def read(self, step: int, trainable: Params, frozen: Params, last_batch: Batch | None) -> dict[str, float]:
        """`eval_loss`, the mean per held-out target token, if there is such data, and what `ExpertLoadProbe` reads.

        Args:
            step: number of the step after which this is.
            trainable, frozen: parameter trees of `split_model`.
            last_batch: a batch for the routers, should nothing be held out.
        """
        values = {}
        if self._batches is not None:
            losses = [self._executor.loss(trainable, frozen, place_batch(batch, self._mesh)) for batch in self._batches]
            loss = values["eval_loss"] = float(np.sum(jax.device_get(losses))) / self._batches.targets
            if self.best is None or loss < self.best[0]:
                self.best = (loss, step)
        if self._probe is not None:
            batch = last_batch if self._batches is None else next(iter(self._batches))
            values |= self._probe.read(trainable, frozen, place_batch(batch, self._mesh))
        return values
