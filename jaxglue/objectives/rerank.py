"""Rerankers: scores of documents to a query, of which a row of tokens holds the query once."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import logsumexp, softplus
from jaxtyping import Array, Float, Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Reads
from jaxglue.data.questions import YES_NO, Labels
from jaxglue.data.reads import ReadDataset, ReadTask, Slots
from jaxglue.data.rerank_rows import RerankEncoder
from jaxglue.objectives.reading import READS_EXCLUDE, PartOutputs, PartValues, ReadObjective
from jaxglue.objectives.reading_config import RerankSettings
from jaxglue.objectives.retrieval import ranked, ranking_measures
from jaxglue.objectives.scores import SCORES_EXCLUDE

_NOTHING = -1e30


@dataclass(frozen=True, kw_only=True)
class RerankTask(ReadTask):
    """Documents to a query, read where the judgement begins."""

    instruction: str = ""
    longest: int = 512
    by_query: bool = False
    """Losses are of a query's documents together."""

    def encoder(self, tokenizer: PreTrainedTokenizerBase, system: str) -> RerankEncoder:
        """Return the tokenizer of queries and documents."""
        settings: dict[str, Any] = {"instruction": self.instruction, "longest": self.longest}
        return RerankEncoder(tokenizer, system=system, **settings, compares=self.by_query)

    @property
    def encoding(self) -> str:
        """Return the settings of the prompts."""
        return f"documents 1 {self.instruction!r} {self.longest} {self.by_query}"

    def labels(self, tokenizer: PreTrainedTokenizerBase, system: str) -> Labels:
        """Return the tokens that judge documents."""
        return self.encoder(tokenizer, system).labels

    def targets(self, counts: Int[np.ndarray, "units"]) -> Int[np.ndarray, "units"]:
        """Count documents, or queries where their documents are compared."""
        return np.ones_like(counts) if self.by_query else counts

    def values(self, dataset: ReadDataset, parts: Slots) -> dict[str, np.ndarray]:
        """Return the tokens of yes and no, and the documents' labels."""
        assert dataset.labels is not None
        at = dataset.table.firsts[np.maximum(parts.parts, 0)]
        labels = np.where(parts.parts >= 0, dataset.table.gold[at], 0).astype(np.float32)
        tokens = np.array([group[0] for group in dataset.labels.groups[YES_NO]], np.int32)
        return {"labels": labels, "tokens": np.tile(tokens, (len(labels), 1))}


class Reranker(ReadObjective):
    """Losses of documents' scores, logit(yes) − logit(no); a mean over documents, or over queries."""

    Settings = RerankSettings
    kind = "rerank"
    learning_rates = {"lora": 1e-4, "full": 1e-5}  # noqa: RUF012

    def task(self, *, shared_prompt: bool, copies: bool = False) -> RerankTask:
        """Return the treatment of rows of documents."""
        by_query = self.config.rerank_loss != "pointwise"
        return RerankTask(
            shared_prompt=shared_prompt,
            copies=copies,
            stays_whole=by_query,
            by_query=by_query,
            instruction=self.config.rerank_instruction,
            longest=self.config.max_document_length,
        )

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the name of the share of right judgements, or of queries whose best document is relevant."""
        return ("accuracy",)

    @property
    def title(self) -> str:
        """Return the loss and the head."""
        head = "a score" if self.trains_scores else "yes and no at the head"
        return f"reranker, {self.config.rerank_loss}, by {head}"

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A"]:
        """Return each document's score."""
        logits = values.read_logits(reads.values["tokens"])
        return logits[..., 0] - logits[..., 1]

    def sums_of(self, outputs: Float[Array, "B A"], reads: Reads) -> Float[Array, " sums"]:
        """Return [Σ loss, Σ accuracy]."""
        labels, used = reads.values["labels"], reads.used
        if self.config.rerank_loss == "pointwise":
            losses = softplus(outputs) - outputs * labels
            hits = (outputs > 0) == (labels > 0.5)
            return jnp.stack([(used * losses).sum(), jax.lax.stop_gradient((used * hits).sum())])
        is_same = (reads.units[:, :, None] == reads.units[:, None, :]) & (reads.units >= 0)[:, :, None]
        scores = outputs / self.config.rerank_temperature
        if self.config.rerank_loss == "listwise":
            total = jnp.where(is_same, labels[:, None, :], 0).sum(-1)
            every = logsumexp(jnp.where(is_same, scores[:, None, :], _NOTHING), axis=-1)
            losses = labels / jnp.maximum(total, 1e-9) * (every - scores)
        else:
            better = is_same & (labels[:, :, None] > labels[:, None, :])
            pairs = jnp.where(is_same, better.sum(-1)[:, None, :], 0).sum(-1)
            each = jnp.where(better, softplus(scores[:, None, :] - scores[:, :, None]), 0)
            losses = each.sum(-1) / jnp.maximum(pairs, 1)
        slots = jnp.arange(scores.shape[1])
        ahead = (scores[:, None, :] > scores[:, :, None]) | (
            (scores[:, None, :] == scores[:, :, None]) & (slots < slots[:, None])
        )
        is_first = ~(is_same & ahead).any(-1)
        best = jnp.where(is_same, labels[:, None, :], 0).max(-1)
        hits = used * is_first * (labels >= best)
        return jnp.stack([(used * losses).sum(), jax.lax.stop_gradient(hits.sum())])

    def measure(self, found: PartOutputs, dataset: ReadDataset) -> dict[str, float]:
        """Return the measures of the rankings of queries' documents; of rows of one document none."""
        labels, rankings, totals = found.values["labels"], [], []
        for own in np.split(np.arange(len(labels)), np.flatnonzero(np.diff(found.units)) + 1):
            if len(own) > 1:
                rankings.append(ranked(found.outputs[own], labels[own].astype(np.float64)))
                totals.append(float(labels[own].sum()))
        return ranking_measures(rankings, totals)

    def record(self) -> dict[str, Any]:
        """Return the prompt's settings, and the head."""
        names = ("rerank_instruction", "max_document_length")
        return {name: getattr(self.config, name) for name in names} | {"score": self.trains_scores}

    def abstract_values(self, batch: int, slots: int, hidden: int) -> dict[str, Any]:
        """Return the shapes of a batch's labels."""
        tokens = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
        return {"labels": jax.ShapeDtypeStruct((batch, slots), jnp.float32), "tokens": tokens}


class ScoreReranker(Reranker):
    """The same of scores in place of the output projection, as of sequence classifiers with one label."""

    trains_scores = True
    excludes = (*READS_EXCLUDE, *(each for each in SCORES_EXCLUDE if each not in READS_EXCLUDE))

    def outputs(self, values: PartValues, reads: Reads) -> Float[Array, "B A"]:
        """Return each document's score."""
        return values.read_scores
