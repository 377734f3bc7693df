"""Losses of a session's steps: functions of the caller's, and the divergence from a teacher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.data.iterator import Step
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.models.parameters import split_model
from jaxglue.objectives.objective import Objective, TargetValues
from jaxglue.training.rollout_policy import Teacher
from jaxglue.training.run import Setup

if TYPE_CHECKING:
    from jaxglue.models.decoder import CausalLM
    from jaxglue.objectives.config import ObjectiveConfig

Loss = Callable[[Float[Array, "B T"], Mapping[str, Float[Array, "B T"]]], Float[Array, "B T"]]
"""`loss(log_probs, columns)` of tokens, from the log-probabilities of the targets and each token's values of its row's
columns; tokens that are not trained on do not count."""


@runtime_checkable
class Learner(Protocol):
    """A model in training that may teach another, as a `Session`."""

    def as_teacher(self) -> Teacher:
        """Return the model as it is now."""


@dataclass(frozen=True, kw_only=True)
class FunctionLoss(Objective):
    """A function of the caller's as objective."""

    config: "ObjectiveConfig"
    function: Loss

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, ""]:
        """Return Σ loss over the tokens that are trained on."""
        losses = token_losses(self.function, values.log_probs, batch.columns)
        return jnp.sum(jnp.where(batch.loss_weights > 0, losses * batch.loss_weights, 0.0))


@dataclass(frozen=True, kw_only=True)
class _Divergence(Objective):
    """A divergence from a teacher's distributions as objective, beside the cross-entropy."""

    config: "ObjectiveConfig"
    divergence: float
    scale: float
    alpha: float

    @property
    def temperature(self) -> float:
        """Return the divisor of both models' logits."""
        return self.scale

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, ""]:
        """Return Σ loss over the tokens that are trained on."""
        distilled = jnp.sum(values.divergences(self.divergence, None)) * (self.alpha * self.scale**2)
        return distilled if self.alpha == 1 else distilled + (1 - self.alpha) * values.cross_entropy


class DistillationLoss:
    """Divergence between a teacher's distributions and a session's, over the whole vocabulary, for `forward_backward`.

    The loss is α · T² · divergence of the distributions at temperature T + (1 − α) · cross-entropy (arXiv 1503.02531).
    Logits exist for a chunk of tokens at a time.

    Args:
        teacher: a loaded model, or another session, as it is at each call; with the student's vocabulary.
        temperature: T.
        beta: 0 for the forward divergence KL(teacher‖student), 1 for the reverse, between for Jensen and Shannon's.
        alpha: share of the divergence.
    """

    def __init__(
        self, teacher: "CausalLM | Learner", *, temperature: float = 1.0, beta: float = 0.0, alpha: float = 1.0
    ):
        if temperature <= 0 or not (0 <= beta <= 1 and 0 <= alpha <= 1):
            raise ValueError(
                f"expected temperature > 0, beta and alpha from 0 to 1, got {temperature:g}, {beta:g} and {alpha:g}"
            )
        self._teacher: Learner | Teacher = teacher if isinstance(teacher, Learner) else _load(teacher)
        self._beta, self._temperature, self._alpha = float(beta), float(temperature), float(alpha)

    def prepared(self, step: Step, setup: Setup) -> tuple[Step, Objective]:
        """Return a step with the teacher's hidden states, and the objective that reads them.

        Raises:
            ValueError: another vocabulary, or several devices.
        """
        teacher = self._teacher.as_teacher() if isinstance(self._teacher, Learner) else self._teacher
        if setup.mesh.devices > 1:
            raise ValueError("a teacher is for one GPU yet: use mesh data=1")
        if len(teacher.matrix) != setup.model.vocab_size:
            sizes = f"{len(teacher.matrix):,} tokens, the student {setup.model.vocab_size:,}"
            raise ValueError(f"the teacher has {sizes}: distributions over one vocabulary are compared")
        batches = tuple(_with_teacher(batch, teacher) for batch in step.micro_batches)
        return replace(step, micro_batches=batches), _Divergence(
            config=setup.objective.config, divergence=self._beta, scale=self._temperature, alpha=self._alpha
        )


def _with_teacher(batch: Batch, teacher: Teacher) -> Batch:
    rollouts = Rollouts(
        owners=jnp.ones_like(batch.tokens),
        advantages=jnp.zeros((len(batch.tokens), 1)),
        teacher=jnp.asarray(teacher.hidden(batch)),
        teacher_matrix=teacher.matrix,
    )
    return replace(batch, rollouts=rollouts)


def _load(model: "CausalLM") -> Teacher:
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    dtype = model.norm.weight.get_value().dtype
    return Teacher(Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=dtype), trainable, frozen)


def token_losses(loss: Loss, log_probs: Any, columns: Mapping[str, Any]) -> Any:
    """Return a function's losses of all tokens; raise ValueError for another shape, which would be broadcast."""
    found = loss(log_probs, columns)
    if jnp.shape(found) != jnp.shape(log_probs):
        wanted, given = list(jnp.shape(log_probs)), list(jnp.shape(found))
        raise ValueError(
            f"loss: expected a loss for each token, an array {wanted} as log_probs, got one of shape {given}: the "
            "session sums and divides"
        )
    return found
