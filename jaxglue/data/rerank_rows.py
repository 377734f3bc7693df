"""Rows of a query and documents that are relevant or not."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.messages import listed
from jaxglue.data.questions import YES_NO, Labels
from jaxglue.data.read_rows import Frame, PartText, UnitEncoder, UnitText, beginning

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
"""System message of Qwen3's rerankers, where there is no other."""
_FORMS = "query with document and label, with documents and labels, or with positive and negative, texts or lists"


class RerankEncoder(UnitEncoder):
    """Tokenizer of queries with documents in the form of Qwen3's rerankers; each document is a part.

    Args:
        tokenizer: of the model.
        system: message in place of the rerankers'.
        instruction: of rows that have none.
        longest: the most tokens of a document with the end of its prompt.
        compares: a row needs documents of different labels.
    """

    format = "documents"
    keys = frozenset(
        {"query", "instruction", "document", "label", "documents", "labels", "positive", "negative", "negatives"}
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        instruction: str = "",
        longest: int = 512,
        compares: bool = False,
    ):
        super().__init__(tokenizer, system=system)
        content = "<Instruct>: {state}\n<Document>: {question}"
        self._frame = Frame.of(self.template, self.system or SYSTEM, content)
        self.labels = Labels.of(tokenizer, self._frame.tail, has_template=self._frame.has_template)
        self._instruction, self._compares = instruction, compares
        self.tail = len(self.pieces.encode([self.before, self._frame.tail])[1])
        self.longest = longest + self.tail

    @property
    def answers(self) -> tuple[int, int]:
        """Return the tokens of yes and no."""
        yes, no = self.labels.groups[YES_NO]
        return yes[0], no[0]

    @property
    def before(self) -> str:
        """Return the text between query and document, whose last space is the document's."""
        return self._frame.between.rstrip(" ")

    def unit(self, row: Mapping[str, Any]) -> UnitText:
        """Return a row's query and documents, with the label of each."""
        if not isinstance(query := row.get("query"), str) or not query.strip():
            raise ValueError(f"a row of a reranker needs {_FORMS}; its keys are {listed(dict(row))}")
        documents, labels = _documents(row)
        if self._compares and len(set(labels)) < 2:
            raise ValueError("all documents have the same label, so none is better than another: take the row out")
        instruction = row.get("instruction") or self._instruction
        if not isinstance(instruction, str):
            raise ValueError(f"'instruction' must be a text, got {type(instruction).__name__}")
        return self.asked(query, documents, labels, instruction)

    def asked(
        self, query: str, documents: list[str], labels: list[float] | None = None, instruction: str | None = None
    ) -> UnitText:
        """Return a query with documents."""
        begins = [] if self._frame.has_template else [beginning(self.tokenizer)]
        state = self.protected(f"{instruction or self._instruction}\n<Query>: {query}")
        labels = labels or [0.0] * len(documents)
        parts = [
            PartText(pieces=[f" {self.protected(document)}{self._frame.tail}"], gold=[label])
            for document, label in zip(documents, labels, strict=True)
        ]
        return UnitText([*begins, f"{self._frame.head}{state}{self.before}"], parts)


def _documents(row: Mapping[str, Any]) -> tuple[list[str], list[float]]:
    """Return a row's documents and their labels."""
    if row.get("positive") is not None:
        positives = _texts("positive", row["positive"])
        negatives = [text for key in ("negative", "negatives") if row.get(key) is not None
                     for text in _texts(key, row[key])]  # fmt: skip
        if set(positives) & set(negatives):
            raise ValueError("a negative is equal to the positive: take one of them out")
        return positives + negatives, [1.0] * len(positives) + [0.0] * len(negatives)
    if row.get("documents") is not None:
        documents, labels = _texts("documents", row["documents"]), row.get("labels")
        if not isinstance(labels, list) or len(labels) != len(documents):
            raise ValueError(f"'labels' must be a list of {len(documents)} numbers, one for each document")
    elif row.get("document") is not None:
        documents, labels = _texts("document", row["document"]), [row.get("label")]
    else:
        raise ValueError(f"a row of a reranker needs {_FORMS}; its keys are {listed(dict(row))}")
    return documents, [_label(label) for label in labels]


def _label(value: Any) -> float:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise ValueError(f"a label is {value!r:.80}, expected 0 to 1")
    return float(value)


def _texts(name: str, value: Any) -> list[str]:
    """Return texts, of a text, an object with `text`, or a list of these."""
    values = value if isinstance(value, list) else [value]
    found: list[Any] = [each.get("text") if isinstance(each, Mapping) else each for each in values]
    if not found or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name!r} must be a text or a list of texts")
    if (empty := next((number for number, text in enumerate(found, 1) if not text.strip()), None)) is not None:
        raise ValueError(f"{name!r}: document {empty} is empty: take it out")
    return found
