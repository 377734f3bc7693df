"""The seam of losses of answers that the model writes: what they read, and the named sums that they return."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.objectives.advantages import Rewards, Values, group_relative
from jaxglue.objectives.config import RolloutSettings
from jaxglue.objectives.objective import Objective, ObjectiveConfig, TargetValues
from jaxglue.settings.config import Excludes, Requires

_SMALLEST_CLIP = 1e-3
"""Bound of a ratio's distance from 1 which is no optimizer's ε."""
_STREAMED = "each token that is sampled reads them all"
Tokens = Float[Array, "B T"]
"""A value for each token of a micro-batch's rows."""


class Metric(NamedTuple):
    """A metric as a sum over an optimizer step, and its divisor.

    Both are summed over their elements, the micro-batches and the devices before they are divided.
    """

    sum: Float[Array, "*values"]
    divisor: Float[Array, "*values"] | None = None
    """Its divisor; None for the normalizer of the step, which divides the loss, too."""


class StepCounts(NamedTuple):
    """Sizes of an optimizer step, over all devices."""

    answers: int
    tokens: float
    """Counted tokens of the answers."""
    micro_batches: int
    longest: int
    """The most tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a loss of answers from a micro-batch, this device's B packed rows of T tokens; computed when asked for.

    Values of tokens are float32 [B, T], and those of tokens that do not count may be anything.
    """

    values: TargetValues
    """Values of the targets under the model in training: entropies, divergences from a teacher."""
    rollouts: Rollouts
    counted: Tokens
    """1 for tokens of answers, 0 for prompts, padding and tokens left out of the loss."""

    @property
    def log_probs(self) -> Tokens:
        """Return log-probabilities under the model in training, at the objective's temperature, with gradients."""
        return self.values.log_probs

    @cached_property
    def now(self) -> Tokens:
        """Return `log_probs` without a gradient."""
        return stop_gradient(self.log_probs)

    @property
    def old(self) -> Tokens:
        """Return those under the weights that wrote the answers: where no pass computed them, the present ones."""
        return self.now if self.rollouts.old is None else self.rollouts.old

    @cached_property
    def sampler(self) -> Tokens:
        """Return those that sampling computed; NaN where it did not."""
        missing = self.rollouts.sampler is None
        return jnp.full_like(self.counted, jnp.nan) if missing else self.rollouts.sampler  # type: ignore[return-value]

    @property
    def reference(self) -> Tokens:
        """Return those under the reference, for objectives that use one."""
        assert self.rollouts.reference is not None
        return self.rollouts.reference

    @cached_property
    def log_ratio(self) -> Tokens:
        """Return `log_probs` less `old`; 0 for tokens that do not count."""
        return self.of_counted(self.log_probs - self.old)

    @cached_property
    def advantages(self) -> Tokens:
        """Return each token's advantage, its own or that of its answer."""
        own = self.rollouts.credits
        return self.rollouts.spread(self.rollouts.advantages) if own is None else own

    @cached_property
    def lengths(self) -> Tokens:
        """Return the counted tokens of each token's answer, at least 1."""
        return jnp.maximum(self.over_answers(self.counted), 1)

    def over_answers(self, values: Tokens) -> Tokens:
        """Return for each token the sum over its answer, on all devices that share the row."""
        return self.rollouts.spread(self.rollouts.sums(values))

    def of_counted(self, values: Tokens) -> Tokens:
        """Return the values of counted tokens, and 0 for others, whose values may be anything."""
        return jnp.where(self.counted > 0, values, 0)

    def mean(self, values: Tokens) -> Metric:
        """Return the mean over the step's tokens as a metric."""
        return Metric(self.counted * values, self.counted)

    def mean_of_answers(self, values: Tokens) -> Metric:
        """Return the mean over the tokens of each answer, and over the answers with a counted token, as a metric."""
        shares = self.counted / self.lengths
        return Metric(shares * values, shares)


HELD_OUT_EXCLUDES = Excludes(
    "eval_data",
    "held-out prompts need a --reward",
    unless=lambda settings: settings["reward"] or settings["environment"],
)
"""Held-out prompts, which objectives without rewards of their own cannot judge."""
ANSWERS_EXCLUDE = (
    Excludes("fp8_head", "it is for the cross-entropy of --objective sft"),
    Excludes("keep", "there is no eval loss"),
    Excludes("early_stopping", "there is no eval loss"),
    Excludes("eval_fraction", "hold prompts out in a file, with --eval-data"),
    Excludes("gradient_accumulation_steps", "a step has as many micro-batches as its answers fill"),
    Excludes("router_balance_loss", "its losses are no means over tokens"),
    Excludes("router_z_loss", "its losses are no means over tokens"),
    Excludes("documents_per_step", "--generation-batch-size has the answers of a step"),
    Excludes("streaming", "prompts are read before training"),
    Excludes("weights", _STREAMED, lambda place: place not in ("device", "auto")),
    Excludes("embeddings", _STREAMED, lambda place: place != "device"),
    Excludes(
        "epsilon",
        "it is the optimizer's, which would hardly move",
        lambda epsilon: epsilon >= _SMALLEST_CLIP,
        remedy="ratios of probabilities are clipped by --epsilon-low and --epsilon-high",
    ),
)
"""Settings that do not go with answers written in training."""


class RolloutObjective(Objective):
    """A loss of answers that the model writes in training.

    A subclass has `loss_and_metrics`, the `normalizer` of its sum, and where answers are compared in another way than
    in their group, `advantages`.
    """

    Settings: ClassVar[type[ObjectiveConfig]] = RolloutSettings
    needs_rollouts = True
    excludes: ClassVar[tuple[Excludes, ...]] = (
        *ANSWERS_EXCLUDE,
        Excludes("teacher", "it has none"),
        Excludes("teacher_system", "it has no teacher"),
        Excludes("teacher_quantize", "it has no teacher"),
        Excludes("teacher_server", "it has no teacher"),
        Excludes("lmbda", "rewards judge answers of the model alone"),
    )
    requires: ClassVar[tuple[Requires, ...]] = (
        Requires(("reward", "environment"), "it judges answers, such as rewards.py:exact_match, or exact"),
    )
    generations: ClassVar[int]
    """Answers to each prompt where no number is given."""
    compares: ClassVar[bool] = False
    """Rewards of answers to one prompt are compared: there must be two at least."""
    reference_is_served: ClassVar[bool] = False
    """Its reference log-probabilities are those of servers' models."""
    divergence_in_reward: ClassVar[bool] = False
    """The divergence from the reference lowers the reward, and is no part of the loss."""

    def loss_and_metrics(self, inputs: LossInputs) -> tuple[Float[Array, "*terms"], dict[str, Metric]]:
        """Return terms whose sum is the loss, before the step's normalizer divides it, and the metrics by name.

        The names are the same for all batches.
        """
        raise NotImplementedError

    def normalizer(self, counts: StepCounts) -> float:
        """Return the number by which a step divides the sum of its losses."""
        raise NotImplementedError

    def reward(self, rewards: Rewards) -> Values:
        """Return the rewards by which answers to a prompt are compared; NaN for answers without any."""
        return rewards.total - self.beta * rewards.divergence if self.divergence_in_reward else rewards.total

    def advantages(self, rewards: Rewards) -> Values:
        """Return the answers' advantages; NaN, as for answers without a reward, is taken as 0."""
        return group_relative(rewards)

    def needs_old(self, steps: int) -> bool:
        """Tell whether something reads log-probabilities under the weights that wrote the answers.

        Args:
            steps: optimizer steps on the same answers; in the first of them these weights are the present ones.
        """
        return steps > 1 or (self.divergence_in_reward and self.uses_reference)

    @property
    def credits_tokens(self) -> bool:
        """Tell whether tokens of an answer may have advantages of their own."""
        return False

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits."""
        return self.config.temperature

    @property
    def uses_reference(self) -> bool:
        """Tell whether answers need log-probabilities of the model as training begins."""
        return False

    @property
    def masks_truncated(self) -> bool:
        """Tell whether answers that reached their longest length leave the loss."""
        return False

    @property
    def needs_mean_weight(self) -> bool:
        """Tell whether a part of the loss is a mean over all tokens of a step."""
        return False

    @cached_property
    def _metrics(self) -> jax.tree_util.PyTreeDef:
        """The structure of the metrics, from a trace of the loss on one token."""

        def trace(token: Tokens, owner: Array) -> dict[str, Metric]:
            reference = token if self.uses_reference or self.reference_is_served else None
            known = {"old": token, "sampler": token, "reference": reference, "mean_weight": token}
            rollouts = Rollouts(owners=owner, advantages=token, **known)
            return self.loss_and_metrics(LossInputs(values=_OneToken(token), rollouts=rollouts, counted=token))[1]

        shapes = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32))
        return jax.tree.structure(jax.eval_shape(trace, *shapes))

    @property
    def sums(self) -> tuple[str, ...]:
        """Return names of the sums behind the metrics."""
        paths, _ = jax.tree.flatten_with_path(jax.tree.unflatten(self._metrics, range(self._metrics.num_leaves)))
        return tuple(jax.tree_util.keystr(path) for path, _ in paths)

    def __call__(self, values: TargetValues, batch: Batch) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ of each of `sums`] over the answers in this device's rows."""
        assert batch.rollouts is not None
        inputs = LossInputs(values=values, rollouts=batch.rollouts, counted=batch.loss_weights)
        loss, metrics = self.loss_and_metrics(inputs)
        return jnp.stack([jnp.sum(loss), *(stop_gradient(jnp.sum(part)) for part in jax.tree.leaves(metrics))])

    def metrics(self, values: Float[Array, " sums"]) -> dict[str, Array]:
        """Return the metrics, each sum over its divisor."""
        named: dict[str, Metric] = jax.tree.unflatten(self._metrics, [*values[1:]])
        return {
            name: total if divisor is None else total / jnp.maximum(divisor, 1e-30)
            for name, (total, divisor) in named.items()
        }


class _OneToken:
    """Stands for `TargetValues` while a loss is traced for the names of its metrics."""

    def __init__(self, token: Tokens):
        self.log_probs = self.alignment = self.entropies = self.trained_entropies = self.scores = token
        self.cross_entropy, self.entropy = token.sum(), (token.sum(), token.sum())
        self.class_scores = token[..., None]

    def divergences(self, beta: float, top_k: int | None) -> Tokens:
        return self.log_probs
