"""What the answers of a step take on a GPU, predicted, and whether sampling them with training's bits costs little."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

import jax
import numpy as np

from jaxglue.engine.residency import DEVICE
from jaxglue.generation.exact import obstacle
from jaxglue.generation.pages import CachePlan, plan_cache, state_bytes, token_bytes
from jaxglue.models.config import DecoderConfig
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.backend import one_device_each
from jaxglue.planner.device_memory import pool_gib
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.gpus import RECORDED, Gpu, lookup_gpu
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.sampling import AnswerTimes, DecodeCost
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.rl.sampler import plan_beside
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.checks import why_prompts_are_copied
from jaxglue.training.config import TrainConfig
from jaxglue.training.workload import make_workload

MOST_EXACT = 0.05
"""Share of a step that exact sampling may take for `--exact-sampling auto`."""
PROMPT = 256
"""Tokens of a prompt whose length is not known."""
_TAKES = "--exact-sampling on takes it"


def answer_times(workload: Workload, gpu: Gpu, prompt: int, answers: int, each: int, longest: int) -> AnswerTimes:
    """Return what answers of all lengths up to the longest take on a GPU, `each` of them to a prompt."""
    tokens, states = (of(workload.config, workload.dtype) for of in (token_bytes, state_bytes))
    lengths = np.random.default_rng(0).integers(1, longest + 1, answers)
    return AnswerTimes(gpu=gpu, cost=DecodeCost.of(workload, tokens, states), prompt=prompt, lengths=lengths, each=each)


def may_move(gpu: Gpu, mesh: MeshShape) -> bool:
    """Return whether arrays on the host free a GPU's memory, and each GPU samples by all weights."""
    return not gpu.unified and mesh.devices == mesh.data


@dataclass(frozen=True, kw_only=True)
class PredictedAnswers(AnswerTimes):
    """The answers of a step, of all lengths up to the longest, on a GPU beside the model's weights."""

    workload: Workload
    cache: CachePlan
    free: float
    """Bytes of memory beside the weights."""
    steps: int
    """Optimizer steps in which the answers are trained on, each time all of them."""
    needs_old: bool
    """Sampling that is near needs a pass for log-probabilities under the weights that sampled."""

    @classmethod
    def of(
        cls, config: TrainConfig, workload: Workload, gpu: Gpu, weights: tuple[str, ...], prompt: int = PROMPT
    ) -> Self:
        """Predict a run's answers; raise ValueError where not one fits.

        Args:
            config: of the run.
            workload: on the GPU.
            gpu: its rates, and the memory to plan with.
            weights: places of the layers' weights.
            prompt: tokens of a prompt.
        """
        rollouts, objective = config.rollouts, workload.objective
        assert isinstance(objective, RolloutObjective)
        answers, longest = rollouts.generation_batch_size, rollouts.max_completion_length
        each = rollouts.answers_to_each(objective.generations, compared=objective.compares)
        resident, times = resident_bytes(workload), answer_times(workload, gpu, prompt, answers, each, longest)
        free, moments = gpu.memory - resident.total(weights), 0.0 if rollouts.staleness else resident.moments
        cache, moves = plan_beside(
            lambda free: plan_cache(
                [(prompt, prompt + longest)] * answers,
                workload.config,
                workload.dtype,
                batch_size=rollouts.max_num_seqs,
                free=free,
                siblings=each,
                limit="--max-completion-length",
            ),
            free,
            moments if may_move(gpu, workload.mesh) else 0.0,
            partial(times.pays_moving, moments, 2 * len(jax.tree.leaves(abstract_parts(workload)[1]))),
        )
        return cls(
            **{field.name: getattr(times, field.name) for field in fields(times)},
            workload=workload,
            cache=cache,
            free=free + moves * moments,
            steps=rollouts.num_iterations,
            needs_old=objective.needs_old(rollouts.steps_per_generation * rollouts.num_iterations),
        )

    @property
    def seconds(self) -> float:
        """Return the seconds of sampling that is near."""
        return self.seconds_with(self.cache.slots)

    @property
    def exact_price(self) -> "ExactPrice | None":
        """Return what exact sampling costs; None where that was not measured."""
        added = self.cost.exact_seconds(self.gpu, self.lengths, self.cache.slots)
        if added is None:
            return None
        prompts = len(self.lengths) / self.each
        tokens = prompts * self.prompt + self.lengths.sum()
        full = self.workload.lora is None
        visible = mean_visible_keys(self.prompt + self.lengths)
        flops = training_flops_per_token(self.workload.config, visible_keys=visible, weight_gradients=full)
        training = float(self.steps * tokens * flops / self.gpu.matmul)
        old = self.needs_old * training / self.steps / (3 if full else 2)
        parts = (key_tile(self.workload.config.layer_kinds[0].head_dim) - 1) / 2 * (prompts + len(self.lengths))
        return ExactPrice(
            sampling=self.seconds, training=training, old=old, added=added, padding=float(training * parts / tokens)
        )


@dataclass(frozen=True, kw_only=True)
class ExactPrice:
    """Predicted seconds of the answers of a step, and what exact sampling adds to them."""

    sampling: float
    """Of sampling that is near."""
    training: float
    """Of forward and backward passes, each layer computed once."""
    old: float
    """Of the pass that exact sampling makes superfluous."""
    added: float
    """By decode steps of exact sampling."""
    padding: float
    """By training on parts of rows that are rounded up to whole tiles."""

    @property
    def share(self) -> float:
        """Return what exact sampling adds, of the step without it."""
        return (self.added + self.padding - self.old) / (self.sampling + self.training + self.old)

    def __str__(self) -> str:
        saved = f", less {self.old:.2g} s of a pass for old log-probabilities" if self.old else ""
        return (
            f"{self.share:+.0%} of a step, predicted: {self.added:.2g} s to ~{self.sampling:.2g} s of sampling and "
            f"{self.padding:.2g} s to ~{self.training:.2g} s of training{saved}"
        )


def check_exact(config: TrainConfig, model: DecoderConfig, mesh: MeshShape) -> None:
    """Raise ValueError for a model, head or mesh whose sampling cannot have training's bits."""
    if reason := _why_not_exact(config, model, mesh):
        raise ValueError(f"--exact-sampling on cannot be kept: {reason}: leave it out")


def _why_not_exact(config: TrainConfig, model: DecoderConfig, mesh: MeshShape) -> str | None:
    if mesh.devices > mesh.data:
        return f"weights or rows are divided among GPUs by --mesh {mesh}, and each must have all (--mesh data=…)"
    if copied := why_prompts_are_copied(config, model):
        return copied
    if config.model.method == "lora" and "lm_head" in config.lora.vocabulary_targets:
        return "the output projection has an adapter"
    rank = config.lora.rank if config.model.method == "lora" else 0
    with one_device_each():  # each samples by itself
        return obstacle(model, config.model.compute_dtype, tokens=config.data.row_tokens, rank=rank)


def weigh_exact(config: TrainConfig, answers: PredictedAnswers) -> tuple[bool, str]:
    """Return whether `--exact-sampling auto` is on, and the reason in words.

    It is where a step takes at most `MOST_EXACT` longer, by what was measured on the GPU.
    """
    workload, price = answers.workload, answers.exact_price
    if reason := _excluded(config) or _why_not_exact(config, workload.config, workload.mesh):
        return False, f"off, it cannot be kept: {reason}"
    if price is None or workload.mesh.devices > 1:
        where = "several GPUs" if workload.mesh.devices > 1 else answers.gpu.name
        what = f"{min(answers.cache.slots, len(answers.lengths))} answers at a time of such a model on {where}"
        return False, f"off, its price for {what} is not measured; {_TAKES}"
    if price.share > MOST_EXACT:
        return False, f"off, {price}, above {MOST_EXACT:.0%}; {_TAKES}"
    return True, f"on, {price}"


def _excluded(config: TrainConfig) -> str:
    """Return why settings exclude exact sampling; empty where they do not."""
    try:
        _with_exact(config, on=True)
    except ValueError as error:
        return str(error)
    return ""


def _with_exact[C: TrainConfig](config: C, *, on: bool) -> C:
    return replace(config, rollouts=replace(config.rollouts, exact_sampling="on" if on else "off"))


def choose_exact(config: TrainConfig, model: DecoderConfig) -> tuple[TrainConfig, str]:
    """Return a run's configuration with exact sampling on or off in place of `auto`, and the reason in words."""
    device = jax.local_devices()[0]
    if jax.device_count() > 1 or lookup_gpu(device.device_kind) is None:
        where = "several devices" if jax.device_count() > 1 else device.device_kind
        return _with_exact(config, on=False), f"off, its price on {where} is not measured; {_TAKES}"
    gpu = device_gpu(device, RECORDED).limited(pool_gib(config.model.memory_limit))
    weights = (DEVICE,) * model.num_hidden_layers
    try:
        answers = PredictedAnswers.of(config, make_workload(config, model, (), MeshShape()), gpu, weights)
    except ValueError as error:
        return _with_exact(config, on=False), f"off, its price is not known: {error}"
    on, reason = weigh_exact(config, answers)
    return _with_exact(config, on=on), reason
