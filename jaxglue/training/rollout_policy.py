"""The model in training as reinforcement learning sees it: it writes answers, and tells their log-probabilities."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.data.images import ImageReader
from jaxglue.data.iterator import See, seen_batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.assistant import tower_of
from jaxglue.generation.config import Drafts, SamplingConfig
from jaxglue.generation.draft_rule import DraftCounts
from jaxglue.generation.drafts import load_head
from jaxglue.generation.engine import Engine
from jaxglue.generation.turns import TurnSource
from jaxglue.hf.hub import model_path
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import Params, split_model
from jaxglue.models.vocabulary import extended_matrix
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.planner.workload import tree_bytes
from jaxglue.rl.prompts import PromptImage, read_images
from jaxglue.rl.sampler import Sample, Sampler
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.features import ImageFeatures
from jaxglue.training.idle_moments import idle_moments
from jaxglue.training.run import Run, Setup, TeacherPlan
from jaxglue.training.step import StepParts, TrainState
from jaxglue.vision.rows import Image, PromptImages, RowImages


class Teacher:
    """A model whose distributions are distilled, on one device.

    Args:
        executor: of the model, which may be the one in training.
        trainable, frozen: its parameters.
        reference: its layers are those of the executor's reference model.
        see: makes arrays of a batch's images.
    """

    def __init__(
        self,
        executor: Executor,
        trainable: Params,
        frozen: Params,
        *,
        reference: bool = False,
        see: See = RowImages.with_patches,
    ):
        self._executor, self._trees, head = executor, (trainable, frozen), executor.embed_head
        self._see = see
        self._reference = reference
        self._norm = jax.jit(
            lambda trainable, frozen, x: head.normed_output(trainable, frozen, x)[0].reshape(*x.shape[:-1], -1)
        )
        self.matrix = extended_matrix(head.output(trainable, frozen))
        """Output projection."""

    def hidden(self, batch: Batch) -> Float[np.ndarray, "B T E"]:
        """Return hidden states after the final norm."""
        trainable, frozen = self._trees
        batch = jax.device_put(seen_batch(batch, self._see))
        x = self._executor.last_output(trainable, frozen, batch, reference=self._reference)
        head = self._executor.embed_head
        return np.asarray(self._norm(head.parts(trainable), head.parts(frozen), x))


def make_teacher(teacher: TeacherPlan, parts: StepParts, state: TrainState) -> Teacher:
    """Return the teacher: the model in training without its adapter, or another folder's; on one device."""
    assert parts.run.mesh.devices == 1
    if teacher.folder is None:
        without = jax.tree.map(jnp.zeros_like, state.trainable)  # adapters of embedding, tower and head
        see = parts.features or RowImages.with_patches
        return Teacher(parts.executor, without, state.frozen, reference=True, see=see)
    dtype, folder, readers = parts.run.dtype, model_path(teacher.folder), _readers(parts.run)
    vision = tower_of(folder) if readers else None
    loaded = load_model(folder, dtype=dtype, quantize=teacher.storage, vision=vision)
    graphdefs, trainable, frozen = split_model(loaded, nnx.LoRAParam)
    executor = Executor(graphdefs, loaded.config, policy=PRESETS["full"], dtype=dtype)
    if not readers or parts.features is None:  # else patches of images that the teacher knows were not read
        return Teacher(executor, trainable, frozen)
    more = isinstance(parts.run, Run) and parts.run.shows_images
    see = ImageFeatures(executor, trainable, frozen, None, readers, more=more)
    return Teacher(executor, trainable, frozen, see=see)


def _readers(run: Setup) -> list[ImageReader]:
    return run.data.readers if isinstance(run, Run) else []


class TrainedPolicy:
    """A run's model; sampling and training share the weights.

    Args:
        run: the run.
        parts: of its steps.
        state: before the first step, or restored; the reference has the weights with which it begins.
    """

    def __init__(self, run: Run, parts: StepParts, state: TrainState):
        assert run.rollouts is not None and isinstance(run.objective, RolloutObjective)
        plan = run.rollouts.plan
        self.state = state
        """The present state; who advances it sets it, and takes it again after answers, as moments may have moved."""
        self._parts, self._tokenizer = parts, run.tokenizer
        self._processor = next((reader.rules.processor for reader in run.data.readers), None)
        trees, self._head = (state.trainable, state.frozen), None
        if run.mesh.devices == 1:  # otherwise a number of drafts is refused, and auto means none
            drafts: Drafts = "off" if run.workload.exact else plan.config.drafts
            options: dict[str, Any] = {"dtype": run.dtype, "own": plan.config.draft_model}
            self._head = load_head(drafts, run.base.folder, run.model, parts.graphdefs, trees, **options)
        options = {"attention": run.workload.attention, "as_written": True, "exact": run.workload.exact}
        options["drafting"] = self._head and self._head.drafting
        self._engine = Engine(parts.graphdefs, run.model, dtype=run.dtype, **options)
        self._drafts = DraftCounts()
        """Drafts when their acceptance was last asked for."""
        sampling = SamplingConfig(
            max_tokens=plan.config.max_completion_length,
            temperature=run.objective.temperature,
            top_p=plan.config.top_p,
            top_k=plan.config.top_k,
            min_p=plan.config.min_p,
            seed=plan.seed,
        )
        self.multiplied: list[bool] | None = None
        """Layers of a snapshot whose matrices for FP8 products are multiplied so; None for those of training."""
        self._other: tuple[jax.Device, Params] | None = None
        """Device that samples in place of the one that trains, with the frozen weights."""
        reserved = self._share_devices(plan.config.staleness) if plan.config.staleness else 0
        rounds = run.schedule.total_steps // plan.window
        self.idle = idle_moments(run, self)
        """Moments that leave the device while answers are sampled, where that pays."""
        self._sample = Sampler(
            self._engine,
            run.stops,
            sampling,
            rounds=rounds,
            typical=plan.typical_prompts,
            slots=plan.config.max_num_seqs,
            begun=plan.config.begun_episodes,
            reserved=reserved,
            idle=self.idle,
        )
        # Without new adapters the reference has arrays of its own, as training donates its.
        copied = run.objective.uses_reference and not parts.executor.has_reference
        self._reference = jax.tree.map(jnp.copy, state.trainable) if copied else None
        self._teacher = None if run.teacher is None else make_teacher(run.teacher, parts, state)

    def _share_devices(self, staleness: int) -> int:
        """Let a second device sample, if there is one, else by turns with training; return the bytes that others need.

        They are those of further snapshots, and on one device what the plan of training takes beside what is there.
        """
        snapshots = staleness * tree_bytes(self.state.trainable)
        if len(devices := jax.local_devices()) > 1:
            self._other = devices[1], jax.device_put(self.state.frozen, devices[1])
            return snapshots
        self._parts.executor.takes_turns = True
        use = (devices[0].memory_stats() or {}).get("bytes_in_use", 0)
        return snapshots + max(self._parts.run.remat.device_bytes - use, 0)

    def snapshot(self) -> "TrainedPolicy":
        """Return the present weights as a policy of their own, which writes answers while training changes these."""
        policy, frozen, copied = copy(self), self.state.frozen, jnp.copy
        if self._other is not None:
            device, frozen = self._other
            copied = partial(jax.device_put, device=device)
        policy.state = self.state._replace(trainable=jax.tree.map(copied, self.state.trainable), frozen=frozen)
        policy.multiplied = self._parts.executor.fp8_layers
        return policy

    @property
    def _fp8_layers(self) -> list[bool]:
        return self._parts.executor.fp8_layers if self.multiplied is None else self.multiplied

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        count: int,
        images: Sequence[Sequence[PromptImage]],
    ) -> list[list[Sample]]:
        """Return answers by the present weights, with their texts, to prompts with these images."""
        self._engine.multiply_in_fp8(self._fp8_layers)
        read: Sequence[tuple[Sequence[int], PromptImages | None]] = [(prompt, None) for prompt in prompts]
        if any(images):
            assert self._processor is not None
            features = self.features([each.image for own in images for each in own])
            read = [read_images(*pair, features, self._processor) for pair in zip(prompts, images, strict=True)]
        tokens, seen = [tokens for tokens, _ in read], [seen for _, seen in read]
        groups = self._sample(*self._trees, tokens, seen, indices, count)
        return [[sample._replace(text=self._decode(sample)) for sample in group] for group in groups]

    def features(self, images: Sequence[Image]) -> dict[tuple, Float[np.ndarray, "I D"]]:
        """Return the features of images by the present tower, by their `Image.cache_key`."""
        if self._parts.features is not None:
            return self._parts.features.of(images)
        processor, trees = self._processor, (self.state.trainable, self.state.frozen)
        assert processor is not None
        different = {image.cache_key: image.decoded(processor) for image in images}
        return {key: self._engine.see(*trees, [image], processor) for key, image in different.items()}

    def converse(self, sources: Callable[[int], Sequence[TurnSource]], count: int) -> None:
        """Write the turns of conversations, `count` to a prompt, which `sources` divides among devices."""
        self._engine.multiply_in_fp8(self._fp8_layers)
        self._sample.converse(*self._trees, sources, count)

    def draft_acceptance(self) -> float | None:
        """Return the share of drafts that were accepted since the last call; None where there were none."""
        before, counts = self._drafts, self._engine.drafts
        self._drafts = replace(counts)
        made = counts.made - before.made
        return (counts.accepted - before.accepted) / made if made else None

    @property
    def _trees(self) -> tuple[Params, Params]:
        """Return the present weights, with the draft head."""
        trees = self.state.trainable, self.state.frozen
        return trees if self._head is None else self._head.beside(trees)

    def log_probs(self, batch: Batch, *, reference: bool = False) -> Float[Array, "B T"]:
        """Return log-probabilities of targets under the present weights, or under those that training began with.

        They are on their way: the next batch's may be asked for meanwhile.
        """
        trainable = self._reference if reference and self._reference is not None else self.state.trainable
        batch = seen_batch(batch, self._parts.features or RowImages.with_patches)
        placed, layers = place_batch(batch, self._parts.mesh), reference and self._reference is None
        return self._parts.executor.log_probs(trainable, self.state.frozen, placed, reference=layers)

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
