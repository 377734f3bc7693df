"""Settings of objectives whose rows have parts that are read by themselves; importing them loads no JAX."""

from dataclasses import dataclass
from typing import Literal

from jaxglue.objectives.config import Smoothing
from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.settings.config import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DecideHeadSettings(ObjectiveConfig):
    """Decisions by a head of their own."""

    label_smoothing: Smoothing = 0.0
    """Share of the gold probabilities that is spread over all options of a question."""
    brier_weight: NonNegativeFloat = 0.0
    """Weight of the squared differences between probabilities and gold, beside the cross-entropy."""
    rps_weight: NonNegativeFloat = 0.0
    """Weight of the squared differences between their sums up to each level of a score (ranked probability score)."""
    ordinal_weight: NonNegativeFloat = 0.0
    """Weight of the expected distance between a score's level and the gold one, in shares of its range."""
    permute_options: bool = False
    """Show the options of choices in another order each time in training; evaluation says what their order changes."""


@dataclass(frozen=True, kw_only=True)
class DecideSettings(DecideHeadSettings):
    """Decisions by label tokens."""

    vocabulary_weight: NonNegativeFloat = 0.0
    """Weight of −log of the labels' share of the whole vocabulary's probability, so that a model which also writes
    text answers with labels; with 1 the loss is the cross-entropy over all tokens."""


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(ObjectiveConfig):
    """Embeddings."""

    embed_loss: Literal["infonce", "cosent"] = "infonce"
    """InfoNCE over the texts of a step, or CoSENT of pairs with a similarity."""
    similarity_scale: PositiveFloat = 20.0
    """Factor on cosines in the loss, the inverse of its temperature."""
    symmetric: bool = False
    """Contrast positives with all anchors, too, and take the mean."""
    matryoshka_dims: tuple[PositiveInt, ...] = ()
    """Leading dimensions of which embeddings shall serve alone; their losses are added to that of all."""
    pooling: Literal["last", "mean"] = "last"
    """Read a text at its last token, or the mean of all its tokens."""
    bidirectional: bool = False
    """Let tokens see those after them, too."""
    query_prompt: str = ""
    """Text before anchors, such as an instruction."""
    document_prompt: str = ""
    """Text before positives and negatives."""
    max_text_length: PositiveInt = 512
    """Tokens beyond which a text is cut."""


@dataclass(frozen=True, kw_only=True)
class RerankSettings(ObjectiveConfig):
    """Rerankers."""

    rerank_loss: Literal["pointwise", "pairwise", "listwise"] = "pointwise"
    """Cross-entropy of each document's label, of the order of each two, or of the relevant among all of a query."""
    rerank_temperature: PositiveFloat = 1.0
    """Divides scores in pairwise and listwise losses."""
    rerank_instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    """What makes a document relevant; a row's `instruction` takes its place."""
    max_document_length: PositiveInt = 512
    """Tokens beyond which a document is cut."""
