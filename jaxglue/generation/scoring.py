"""Scores of continuations by a language model, and of texts by a reward model, many of them packed into one row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from jaxglue.data.batch import CHOSEN, PARTS, Answers, Batch
from jaxglue.data.images import DocumentPart, ImageRules, decode
from jaxglue.data.packing import PackPlan, plan_packing
from jaxglue.data.tokenizer import padding_token
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.assistant import Assistant, count_labels, load_parts
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.engine import require_known
from jaxglue.generation.sight import make_rules
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params, split_model
from jaxglue.ops.segments import pack_forks, pack_segments, segment_bucket
from jaxglue.vision.rows import Image, PlacedImage, PromptImages, pack_prompts

Tokens = list[int]
_SHORTEST_ROW = 2048
_TOP = 20
"""Likely tokens are found in multiples of this."""


class ContinuationScorer:
    """Scores continuations of contexts with an assistant's model; where that is exact, whatever shares their row."""

    def __init__(self, assistant: Assistant):
        self._tile = assistant.tile
        self._executor = _executor(assistant.graphdefs, assistant.config, assistant.dtype, self._tile)
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
        rooms = _rooms(lengths, self._tile)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        if not len(lengths):
            return found
        plan, row, slots = plan_rows(rooms)
        for index in range(plan.rows):
            losses, hits = self._score_row(plan, index, whole, row, slots)
            ends = np.cumsum(rooms[plan.row(index)]) - (rooms - lengths)[plan.row(index)]
            for document, end in zip(plan.row(index), ends, strict=True):
                own = slice(end - len(pairs[document][1]), end)
                found[document] = -float(np.sum(losses[own], dtype=np.float64)), bool(hits[own].all())
        return found

    def _score_row(self, plan: PackPlan, index: int, texts: list[Tokens], row: int, slots: int):
        """Return the losses and hits of a row's tokens."""
        batch, places = _row_of([texts[document] for document in plan.row(index)], row, slots, self._tile)
        losses, best = jax.device_get(self._executor.token_scores(*self._trees, jax.device_put(batch)))
        require_finite(losses[0, places])
        return losses[0], best[0] == batch.targets[0]


def _executor(graphdefs: ModelGraphDefs, config: DecoderConfig, dtype: Any, tile: int | None) -> Executor:
    return Executor(graphdefs, config, policy=PRESETS["full"], dtype=dtype, exact=tile is not None)


def _rooms(lengths: Int[np.ndarray, " N"], tile: int | None) -> Int[np.ndarray, " N"]:
    """Return the tokens of a row that texts of these lengths take, each from a multiple of a tile on."""
    return lengths if tile is None else -(-lengths // tile) * tile


def _row_of(
    texts: Sequence[Tokens], row: int, slots: int, tile: int | None
) -> tuple[Batch, Int[np.ndarray, " filled"]]:
    """Return a batch of one row with the texts' tokens, each but the last with the next as target, and their places."""
    lengths = np.array([len(tokens) - 1 for tokens in texts], np.int64)
    rooms = _rooms(lengths, tile)
    if tile is None:
        segments = pack_segments([lengths.tolist()], seq_len=row, max_segments=slots)
    else:
        segments = pack_forks([[(int(n),) for n in lengths]], seq_len=row, max_segments=slots, tile=tile)
    begins = np.cumsum(rooms) - rooms
    places = np.concatenate([begin + np.arange(n) for begin, n in zip(begins, lengths, strict=True)])
    arrays = np.zeros((2, 1, row), np.int32)
    arrays[0, 0, places] = np.concatenate([tokens[:-1] for tokens in texts])
    arrays[1, 0, places] = np.concatenate([tokens[1:] for tokens in texts])
    fields: dict[str, Any] = {"tokens": arrays[0], "targets": arrays[1]}
    return Batch(**fields, loss_weights=jnp.ones((1, row)), segments=segments), places


class PromptScores(NamedTuple):
    """Log-probabilities of a text's tokens but the first, T - 1 of them, and of the likeliest in their places."""

    log_probs: Float[np.ndarray, " T-1"]
    likely_ids: Int[np.ndarray, "T-1 top"]
    likely_log_probs: Float[np.ndarray, "T-1 top"]

    def log_prob(self, index: int) -> float:
        """Return the log-probability of the token after so many and the first."""
        return float(self.log_probs[index])

    def likely(self, index: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens in its place, with their log-probabilities."""
        return list(zip(self.likely_ids[index].tolist(), self.likely_log_probs[index].tolist(), strict=True))


class PromptScorer:
    """Scores tokens of prompts with a model, beside its answers.

    Args:
        graphdefs: the modules.
        config: the model's shape.
        frozen: its frozen parameters.
        dtype: of activations.
        tile: tokens at whose multiples texts begin, so that scores do not depend on what shares a row; None for any.
    """

    def __init__(
        self, graphdefs: ModelGraphDefs, config: DecoderConfig, frozen: Params, dtype: Any, tile: int | None = None
    ):
        self._executor, self._tile = _executor(graphdefs, config, dtype, tile), tile
        self._frozen, self._vocabulary = frozen, config.vocab_size

    def score(
        self,
        trainable: Params,
        texts: Sequence[Tokens],
        ranks: Bool[np.ndarray, " R"] | None,
        top: int,
        images: PromptImages | None = None,
    ) -> list[PromptScores]:
        """Return the scores of texts.

        Args:
            trainable: parameters of all adapters.
            texts: of at least one token each.
            ranks: of the adapter in use; None for all.
            top: likely tokens to report in each place.
            images: of the only text.

        Raises:
            ValueError: a token outside the vocabulary, or a score that is not finite.
        """
        for number, tokens in enumerate(texts, 1):
            require_known(tokens, self._vocabulary, f"prompt {number}")
        trainable = trainable if ranks is None else _masked(trainable, ranks)
        count = min(-(-max(top, 1) // _TOP) * _TOP, self._vocabulary)  # few programs
        empty = np.zeros((0, top))
        scores = [PromptScores(np.zeros(0), empty.astype(np.int32), empty)] * len(texts)
        longer = [index for index, tokens in enumerate(texts) if len(tokens) > 1]
        if not longer:
            return scores
        lengths = np.array([len(texts[index]) - 1 for index in longer], np.int64)
        plan, row, slots = plan_rows(_rooms(lengths, self._tile))
        for members in map(plan.row, range(plan.rows)):
            indices = [longer[member] for member in members]
            batch, places = _row_of([texts[index] for index in indices], row, slots, self._tile)
            if images is not None:
                batch = replace(batch, images=pack_prompts([(0, len(places), images)], row))
            parts = self._executor.likely_tokens(trainable, self._frozen, jax.device_put(batch), count)
            log_probs, ids, likely = (np.asarray(part)[places] for part in parts)
            require_finite(log_probs)
            ends = np.cumsum([len(texts[index]) - 1 for index in indices])[:-1]
            columns = (np.split(part, ends) for part in (log_probs, ids[:, :top], likely[:, :top]))
            for index, *of_text in zip(indices, *columns, strict=True):
                scores[index] = PromptScores(*of_text)
        return scores


def _masked(trainable: Params, ranks: Bool[np.ndarray, " R"]) -> Params:
    """Return adapters without the other ranks: x·Aᵀ is 0 there."""

    def mask(path: Any, values: jax.Array) -> jax.Array:
        is_first = jax.tree_util.keystr(path, simple=True, separator=".").endswith("lora_A")
        return values * jnp.asarray(ranks, values.dtype)[:, None] if is_first else values

    return jax.tree_util.tree_map_with_path(mask, trainable)


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

    Args:
        config: of the model.
        limits: of images, as `read_vision` takes them.

    Raises:
        ValueError: bad folders, tensors or tokenizer, or a model that writes text.
    """

    def __init__(self, config: AssistantConfig, **limits: int | None):
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
        self.rules: ImageRules | None = None
        """For images of documents; None of a model that sees none."""
        if model.config.vision is not None:
            self.rules = make_rules(config.folder, self.tokenizer, files=None, **limits)
        graphdefs, self._trainable, self._frozen = split_model(model, nnx.LoRAParam)
        self._executor = Executor(graphdefs, model.config, policy=PRESETS["full"], dtype=dtype)
        self._padding = padding_token(self.tokenizer)

    def scores(
        self, documents: Sequence[Sequence[int] | np.ndarray], images: Sequence[Sequence[Image]] = ()
    ) -> Float[np.ndarray, "documents labels"]:
        """Return each document's scores: those of its last token other than padding.

        Args:
            documents: tokens.
            images: of each document, whose tokens are among these; empty where none has any.

        Raises:
            ValueError: an empty document, one beyond the model's limit, images that the model does not see or that
                cannot be read, or a score that is not finite.
        """
        if any(images) and self.rules is None:
            raise ValueError("this reward model or classifier sees no images: give texts alone")
        documents = [self._without_padding(document) for document in documents]
        scores = np.zeros((len(documents), self.labels))
        if not documents:
            return scores
        lengths = np.array([len(document) for document in documents], np.int64)
        plan, row, slots = plan_rows(lengths)
        for members in map(plan.row, range(plan.rows)):
            batch = _make_batch([documents[index] for index in members], row, slots)
            if any(seen := [images[index] for index in members] if images else []):
                batch = self._with_images(batch, [documents[index] for index in members], seen)
            found = self._executor.answer_log_probs(self._trainable, self._frozen, jax.device_put(batch))
            scores[members] = np.asarray(found)[0, : len(members), : self.labels]
        require_finite(scores)
        return scores

    def _with_images(self, batch: Batch, texts: Sequence[np.ndarray], images: Sequence[Sequence[Image]]) -> Batch:
        """Return a batch of one row with the images of its documents."""
        rules, parts, tokens = self.rules, list[DocumentPart](), np.array(batch.tokens)
        assert rules is not None
        for text, seen in zip(texts, images, strict=True):
            firsts = rules.firsts(text, [image.grid for image in seen])
            placed = map(PlacedImage, firsts, decode(seen, rules.processor))
            parts.append(DocumentPart(0, len(text), [*placed]))
        changed: dict[str, Any] = {"images": rules.rows(tokens, [parts]).with_patches(), "tokens": tokens}
        return replace(batch, **changed)

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

    def __init__(self, config: AssistantConfig, **limits: int | None):
        super().__init__(config, **limits)
        if self.labels > 1:
            name = config.adapter or config.folder
            raise ValueError(f"{name} is a classifier with {self.labels} labels, which is no reward")

    def score(
        self, documents: Sequence[Sequence[int] | np.ndarray], images: Sequence[Sequence[Image]] = ()
    ) -> list[float]:
        """Return each document's score; see `TextScorer.scores`."""
        return self.scores(documents, images)[:, 0].tolist()


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
