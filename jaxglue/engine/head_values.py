"""Values of a batch's targets for objectives, computed by the output projection."""

from functools import cached_property
from typing import Any, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.data.batch import Batch
from jaxglue.models.vocabulary import extended_matrix, low_rank_columns, output_matrix, replaced_rows
from jaxglue.ops.cross_entropy import (
    linear_cross_entropy,
    linear_divergences,
    linear_entropies,
    linear_log_probs,
    log_sum_squares,
)
from jaxglue.ops.rows import take_rows

_ENTROPY_TOKENS = 2048
"""Tokens of a device's rows whose entropy is a metric."""


class LogitShape(TypedDict):
    """Scaling and capping that turn products of the output projection into logits."""

    softcap: float | None
    temperature: float


class HeadValues:
    """`TargetValues` of a batch from the normed hidden states of its tokens, computed when they are asked for."""

    def __init__(
        self,
        hidden: Float[Array, "M W"],
        output: Any,
        batch: Batch,
        *,
        fp8: bool = False,
        softcap: float | None,
        temperature: float = 1.0,
        width: int | None = None,
        exact: bool = False,
    ):
        self._width, self._exact = width, exact
        self._hidden, self._output, self._batch, self._fp8 = hidden, output, batch, fp8
        self._softcap = softcap
        self._shape = LogitShape(softcap=softcap, temperature=temperature)
        self._targets, self._weights = batch.targets.ravel(), batch.loss_weights.ravel()

    @property
    def cross_entropy(self) -> Float[Array, ""]:
        """Return Σ loss weight · cross-entropy, fused with the head."""
        hidden, targets, weights = self._counted
        return linear_cross_entropy(
            hidden,
            self._output.weight[...],
            targets,
            weights,
            rows=replaced_rows(self._output),
            columns=low_rank_columns(self._output),
            fp8=self._fp8,
            softcap=self._softcap,
        )

    @property
    def _counted(self) -> tuple[Float[Array, "N W"], Int[Array, " N"], Float[Array, " N"]]:
        """Return hidden states, targets and weights of the tokens that count, in order, before some of the others.

        Where the rows have no bound that is below their length, those of all tokens.
        """
        tokens = self._hidden, self._targets, self._weights
        rows, length = self._batch.targets.shape
        room = self._batch.room
        if room is None or room >= length:
            return tokens
        places = jnp.argsort(self._weights == 0, stable=True)[: rows * room]
        hidden, targets, weights = (values.at[places].get(unique_indices=True) for values in tokens)
        # Targets beyond the bound would be left out in silence.
        missing = jnp.count_nonzero(self._weights) > rows * room
        return hidden, targets, jnp.where(missing, jnp.nan, weights)

    @cached_property
    def log_probs(self) -> Float[Array, "B T"]:
        """Return the targets' log-probabilities; 0 where the loss weight is."""
        tokens = self._hidden, output_matrix(self._output), self._targets, self._weights
        options: dict[str, Any] = {"columns": low_rank_columns(self._output), "exact": self._exact}
        return self._rows(linear_log_probs(*tokens, **options, **self._shape))

    @property
    def entropy(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return Σ entropy of some of the counted tokens, and their number: the head multiplies them once more."""
        every = max(1, len(self._weights) // _ENTROPY_TOKENS)
        counted = self._weights[::every]
        return linear_entropies(self._hidden[::every], self._matrix, counted, **self._shape).sum(), counted.sum()

    @property
    def entropies(self) -> Float[Array, "B T"]:
        """Return entropies over the vocabulary, without a gradient; 0 where the loss weight is."""
        return self._rows(linear_entropies(self._hidden, self._matrix, self._weights, **self._shape))

    @cached_property
    def trained_entropies(self) -> Float[Array, "B T"]:
        """Return `entropies` with gradients."""
        return self._rows(linear_entropies(self._hidden, self._matrix, self._weights, trained=True, **self._shape))

    @property
    def alignment(self) -> Float[Array, "B T"]:
        """Return the targets' log-probabilities less log Σ p² over the vocabulary."""
        tokens = self._hidden, self._matrix, self._weights
        return self.log_probs - self._rows(log_sum_squares(*tokens, softcap=self._softcap))

    def divergences(self, beta: float, top_k: int | None) -> Float[Array, "B T"]:
        """Return divergences between a teacher's distributions and the model's; 0 where the loss weight is."""
        rollouts = self._batch.rollouts
        assert rollouts is not None and rollouts.teacher is not None and rollouts.teacher_matrix is not None
        hidden = rollouts.teacher.reshape(len(self._hidden), -1)
        teacher = hidden, rollouts.teacher_matrix, self._weights
        # The teacher's cap is the student's: other families have no common vocabulary.
        return self._rows(
            linear_divergences(
                self._hidden,
                self._matrix,
                *teacher,
                beta=beta,
                top_k=top_k,
                teacher_softcap=self._softcap,
                **self._shape,
            )
        )

    @property
    def scores(self) -> Float[Array, "B T"]:
        """Return the tokens' scores under a reward model; 0 where the loss weight is."""
        return self._rows(_token_scores(self._hidden, self._matrix)) * self._batch.loss_weights

    @property
    def class_scores(self) -> Float[Array, "B T C"]:
        """Return the tokens' scores under a classifier, one for each label."""
        return self._rows(_label_scores(self._hidden, self._matrix))

    @cached_property
    def _read_states(self) -> Float[Array, "B A W"]:
        assert self._batch.reads is not None
        return self._batch.reads.means(self._rows(self._hidden))

    @property
    def reads(self) -> Float[Array, "B A D"]:
        """Return the float32 means of normed hidden states over the tokens of each part."""
        return self._read_states[..., : self._width]

    def read_logits(self, tokens: Int[Array, "B L"]) -> Float[Array, "B A L"]:
        """Return the float32 logits of some tokens at each part's end."""
        rows = take_rows(self._matrix, tokens).astype(jnp.float32)
        logits = jnp.einsum("baw,blw->bal", self._read_states, rows, precision="highest")
        return logits if self._softcap is None else self._softcap * jnp.tanh(logits / self._softcap)

    def read_log_probs(self, tokens: Int[Array, "B"]) -> Float[Array, "B A"]:
        """Return the log-probability of a token at each part's end, among all tokens; 0 of unused slots."""
        assert self._batch.reads is not None
        states, used = self._read_states.astype(self._hidden.dtype), self._batch.reads.used
        targets = jnp.broadcast_to(tokens[:, None], used.shape)
        rows = states.reshape(-1, states.shape[-1]), output_matrix(self._output), targets.ravel(), used.ravel()
        options: dict[str, Any] = {"columns": low_rank_columns(self._output), "exact": self._exact}
        return linear_log_probs(*rows, **options, **self._shape).reshape(used.shape)

    @property
    def read_scores(self) -> Float[Array, "B A"]:
        """Return each part's score under a reward model."""
        return jnp.einsum("bad,d->ba", self._read_states, self._matrix[0].astype(jnp.float32), precision="highest")

    @cached_property
    def _matrix(self) -> Any:
        return extended_matrix(self._output)

    def _rows(self, values: Float[Array, "M ..."]) -> Float[Array, "B T ..."]:
        return values.reshape(*self._batch.targets.shape, *values.shape[1:])


def _token_scores(hidden: Float[Array, "M D"], weight: Float[Array, "1 D"]) -> Float[Array, " M"]:
    """Return a reward model's float32 scores of hidden states."""
    return jnp.sum(hidden.astype(jnp.float32) * weight[0].astype(jnp.float32), axis=-1)


def _label_scores(hidden: Float[Array, "M D"], weight: Float[Array, "C D"]) -> Float[Array, "M C"]:
    """Return a classifier's float32 scores of hidden states."""
    return jnp.matmul(hidden.astype(jnp.float32), weight.T.astype(jnp.float32), precision="highest")
