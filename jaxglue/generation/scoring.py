"""Scores of continuations by a language model, and of texts by a reward model, many of them packed into one row."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxglue.data.batch import CHOSEN, PARTS, Answers, Batch
from jaxglue.data.packing import PackPlan, plan_packing
from jaxglue.data.tokenizer import padding_token
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.assistant import Assistant, count_labels, load_parts
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.engine import require_known
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments, segment_bucket

Tokens = list[int]
_SHORTEST_ROW = 2048


class ContinuationScorer:
    """Scores continuations of contexts with an assistant's model."""

    def __init__(self, assistant: Assistant):
        self._executor = Executor(assistant.graphdefs, assistant.config, policy=PRESETS["full"], dtype=assistant.dtype)
        self._trees = assistant.adapter, assistant.frozen
        self._vocabulary = assistant.config.vocab_size
        self.limit = assistant.config.max_position_embeddings
        """Most tokens that the model reads at once."""

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood after its context, and whether greedy decoding yields it.

        Contexts are cut from the left where they and their continuation exceed the model's limit.

        Raises:
            ValueError: an empty context, a continuation beyond the limit, or a score that is not finite.
        """
        whole = [_joined(context, continuation, self.limit) for context, continuation in pairs]
        for number, tokens in enumerate(whole, 1):
            require_known(tokens, self._vocabulary, f"text {number}")
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
        losses, best = jax.device_get(self._executor.token_scores(*self._trees, jax.device_put(batch)))
        require_finite(losses[0, :filled])
        return losses[0], best[0] == arrays[1, 0]


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


class TextScorer:
    """A loaded reward model or classifier.

    Raises:
        ValueError: bad folders, tensors or tokenizer, or a model that writes text.
    """

    def __init__(self, config: AssistantConfig):
        self.labels = count_labels(config)
        """Scores of a document."""
        if not self.labels:
            name = config.adapter or config.folder
            raise ValueError(
                f"{name} is no reward model: train one with jaxglue train --objective reward (or classify)"
            )
        self.tokenizer, model, dtype = load_parts(config, labels=self.labels)
        self._vocabulary = model.config.vocab_size
        self.limit = model.config.max_position_embeddings
        """Most tokens that the model reads at once."""
        graphdefs, self._trainable, self._frozen = split_model(model, nnx.LoRAParam)
        self._executor = Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=dtype)
        self._padding = padding_token(self.tokenizer)

    def scores(self, documents: Sequence[Sequence[int] | np.ndarray]) -> Float[np.ndarray, "documents labels"]:
        """Return each document's scores: those of its last token other than padding.

        Raises:
            ValueError: an empty document, one beyond the model's limit, or a score that is not finite.
        """
        documents = [self._without_padding(document) for document in documents]
        scores = np.zeros((len(documents), self.labels))
        if not documents:
            return scores
        lengths = np.array([len(document) for document in documents], np.int64)
        plan, row, slots = plan_rows(lengths)
        for members in map(plan.row, range(plan.rows)):
            batch = _make_batch([documents[index] for index in members], row, slots)
            found = self._executor.answer_log_probs(self._trainable, self._frozen, jax.device_put(batch))
            scores[members] = np.asarray(found)[0, : len(members), : self.labels]
        require_finite(scores)
        return scores

    def _without_padding(self, document: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(document, np.int32)
        kept = np.flatnonzero(tokens != self._padding)
        tokens = tokens[: kept[-1] + 1] if len(kept) else tokens[:0]
        if not 0 < len(tokens) <= self.limit:
            raise ValueError(f"a document has {len(tokens):,} tokens, expected 1 to {self.limit:,}, the model's limit")
        require_known(tokens, self._vocabulary, "a document")
        return tokens


class RewardScorer(TextScorer):
    """A loaded reward model, with a score for each document.

    Raises:
        ValueError: as `TextScorer`, or several labels.
    """

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        if self.labels > 1:
            name = config.adapter or config.folder
            raise ValueError(f"{name} is a classifier with {self.labels} labels, which is no reward")

    def score(self, documents: Sequence[Sequence[int] | np.ndarray]) -> list[float]:
        """Return each document's score; see `TextScorer.scores`."""
        return self.scores(documents)[:, 0].tolist()


def _make_batch(documents: Sequence[np.ndarray], row: int, slots: int) -> Batch:
    """Pack documents into one row, with a unit for each."""
    lengths = [len(document) for document in documents]
    lasts = np.cumsum(lengths) - 1
    tokens, weights = np.zeros((1, row), np.int32), np.zeros((1, row), np.float32)
    owners = np.full((1, row), PARTS * slots, np.int32)
    tokens[0, : sum(lengths)], weights[0, lasts] = np.concatenate(documents), 1
    owners[0, lasts] = PARTS * np.arange(len(documents)) + CHOSEN
    ones: Any = np.ones((1, slots), np.float32)
    fields: dict[str, Any] = {"tokens": tokens, "targets": tokens, "loss_weights": weights}
    units: dict[str, Any] = {"owners": owners, "used": ones, "desirable": ones, "token_weight": ones}
    segments = pack_segments([lengths], seq_len=row, max_segments=slots)
    return Batch(**fields, segments=segments, answers=Answers(**units))
