"""The model in training as reinforcement learning sees it: it writes answers, and tells their log-probabilities."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.hf.hub import model_path
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import Params, split_model
from jaxglue.models.vocabulary import extended_matrix
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.rl.sampler import Sample, Sampler
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.setup import Run
from jaxglue.training.step import TrainStep


class Teacher:
    """A model whose distributions are distilled, on one device.

    Args:
        executor: of the model, which may be the one in training.
        trainable, frozen: its parameters.
        reference: its layers are those of the executor's reference model.
    """

    def __init__(self, executor: Executor, trainable: Params, frozen: Params, *, reference: bool = False):
        self._executor, self._trees, head = executor, (trainable, frozen), executor.embed_head
        self._reference = reference
        self._norm = jax.jit(
            lambda trainable, frozen, x: head.normed_output(trainable, frozen, x)[0].reshape(*x.shape[:-1], -1)
        )
        self.matrix = extended_matrix(head.output(trainable, frozen))
        """Output projection."""

    def hidden(self, batch: Batch) -> Float[np.ndarray, "B T E"]:
        """Return hidden states after the final norm."""
        trainable, frozen = self._trees
        x = self._executor.last_output(trainable, frozen, jax.device_put(batch), reference=self._reference)
        head = self._executor.embed_head
        return np.asarray(self._norm(head.parts(trainable), head.parts(frozen), x))


def make_teacher(run: Run, model: TrainStep) -> Teacher:
    """Return the teacher: the model in training without its adapter, or another folder's; on one device."""
    name, dtype = run.config.rollouts.teacher, run.config.model.compute_dtype
    assert name is not None and run.mesh.devices == 1
    if name == "base":
        without = jax.tree.map(jnp.zeros_like, model.trainable)  # adapters of embedding and head
        return Teacher(model.executor, without, model.frozen, reference=True)
    folder = model_path(name)
    storage = run.config.rollouts.teacher_quantize
    loaded = load_model(folder, dtype=dtype, quantize=run.config.model.storage if storage is None else storage)
    graphdefs, trainable, frozen = split_model(loaded, nnx.LoRAParam)
    executor = Executor(graphdefs, loaded.config, policy=PRESETS["full"], dtype=dtype)
    return Teacher(executor, trainable, frozen)


class TrainedPolicy:
    """A run's model; sampling and training share the weights.

    Args:
        run: the run.
        model: before its first step, or restored; the reference has the weights with which it begins.
        mesh: devices that share the work; None for one device.
    """

    def __init__(self, run: Run, model: TrainStep, mesh: Mesh | None):
        self._model, self._mesh, self._tokenizer = model, mesh, run.tokenizer
        settings, objective = run.config.model, run.workload.objective
        self._engine = Engine(
            model.graphdefs, run.model, dtype=settings.compute_dtype, attention=settings.attention, as_written=True
        )
        sampling = SamplingConfig(
            max_tokens=run.config.rollouts.max_completion_length,
            temperature=objective.temperature,
            top_p=1.0,
            seed=run.config.data.seed,
        )
        assert run.rollouts is not None
        rounds, typical = run.total_steps // run.rollouts.plan.window, run.rollouts.plan.typical_prompts
        self._sample = Sampler(self._engine, run.stops, sampling, rounds=rounds, typical=typical)
        # Without new adapters the reference has arrays of its own, as training donates its.
        assert isinstance(objective, RolloutObjective)
        copied = objective.uses_reference and not model.executor.has_reference
        self._reference = jax.tree.map(jnp.copy, model.trainable) if copied else None
        self._teacher = make_teacher(run, model) if objective.needs_teacher else None

    def sample(self, prompts: Sequence[Sequence[int]], indices: Sequence[int], count: int) -> list[list[Sample]]:
        """Return answers by the present weights, with their texts."""
        self._engine.multiply_in_fp8(self._model.executor.fp8_layers)
        groups = self._sample(self._model.trainable, self._model.frozen, prompts, indices, count)
        return [[sample._replace(text=self._decode(sample)) for sample in group] for group in groups]

    def turn(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], turn: int, room: Sequence[int]
    ) -> list[Sample]:
        """Return an answer to each conversation in a later turn, of at most `room` tokens."""
        samples = self._sample.turn(self._model.trainable, self._model.frozen, prompts, indices, turn, room)
        return [sample._replace(text=self._decode(sample)) for sample in samples]

    def log_probs(self, batch: Batch, *, reference: bool = False) -> Float[Array, "B T"]:
        """Return log-probabilities of targets under the present weights, or under those that training began with.

        They are on their way: the next batch's may be asked for meanwhile.
        """
        trainable = self._reference if reference and self._reference is not None else self._model.trainable
        placed, layers = place_batch(batch, self._mesh), reference and self._reference is None
        return self._model.executor.log_probs(trainable, self._model.frozen, placed, reference=layers)

    @property
    def teacher_matrix(self) -> Float[Array, "V E"]:
        """Return the teacher's output projection."""
        assert self._teacher is not None
        return self._teacher.matrix

    def teacher_hidden(self, batch: Batch) -> Float[np.ndarray, "B T E"]:
        """Return the teacher's hidden states after its final norm."""
        assert self._teacher is not None
        return self._teacher.hidden(batch)

    def _decode(self, sample: Sample) -> str:
        return str(self._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True))
