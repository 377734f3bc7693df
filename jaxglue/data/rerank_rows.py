"""Rows of a query and documents that are relevant or not."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.messages import listed, number_of
from jaxglue.data.questions import YES_NO, Labels
from jaxglue.data.read_rows import (
    MESSAGES_READ,
    Frame,
    PartText,
    UnitEncoder,
    UnitText,
    beginning,
    has_image,
    named_texts,
    require_text,
)

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
    sees = True
    keys = MESSAGES_READ | {
        *("query", "instruction", "document", "label", "documents", "labels", "positive", "negative", "negatives")
    }

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
        row = named_texts(row)
        if (query := row.get("query")) is None:
            raise ValueError(f"a row of a reranker needs {_FORMS}; its keys are {listed(dict(row))}")
        require_text("query", query)
        documents, labels = _documents(row)
        if self._compares and len(set(labels)) < 2:
            raise ValueError("all documents have the same label, so none is better than another: take the row out")
        instruction = row.get("instruction") or self._instruction
        if not isinstance(instruction, str):
            raise ValueError(f"'instruction' must be a text, got {type(instruction).__name__}")
        return self.asked(query, documents, labels, instruction)

    def asked(
        self, query: Any, documents: list[Any], labels: list[float] | None = None, instruction: str | None = None
    ) -> UnitText:
        """Return a query with documents, each a text or an object with images, which come before its text."""
        begins = [] if self._frame.has_template else [beginning(self.tokenizer)]
        (text, images), told = self.shown(query), self.protected(f"{instruction or self._instruction}\n<Query>: ")
        head, tail = f"{self._frame.head}{told}", f"{self.protected(text)}{self.before}"
        prefix = [head, self.image_tokens(images), tail] if images else [f"{head}{tail}"]
        labels = labels or [0.0] * len(documents)
        parts = [self._document(*pair) for pair in zip(documents, labels, strict=True)]
        return UnitText([*begins, *prefix], parts, images)

    def _document(self, value: Any, label: float) -> PartText:
        text, images = self.shown(value)
        pieces: list[str | bytes] = [f" {self.protected(text)}{self._frame.tail}"]
        return PartText(pieces=[self.image_tokens(images), *pieces] if images else pieces, gold=[label], images=images)


def _documents(row: Mapping[str, Any]) -> tuple[list[Any], list[float]]:
    """Return a row's documents and their labels."""
    if row.get("positive") is not None:
        positives = _texts("positive", row["positive"])
        negatives = [text for key in ("negative", "negatives") if row.get(key) is not None
                     for text in _texts(key, row[key])]  # fmt: skip
        if any(negative in positives for negative in negatives):
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
    if not 0 <= (label := number_of(value)) <= 1:
        raise ValueError(f"a label is {value!r:.80}, expected 0 to 1")
    return label


def _texts(name: str, value: Any) -> list[Any]:
    """Return texts, of a text, an object with `text`, or a list of these; an object with images is one, too."""
    values = value if isinstance(value, list) else [value]
    bare = (isinstance(each, Mapping) and not has_image(each) for each in values)
    found: list[Any] = [each.get("text") if is_bare else each for each, is_bare in zip(values, bare, strict=True)]
    if not found or not all(isinstance(text, str | Mapping) for text in found):
        raise ValueError(f"{name!r} must be a text or a list of texts")
    texts = ((number, text) for number, text in enumerate(found, 1) if isinstance(text, str))
    if (empty := next((number for number, text in texts if not text.strip()), None)) is not None:
        raise ValueError(f"{name!r}: document {empty} is empty: take it out")
    return found
