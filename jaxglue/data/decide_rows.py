"""Rows of a state, questions about it and their gold answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.formats import IMAGE_COLUMNS, row_images
from jaxglue.data.messages import listed
from jaxglue.data.questions import (
    Labels,
    Question,
    check_options,
    question_parts,
    read_gold,
    read_questions,
    read_state,
)
from jaxglue.data.read_rows import Frame, PartText, UnitEncoder, UnitText, beginning
from jaxglue.files.json_file import parse_json
from jaxglue.vision.records import ImageRecord


class DecisionEncoder(UnitEncoder):
    """Tokenizer of states with questions; each question is a part that ends where its answer begins.

    Args:
        tokenizer: of the model.
        system: message before the user's.
        rows: options of choices for which a head has rows in place of tokens; None reads tokens.

    Raises:
        ValueError: a tokenizer without labels of single tokens.
    """

    format = "decisions"
    keys = frozenset({"state", "questions", "gold"})
    optional = frozenset(IMAGE_COLUMNS)
    sees = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None, rows: int | None = None):
        super().__init__(tokenizer, system=system)
        self.frame = Frame.of(self.template, self.system)
        """The text around a state and a question."""
        self.tokens = Labels.of(tokenizer, self.frame.tail, has_template=self.frame.has_template)
        """The tokens that answer."""
        self.labels = self.tokens if rows is None else self.tokens.as_rows(rows)
        """Labels that answer: these tokens, or rows of a head."""

    @property
    def before(self) -> str:
        """Return the text between state and question."""
        return self.frame.between

    def unit(self, row: Mapping[str, Any]) -> UnitText:
        """Return a row's state and questions, with the gold of each."""
        if missing := self.keys - row.keys():
            raise ValueError(
                f"rows of decisions need {listed(sorted(missing))}; the row's keys are {listed(dict(row))}"
            )
        questions = read_questions(row["questions"])
        gold = parse_json(row["gold"], "gold") if isinstance(row["gold"], str) else row["gold"]
        if not isinstance(gold, Mapping):
            raise ValueError("'gold' must be an object with the answer to each question by its id")
        gold = {name: value for name, value in gold.items() if value is not None}
        if unknown := sorted(gold.keys() - questions.keys()):
            raise ValueError(f"'gold' answers {unknown[0]!r}, which is no question of the row")
        targets = [read_gold(name, question, gold.get(name)) for name, question in questions.items()]
        images = [] if self.images is None else self.images.read(row_images(row))
        return self.asked(read_state(row["state"]), questions, targets, images=images)

    def asked(
        self,
        state: str,
        questions: Mapping[str, Question],
        targets: list[list[float]] | None = None,
        *,
        system: str | None = None,
        images: Sequence[ImageRecord] = (),
    ) -> UnitText:
        """Return a state with questions; without targets their options have the same probabilities.

        Args:
            state: text.
            questions: by id.
            targets: gold probabilities of each one's options.
            system: message in place of the encoder's.
            images: before the state, of a model that sees.

        Raises:
            ValueError: options beyond the labels, or that have the same tokens; names the question. A template that
                has no place for images, or ends otherwise behind them or the system message.
        """
        parts = []
        for index, (name, question) in enumerate(questions.items()):
            try:
                self._check(question)
            except ValueError as error:
                raise ValueError(f"question {name!r}: {error}") from error
            gold = targets[index] if targets else [1 / len(question.options)] * len(question.options)
            parts.append(self._part_text(question, gold))
        begins = [] if self.frame.has_template else [beginning(self.tokenizer)]
        head = self._head(system, images) if system or images else self.frame.head
        return UnitText([*begins, f"{head}{self.protected(state)}{self.frame.between}"], parts, images)

    def _head(self, system: str | None, images: Sequence[ImageRecord]) -> str:
        """Return the text before a state behind another system message, and images."""
        frame = Frame.of(self.template, self.protected(system) if system else self.system, images=len(images))
        if frame[1:] != self.frame[1:]:
            other = "images: use that of a model that sees" if images else "such instructions: put them into the state"
            raise ValueError(f"the chat template ends otherwise behind {other}")
        if not images:
            return frame.head
        assert self.images is not None
        ((head, _),) = self.images.expand([(frame.head, False)], [image.grid for image in images])
        return head

    def _check(self, question: Question) -> None:
        self.labels.check(question)
        names = [option.name.strip() for option in question.options]
        check_options(question, self.pieces([names])[0])

    def _part_text(self, question: Question, gold: list[float]) -> PartText:
        text = question_parts(question, self.labels.names[question.type])
        lines = [piece for label, line in text.lines for piece in (label, self.protected(line))]
        end = f"{text.end}{self.frame.tail}"
        return PartText(
            pieces=[self.protected(text.intro), *lines, end], kind=question.number, gold=gold, lines=len(text.lines)
        )
