"""Typed questions about a state, their gold answers, and the labels by which a model answers each in one token."""

import json
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.messages import listed, number_of
from jaxglue.data.pieces import PieceTokenizer
from jaxglue.files.json_file import parse_json

YES_NO, CHOICE, SCORE = "noul", "choice", "score"
TYPES = (YES_NO, CHOICE, SCORE)
"""Types of questions under System One's names, in the order of their numbers."""
MOST_OPTIONS, MOST_LEVELS = 255, 10
_YES = {"true": 0, "yes": 0, "false": 1, "no": 1}
"""Options of a yes-or-no question by the words for them."""
_LEAST_SUM = 1e-3
"""Difference from 1 of probabilities' sum above which they are refused."""
_TEXT_LABEL = " "
"""Text between a prompt without chat template and a label."""


class Option(NamedTuple):
    """An answer to choose."""

    name: str
    description: str | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a state; options of a score are its levels, low first, and of yes or no these two."""

    type: str
    instructions: str
    options: tuple[Option, ...]

    @property
    def number(self) -> int:
        """Return the type's number."""
        return TYPES.index(self.type)


def read_state(value: Any) -> str:
    """Return a state's text: a string as it is, other values as JSON.

    Raises:
        ValueError: none, or an empty one.
    """
    text = value.strip() if isinstance(value, str) else "" if value is None else _json(value)
    if not text or value in ({}, []):
        raise ValueError("'state' is missing or empty")
    return text


def read_questions(value: Any, *, most: int | None = None) -> dict[str, Question]:
    """Read System One's questions: a map from ids to `type`, `instructions` and `criteria`, or its JSON.

    Raises:
        ValueError: no question, or a bad one, by its id.
    """
    value = parse_json(value, "questions") if isinstance(value, str) else value
    value = {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("'questions' must be an object of at least one question by its id")
    if most is not None and len(value) > most:
        raise ValueError(f"'questions' has {len(value)} questions, and a request may have {most}")
    return {name: read_question(name, each) for name, each in value.items()}


def read_question(name: str, value: Any) -> Question:
    """Read a question of System One's form.

    Raises:
        ValueError: names the question.
    """
    try:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected an object with a type, got {type(value).__name__}")
        if unknown := sorted({*value} - {"type", "instructions", "criteria"}):
            raise ValueError(f"unknown field {unknown[0]!r}: a question has type, instructions and criteria")
        if value.get("type") not in TYPES:
            raise ValueError(f"type {value.get('type')!r:.80} is none of {', '.join(TYPES)}")
        criteria = value.get("criteria")
        criteria = parse_json(criteria, "criteria") if isinstance(criteria, str) else criteria
        return make_question(value["type"], _text(value.get("instructions")), criteria)
    except ValueError as error:
        raise ValueError(f"question {name!r}: {error}") from error


def make_question(type: str, instructions: str, criteria: Any) -> Question:
    """Return a question of these criteria: {true, false} or none, a map of options, or a list of levels.

    Raises:
        ValueError: criteria that do not fit the type, or too few or many of them.
    """
    if type == YES_NO:
        if criteria is not None and (not isinstance(criteria, Mapping) or {*criteria} - {"true", "false"}):
            raise ValueError("criteria of a yes-or-no question are an object with true and false, or none")
        described = criteria or {}
        options = [Option(name, _description(described.get(name))) for name in ("true", "false")]
    elif type == CHOICE:
        if not isinstance(criteria, Mapping):
            raise ValueError("criteria of a choice are an object of options with their descriptions, or null for none")
        options = [Option(str(name), _description(text)) for name, text in criteria.items()]
    else:
        if not isinstance(criteria, Sequence) or isinstance(criteria, str):
            raise ValueError("criteria of a score are a list of levels, the lowest first")
        options = [Option(_text(level)) for level in criteria]
    least, most = 2, MOST_LEVELS if type == SCORE else MOST_OPTIONS
    if not least <= len(options) <= most:
        raise ValueError(f"{len(options)} {'levels' if type == SCORE else 'options'}, expected {least} to {most}")
    if type != YES_NO and not all(option.name.strip() for option in options):
        raise ValueError("an option without a name")
    return Question(type=type, instructions=instructions, options=tuple(options))


def read_gold(name: str, question: Question, value: Any) -> list[float]:
    """Return the gold probabilities of a question's options, from `probabilities`, `noul` or `label`.

    Raises:
        ValueError: none, one of another question, or probabilities that are none; names the question.
    """
    try:
        return _read_gold(question, value)
    except ValueError as error:
        raise ValueError(f"question {name!r}: {error}") from error


def _read_gold(question: Question, value: Any) -> list[float]:
    if isinstance(value, Mapping):
        given = {key: each for key, each in value.items() if each is not None}
        probabilities, noul, label = (given.get(key) for key in ("probabilities", "noul", "label"))
    else:
        probabilities, noul, label = None, None, value
    count = len(question.options)
    if isinstance(probabilities, str):
        probabilities = parse_json(probabilities, "probabilities")
    if probabilities is not None:
        if not isinstance(probabilities, Mapping):
            raise ValueError("'probabilities' of a gold answer must be an object of numbers by option")
        found = [0.0] * count
        for option, probability in probabilities.items():
            found[_option(question, option)] += _probability(probability)
        if abs(sum(found) - 1) > _LEAST_SUM:
            raise ValueError(f"its gold probabilities have the sum {sum(found):.6g}, expected 1")
        return [each / sum(found) for each in found]
    if noul is not None:
        if question.type != YES_NO:
            raise ValueError(f"'noul' is the gold of a yes-or-no question, and this is a {question.type}")
        return [(p := _probability(noul)), 1 - p]
    if label is None:
        raise ValueError("no gold answer: give 'label', 'probabilities' or 'noul', or take the question out")
    found = [0.0] * count
    found[_option(question, label)] = 1.0
    return found


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r:.80} is no probability, expected 0 to 1")
    return float(value)


def _option(question: Question, value: Any) -> int:
    """Return the index of an option by its name, or of a level by its number."""
    names, hint = [option.name for option in question.options], ""
    if question.type == YES_NO:
        if (found := _YES.get(str(value).strip().lower())) is not None:
            return found
    elif str(value) in names:
        return names.index(str(value))
    elif question.type == SCORE and not isinstance(value, bool) and not math.isnan(number := number_of(value)):
        numbers = [number_of(name) for name in names]
        if number in numbers:
            return numbers.index(number)
        if any(level != index for index, level in enumerate(numbers) if not math.isnan(level)):
            hint = "; where names of levels are numbers, gold is such a name, not a number from 0"
        elif number in range(len(names)):
            return int(number)
    raise ValueError(f"gold {value!r:.80} is none of its options: {listed(names)}{hint}")


def _text(value: Any) -> str:
    """Return a text, from a string or JSON."""
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else _json(value)


def _description(value: Any) -> str | None:
    return None if value is None else _text(value) or None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Parts(NamedTuple):
    """The text of a question in parts: what precedes options, (label, text) of each option's line, and the end."""

    intro: str
    lines: list[tuple[str, str]]
    end: str


def question_parts(question: Question, names: Sequence[str]) -> Parts:
    """Return a question's text, whose options have these labels: that of vLLM's reader of decisions."""
    intro = f"Question: {question.instructions}\n" if question.instructions else ""
    if question.type == YES_NO:
        described = zip(names, question.options, strict=True)
        means = "".join(f"{word}: {option.description}\n" for word, option in described if option.description)
        return Parts(intro + means, [], question_end(question.type, names))
    lines = [(f"{label}:", f" {_line(option)}\n") for label, option in zip(names, question.options, strict=False)]
    return Parts(intro, lines, question_end(question.type, names))


def question_end(type: str, names: Sequence[str]) -> str:
    """Return the last sentence of a question of a type."""
    if type == YES_NO:
        return f"Answer with {' or '.join(names)} only."
    what = "letter of one option" if type == CHOICE else "number of one level"
    return f"Answer with the {what} only."


def _line(option: Option) -> str:
    return option.name if option.description is None else f"{option.name} - {option.description}"


@dataclass(frozen=True)
class Labels:
    """Tokens that answer questions, of one tokenizer."""

    names: Mapping[str, tuple[str, ...]]
    """Labels of options by type, in order."""
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    """Tokens of each option by type: several where words differ in their case alone."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, end: str, *, has_template: bool) -> "Labels":
        """Return the labels of a tokenizer, each one token behind a prompt that ends in `end`.

        Raises:
            ValueError: yes and no, or letters and digits, are no tokens of their own.
        """
        encode = PieceTokenizer(tokenizer.backend_tokenizer).encode
        before = "" if has_template else _TEXT_LABEL

        def token(label: str) -> int | None:
            found = encode([end, before + label])[1] if end else encode([before + label])[0]
            return found[0] if len(found) == 1 else None

        letters = [*string.ascii_uppercase, *map("".join, product(string.ascii_uppercase, repeat=2))]
        choices = [(name, found) for name in letters if (found := token(name)) is not None][:MOST_OPTIONS]
        levels = [(name, found) for name in string.digits if (found := token(name)) is not None]
        spelled = [[[found for form in (word, word.title()) if (found := token(form)) is not None] for word in pair]
                   for pair in _WORDS]  # fmt: skip
        words = next((index for index, groups in enumerate(spelled) if all(groups)), None)
        if len(choices) < 2 or words is None:
            raise ValueError("the tokenizer splits the letters that answer a question: use that of a larger vocabulary")
        names = {
            YES_NO: _WORDS[words],
            CHOICE: tuple(name for name, _ in choices),
            SCORE: tuple(name for name, _ in levels),
        }
        single = {kind: tuple((found,) for _, found in pairs) for kind, pairs in ((CHOICE, choices), (SCORE, levels))}
        return cls(names, {YES_NO: tuple(tuple(dict.fromkeys(group)) for group in spelled[words]), **single})

    @cached_property
    def tokens(self) -> list[int]:
        """Return all labels' tokens; those of choices last, so that fewer can be read."""
        return [token for kind in (YES_NO, SCORE, CHOICE) for group in self.groups[kind] for token in group]

    def as_rows(self, most: int) -> "Labels":
        """Return the labels as rows of a head: one for each option, of choices of so many at most."""
        first, groups = 0, dict[str, tuple[tuple[int, ...], ...]]()
        for kind in (YES_NO, SCORE, CHOICE):
            count = min(len(self.groups[kind]), most)
            groups[kind] = tuple((first + row,) for row in range(count))
            first += count
        return Labels(self.names, groups)

    def check(self, question: Question) -> None:
        """Raise ValueError for a question of more options than there are labels."""
        if len(question.options) > (most := len(self.groups[question.type])):
            what = "levels" if question.type == SCORE else "options"
            raise ValueError(f"{len(question.options)} {what}, and there are labels for {most}")

    def owners(self, type: str, options: int, width: int) -> Int[np.ndarray, "width"]:
        """Return the option that each of the first `width` tokens stands for; −1 for none."""
        found, at = np.full(max(width, len(self.tokens)), -1, np.int32), 0
        for kind in (YES_NO, SCORE, CHOICE):
            for option, group in enumerate(self.groups[kind]):
                if kind == type and option < options:
                    found[at : at + len(group)] = option
                at += len(group)
        return found[:width]

    def width(self, options: int) -> int:
        """Return the tokens among which are those of choices of so many options."""
        others = sum(len(group) for kind in (YES_NO, SCORE) for group in self.groups[kind])
        return others + min(max(options, len(string.ascii_uppercase)), len(self.groups[CHOICE]))


_WORDS = (("yes", "no"), ("Y", "N"))
"""Answers to a yes-or-no question: letters where a tokenizer splits the words."""


def check_options(question: Question, encoded: Iterable[bytes]) -> None:
    """Raise ValueError for two options that have the same tokens."""
    seen: dict[bytes, int] = {}
    for index, tokens in enumerate(encoded):
        if (earlier := seen.setdefault(tokens, index)) != index:
            names = question.options[earlier].name, question.options[index].name
            raise ValueError(f"its options {names[0]!r} and {names[1]!r} have the same tokens: rename one of them")


def expected_level(probabilities: Sequence[float]) -> float:
    """Return the mean level of a score's probabilities, from 0."""
    return math.fsum(level * p for level, p in enumerate(probabilities))
