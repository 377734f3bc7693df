"""The model in training as reinforcement learning sees it: it writes answers, and tells their log-probabilities."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jaxglue.data.batch import Batch
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.rl.loop import RolloutSteps
from jaxglue.rl.sampler import Sample, Sampler
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.setup import Run
from jaxglue.training.step import TrainStep


class TrainedPolicy:
    """A run's model; sampling and training share the weights.

    Args:
        run: the run.
        model: before its first step, or a restored one: the reference is what it begins with.
        mesh: devices that share the work; None for one device.
    """

    def __init__(self, run: Run, model: TrainStep, mesh: Mesh | None):
        self._model, self._mesh, self._tokenizer = model, mesh, run.tokenizer
        settings, objective = run.config.model, run.workload.objective
        engine = Engine(model.graphdefs, run.model, dtype=settings.compute_dtype, attention=settings.attention)
        sampling = SamplingConfig(
            max_tokens=run.config.rollouts.max_completion_length,
            temperature=objective.temperature,
            top_p=1.0,
            seed=run.config.data.seed,
        )
        assert isinstance(run.batches, RolloutSteps)
        self._sample = Sampler(engine, run.stops, sampling, run.batches.typical_prompts)
        # Training donates its arrays, so the reference needs its own.
        self._reference = jax.tree.map(jnp.copy, model.trainable) if objective.beta else None

    def sample(self, prompts: Sequence[Sequence[int]], indices: Sequence[int], count: int) -> list[list[Sample]]:
        """Return answers by the present weights, with their texts."""
        found = self._sample(self._model.trainable, self._model.frozen, prompts, indices, count)
        return [[sample._replace(text=self._decode(sample)) for sample in group] for group in found]

    def log_probs(self, batch: Batch, *, reference: bool = False) -> Float[np.ndarray, "B T"]:
        """Return log-probabilities of targets under the present weights, or under those that training began with."""
        trainable = self._reference if reference else self._model.trainable
        assert trainable is not None
        placed = place_batch(batch, self._mesh)
        return np.asarray(self._model.executor.log_probs(trainable, self._model.frozen, placed))

    def _decode(self, sample: Sample) -> str:
        return str(self._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True))
