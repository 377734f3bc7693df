"""Embeddings: contrastive losses of the texts of a whole step, in two passes over its packed rows.

The first pass computes all embeddings, from which follow the loss and its gradient to each; the second runs the rows
again and passes these gradients on. So a step has as many negatives as it has texts, in the memory of a micro-batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Float, Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Reads
from jaxglue.data.reads import ReadDataset, ReadTask, Slots
from jaxglue.data.text_rows import TextEncoder, end_texts
from jaxglue.objectives.contrastive import ANCHOR, NEGATIVE, POSITIVE, UNUSED, Contrast, Sizes, Texts, text_losses
from jaxglue.objectives.objective import frozen_vocabulary
from jaxglue.objectives.reading import READS_EXCLUDE, PartOutputs, PartValues, ReadObjective
from jaxglue.objectives.reading_config import EmbedSettings
from jaxglue.objectives.retrieval import DEPTH, rank_correlation, ranked, ranking_measures
from jaxglue.ops.segments import segment_bucket
from jaxglue.settings.config import Excludes

_QUERIES = 256
"""Queries that are compared with all documents at a time."""


@dataclass(frozen=True, kw_only=True)
class EmbedTask(ReadTask):
    """Texts, each in a segment of its own."""

    query: str = ""
    document: str = ""
    longest: int = 512
    scored: bool = False

    def adopt(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let texts end with a token of their own."""
        end_texts(tokenizer)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, system: str) -> TextEncoder:
        """Return the tokenizer of texts."""
        settings: dict[str, Any] = {"query": self.query, "document": self.document, "longest": self.longest}
        return TextEncoder(tokenizer, **settings, scored=self.scored)

    @property
    def encoding(self) -> str:
        """Return the settings of texts."""
        return f"texts 1 {self.query!r} {self.document!r} {self.longest} {self.scored}"

    def targets(self, counts: Int[np.ndarray, "units"]) -> Int[np.ndarray, "units"]:
        """Count each unit once: it has one anchor."""
        return np.ones_like(counts)

    def values(self, dataset: ReadDataset, parts: Slots) -> dict[str, np.ndarray]:
        """Return kinds of texts, numbers that equal texts share, and similarities."""
        used = parts.parts >= 0
        table, at = dataset.table, np.maximum(parts.parts, 0)
        kinds = np.where(used, table.kinds[at], UNUSED).astype(np.int32)
        gold = np.where(used, table.gold[table.firsts[at]], 0).astype(np.float32)
        return {"kinds": kinds, "texts": np.where(used, dataset.text_ids[at], -1).astype(np.int32), "gold": gold}


class Embeddings(ReadObjective):
    """InfoNCE or CoSENT of a step's texts; a mean over anchors."""

    Settings = EmbedSettings
    kind = "embed"
    shares_beginning = False
    two_passes = True
    excludes = (
        *READS_EXCLUDE,
        *frozen_vocabulary("embeddings are read before the output projection"),
        *(
            Excludes(name, "its texts are computed twice, and have to be the same", bool)
            for name in ("dropout", "neftune_alpha")
        ),
        Excludes("system", "texts are no chats: use --query-prompt and --document-prompt"),
    )
    learning_rates = {"lora": 1e-4, "full": 1e-5}  # noqa: RUF012

    def task(self, *, shared_prompt: bool, copies: bool = False) -> EmbedTask:
        """Return the treatment of rows of texts."""
        settings = self.config
        return EmbedTask(
            shared_prompt=False,
            whole_texts=settings.pooling == "mean",
            bidirectional=settings.bidirectional,
            stays_whole=True,
            query=settings.query_prompt,
            document=settings.document_prompt,
            longest=settings.max_text_length,
            scored=settings.embed_loss == "cosent",
        )

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the name of the share of anchors whose positive is the most similar."""
        return ("accuracy",)

    @property
    def title(self) -> str:
        """Return the loss and how texts are read."""
        settings = self.config
        dims = (
            f", of {', '.join(map(str, settings.matryoshka_dims))} dimensions too" if settings.matryoshka_dims else ""
        )
        sees = "bidirectional" if settings.bidirectional else "causal"
        symmetric = "symmetric " if settings.symmetric else ""
        pooled = "mean of tokens" if settings.pooling == "mean" else "last token"
        return f"embeddings, {symmetric}{settings.embed_loss}{dims}, {pooled}, {sees}"

    def why_constant(self, dataset: ReadDataset, units: Int[np.ndarray, "units"]) -> str:
        """Return that no anchor has a negative, or all pairs the same similarity."""
        _, parts = dataset.parts_of(units)
        kinds, texts = dataset.table.kinds[parts], dataset.text_ids[parts]
        if self.contrast.by_score:
            gold = dataset.table.gold[dataset.table.firsts[parts]]
            return "all pairs have the same similarity" if len(np.unique(gold)) < 2 else ""
        one_document = len(np.unique(texts[kinds != ANCHOR])) < 2
        one_anchor = len(np.unique(texts[kinds == ANCHOR])) < 2 and not (kinds == NEGATIVE).any()
        return "no pair has a negative" if one_document or one_anchor else ""

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A D"]:
        """Return the texts' embeddings, not normalized."""
        return values.reads

    def part_sums(self, values: PartValues, reads: Reads) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ accuracy] over the anchors of this device's rows, of the first pass.

        The loss's gradient is the one that the first pass gave each embedding.
        """
        embeddings, gradient = values.reads, reads.values["gradient"]
        product = (embeddings * gradient).sum()
        loss = reads.values["losses"].sum() + product - stop_gradient(product)
        return jnp.stack([loss, reads.values["hits"].sum()])

    @property
    def contrast(self) -> Contrast:
        """Return the loss of a step's texts."""
        settings = self.config
        return Contrast(
            scale=settings.similarity_scale,
            symmetric=settings.symmetric,
            dims=(None, *settings.matryoshka_dims),
            by_score=settings.embed_loss == "cosent",
        )

    def step_sizes(self, dataset: ReadDataset, anchors: int) -> Sizes:
        """Return the static sizes of a step of so many anchors."""
        return Sizes(segment_bucket(anchors), dataset.most_parts - 2)

    def gradients(
        self, sizes: Sizes, embeddings: list[Float[Array, "B A D"]], reads: list[Reads], spread: Any
    ) -> list[dict[str, Array]]:
        """Return what the second pass reads of each micro-batch, from the embeddings of all; traced."""
        flat = jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in embeddings])
        names = ("kinds", "texts", "gold")
        texts = Texts(*(jnp.concatenate([each.values[name].reshape(-1) for each in reads]) for name in names))

        def loss(flat: Float[Array, "N D"]) -> Any:
            return text_losses(self.contrast, sizes, flat, texts, spread)

        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(flat)
        parts, at = [], 0
        for each in embeddings:
            own, shape = slice(at, at + each.shape[0] * each.shape[1]), each.shape[:2]
            at = own.stop
            values = {"losses": found.losses[own].reshape(shape), "hits": found.hits[own].reshape(shape)}
            parts.append({"gradient": gradient[own].reshape(each.shape), **values})
        return parts

    def measure(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, float]:
        """Return the loss of all held-out pairs as one step's, and how they rank all held-out documents."""
        kinds, texts, gold = (found.values[name] for name in ("kinds", "texts", "gold"))
        pairs = int((kinds == ANCHOR).sum())
        hard = max(int(np.bincount(found.units[kinds == NEGATIVE], minlength=1).max()), 0)
        slots = Texts(*map(jnp.asarray, (kinds, texts, gold)))
        total, losses = text_losses(
            self.contrast, Sizes(segment_bucket(pairs), hard), jnp.asarray(found.outputs), slots
        )
        values = {"loss": float(total) / pairs}
        unit = found.outputs / np.maximum(np.linalg.norm(found.outputs, axis=-1, keepdims=True), 1e-12)
        anchors, positives = unit[kinds == ANCHOR], unit[kinds == POSITIVE]
        if self.config.embed_loss == "cosent":
            cosines, wanted = (anchors * positives).sum(-1), gold[kinds == ANCHOR]
            return values | {"spearman": rank_correlation(cosines, wanted)}
        values["accuracy"] = float(losses.hits.sum()) / pairs
        return values | retrieval_measures(unit, kinds, texts)

    def record(self) -> dict[str, Any]:
        """Return how texts are read."""
        settings = self.config
        names = ("pooling", "bidirectional", "query_prompt", "document_prompt", "max_text_length", "similarity_scale")
        return {name: getattr(settings, name) for name in names} | {"matryoshka_dims": list(settings.matryoshka_dims)}

    def abstract_values(self, batch: int, slots: int, hidden: int) -> dict[str, Any]:
        """Return the shapes of a batch's texts and gradients."""
        floats, integers = (jax.ShapeDtypeStruct((batch, slots), dtype) for dtype in (jnp.float32, jnp.int32))
        gradient = jax.ShapeDtypeStruct((batch, slots, hidden), jnp.float32)
        return {"kinds": integers, "texts": integers, "gold": floats, "losses": floats, "hits": floats} | {
            "gradient": gradient
        }


class TextPairs(NamedTuple):
    """The pairs of read texts, in the order of units."""

    units: Int[np.ndarray, "P"]
    anchor_rows: Int[np.ndarray, "P"]
    """Places of anchors among all texts."""
    positive_rows: Int[np.ndarray, "P"]
    anchors: Int[np.ndarray, "P"]
    """Numbers that equal texts share."""
    positives: Int[np.ndarray, "P"]


def embed_rows(found: PartOutputs) -> TextPairs:
    """Return the pairs of read texts."""
    kinds, texts = found.values["kinds"], found.values["texts"]
    anchors, positives = np.flatnonzero(kinds == ANCHOR), np.flatnonzero(kinds == POSITIVE)
    return TextPairs(found.units[anchors], anchors, positives, texts[anchors], texts[positives])


def retrieval_measures(
    unit: Float[np.ndarray, "N D"],
    kinds: Int[np.ndarray, "N"],
    texts: Int[np.ndarray, "N"],
) -> dict[str, float]:
    """Return the measures of each distinct anchor's ranking of all distinct documents; its positives are relevant."""
    documents, firsts = np.unique(texts[kinds != ANCHOR], return_index=True)
    matrix = unit[kinds != ANCHOR][firsts]
    anchors, own = texts[kinds == ANCHOR], np.searchsorted(documents, texts[kinds == POSITIVE])
    queries, first, inverse = np.unique(anchors, return_index=True, return_inverse=True)
    relevant: list[set[int]] = [set() for _ in queries]
    for query, document in zip(inverse.tolist(), own.tolist(), strict=True):
        relevant[query].add(document)
    rankings, totals = [], []
    for start in range(0, len(queries), _QUERIES):
        scores = unit[kinds == ANCHOR][first[start : start + _QUERIES]] @ matrix.T
        for each, known in zip(scores, relevant[start : start + _QUERIES], strict=True):
            relevance = np.zeros(len(documents))
            relevance[list(known)] = 1
            first = ranked(each, relevance)[:DEPTH]
            missed = np.ones(len(known) - int(first.sum()))
            rankings.append(np.concatenate([first, np.zeros(DEPTH - len(first)), missed]))
            totals.append(float(len(known)))
    return ranking_measures(rankings, totals)
