"""Log-likelihoods of continuations, many of them packed into one row."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.data.packing import PackPlan, plan_packing
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.ops.segments import pack_segments, segment_bucket

Tokens = list[int]
_SHORTEST_ROW = 2048


class Scorer:
    """Scores continuations of contexts with a model split by `split_model`.

    Args:
        graphdefs: modules of the model.
        config: its shape.
        trainable, frozen: its parameters.
        dtype: of activations and matmuls.
    """

    def __init__(
        self, graphdefs: ModelGraphDefs, config: DecoderConfig, trainable: Params, frozen: Params, *, dtype: Any
    ):
        self._executor = Executor(graphdefs, config, policy=PRESETS["full"], dtype=dtype)
        self._trees = trainable, frozen
        self.limit = config.max_position_embeddings
        """Most tokens that the model reads at once."""

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood after its context, and whether greedy decoding yields it.

        Contexts are cut from the left where they and their continuation exceed the model's limit.

        Raises:
            ValueError: an empty context, a continuation beyond the limit, or a score that is not finite.
        """
        whole = [_joined(context, continuation, self.limit) for context, continuation in pairs]
        lengths = np.array([len(tokens) - 1 for tokens in whole], np.int64)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        if not len(lengths):
            return found
        plan, row, slots = plan_rows(lengths)
        for index in range(plan.rows):
            losses, hits = self._score_row(plan, index, whole, row, slots)
            ends = np.cumsum(lengths[plan.row(index)])
            for document, end in zip(plan.row(index), ends, strict=True):
                own = slice(end - len(pairs[document][1]), end)
                found[document] = -float(np.sum(losses[own], dtype=np.float64)), bool(hits[own].all())
        return found

    def _score_row(self, plan: PackPlan, index: int, whole: list[Tokens], row: int, slots: int):
        """Return the losses and hits of a row's tokens."""
        members = [whole[document] for document in plan.row(index)]
        segments = pack_segments([[len(tokens) - 1 for tokens in members]], seq_len=row, max_segments=slots)
        arrays = np.zeros((2, 1, row), np.int32)
        filled = sum(len(tokens) - 1 for tokens in members)
        arrays[0, 0, :filled] = np.concatenate([tokens[:-1] for tokens in members])
        arrays[1, 0, :filled] = np.concatenate([tokens[1:] for tokens in members])
        fields: dict[str, Any] = {"tokens": arrays[0], "targets": arrays[1]}
        batch = Batch(**fields, loss_weights=jnp.ones((1, row)), segments=segments)
        losses, hits = jax.device_get(self._executor.token_scores(*self._trees, jax.device_put(batch)))
        require_finite(losses[0, :filled])
        return losses[0], hits[0]


def require_finite(scores: np.ndarray) -> None:
    """Raise ValueError for scores that are infinite or NaN."""
    if not np.isfinite(scores).all():
        raise ValueError("the model's scores are not finite (NaN or infinity): check its weights and the adapter")


def plan_rows(lengths: np.ndarray) -> tuple[PackPlan, int, int]:
    """Pack documents into rows; return the plan, a row's tokens and its segment slots, of which few sizes occur."""
    row = max(_SHORTEST_ROW, 1 << (int(lengths.max()) - 1).bit_length())
    plan = plan_packing(lengths, seq_len=row)
    return plan, row, segment_bucket(plan.max_segments)


def _joined(context: Tokens, continuation: Tokens, limit: int) -> Tokens:
    """Return both, of which all but the last token fit the limit."""
    if not context:
        raise ValueError("a continuation needs a context: begin with the beginning- or end-of-text token")
    if len(continuation) > limit:
        raise ValueError(f"a continuation has {len(continuation):,} tokens, the model's limit is {limit:,}")
    tokens = (context + continuation)[-(limit + 1) :]
    return tokens if len(tokens) > 1 else tokens * 2  # an empty continuation scores nothing
