"""Chat templates: a conversation as text, and which characters of it the assistant wrote."""

import json
import re
from collections.abc import Sequence
from datetime import date
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, Any]]
Tools = list[Any] | None
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = date(2024, 7, 26)
_DATE = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
"""What templates that print today's date get (Llama 3.1's own default): the data must not change overnight."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        ValueError: the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            hint = "name one with --chat-template, or use a tokenizer of a chat model"
            raise ValueError(f"the tokenizer has no chat template, and the data are chats: {hint}")
        self._tokenizer = tokenizer
        self._specials = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._context: dict[str, Any] = dict(tokenizer.special_tokens_map)

    def render(self, messages: Messages, tools: Tools = None) -> str:
        """The whole conversation as text."""
        return self._render(messages, tools)[0]

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """The conversation up to where the assistant's answer begins."""
        return self._render(messages, tools, add_generation_prompt=True)[0]

    def render_with_spans(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """The conversation, and the character ranges that the assistant generates, end of turn included.

        From the template's `{% generation %}` markers where it has them; otherwise a turn begins where the messages
        before it, rendered with the generation prompt, end. Where earlier turns change once there are later ones, such
        as those that lose their thinking, it is what stands between the generation prompt and an end-of-turn token.

        Raises:
            ValueError: no assistant turn, or a template without markers that tells turns apart in neither way.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no assistant turn, so nothing to train on: remove the row or use --loss-on all")
        if _GENERATION.search(self._source(tools)):
            return self._render(messages, tools, return_assistant_tokens_mask=True)
        text = self.render(messages, tools)
        try:
            return text, self._derive_spans(messages, tools, text)
        except _UnstableTemplateError:
            if (spans := self._spans_between_tokens(messages, tools, text)) is None:
                raise
            return text, spans

    def _source(self, tools: Tools) -> str:
        """The template with every date that it asks for written in, as what it renders must not change overnight."""
        source = self._tokenizer.get_chat_template(tools=tools)
        return _DATE.sub(lambda call: repr(_TODAY.strftime(call["format"])), source)

    def _render(self, messages: Messages, tools: Tools, **options: Any) -> tuple[str, list[Span]]:
        try:
            options = {"chat_template": self._source(tools), **options, **self._context}
            rendered: Any = render_jinja_template([messages], tools, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        (text,), spans = rendered
        return text, spans[0] if spans else []

    def _derive_spans(self, messages: Messages, tools: Tools, text: str) -> list[Span]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._turn_start(messages, i, tools, text) for i in turns]
        limits = [*starts[1:], len(text)]
        ends = [
            self._turn_end(messages[: i + 1], tools, text[:limit], start)
            if i + 1 < len(messages)
            else self._end_of_turn(text, start)
            for i, start, limit in zip(turns, starts, limits, strict=True)
        ]
        return list(zip(starts, ends, strict=True))

    def _turn_start(self, messages: Messages, turn: int, tools: Tools, text: str) -> int:
        prompt = self._prompt(messages, turn, tools)
        if not text.startswith(prompt):
            raise _UnstableTemplateError(turn)
        return len(prompt)

    def _prompt(self, messages: Messages, turn: int, tools: Tools) -> str:
        """What the model is given to generate this message."""
        if turn:
            return self.render_prompt(messages[:turn], tools)
        # Templates look at the first message, so there has to be one: keep what they add after it.
        return self.render_prompt(messages[:1], tools).removeprefix(self.render(messages[:1], tools))

    def _turn_end(self, upto: Messages, tools: Tools, text: str, start: int) -> int:
        """End of the last turn of `upto` in `text`, which goes on to at most the next assistant turn."""
        alone = self.render(upto, tools)
        if text.startswith(alone):
            return self._end_of_turn(alone, start)
        if (end := self._end_of_changed_turn(alone.rstrip(), upto, tools, text, start)) is None:
            raise _UnstableTemplateError(len(upto) - 1)
        return end

    def _end_of_changed_turn(self, alone: str, upto: Messages, tools: Tools, text: str, start: int) -> int | None:
        """The end in `text` of a turn that reads otherwise when it is the last, as in `alone`; None if unclear."""
        marker = self._closing_token(alone)
        if marker is None:
            return None
        body = alone.removesuffix(marker)
        if text.startswith(body):  # GPT-OSS ends the last turn with another token
            return next((len(body) + len(token) for token in self._specials if text.startswith(token, len(body))), None)
        # Qwen3 and GPT-OSS show the thinking of the last turn only. Other turns end like it, or like those of the user.
        before = self._closing_token(self.render(upto[:-1], tools).rstrip()) if len(upto) > 1 else None
        markers = {marker, before or marker}
        if any(m in json.dumps(upto[-1], ensure_ascii=False) for m in markers):
            return None
        return min((text.index(m, start) + len(m) for m in markers if m in text[start:]), default=None)

    def _spans_between_tokens(self, messages: Messages, tools: Tools, text: str) -> list[Span] | None:
        """From the generation prompt to a token that ends messages; None where that does not give every turn."""
        header = self._prompt(messages, 0, tools)
        prefixes = (self.render(messages[:count], tools).rstrip() for count in range(1, len(messages) + 1))
        ends = {token for prefix in prefixes if (token := self._closing_token(prefix))}
        said = json.dumps(messages, ensure_ascii=False)
        if not header.startswith(tuple(self._specials)) or any(token in said for token in self._specials):
            return None
        spans: list[Span] = []
        for found in re.finditer(f"{re.escape(header)}.*?({'|'.join(map(re.escape, ends))})", text, re.DOTALL):
            if spans and spans[-1][1] == found.start():  # another message of the same turn
                spans[-1] = spans[-1][0], found.end()
            else:
                spans.append((found.start() + len(header), found.end()))
        turns = sum(message["role"] == "assistant" for message in messages)
        return spans if len(spans) == turns else None

    def _end_of_turn(self, text: str, start: int) -> int:
        """The end of `text` less the white space after an end-of-turn token, which nobody generates."""
        stripped = text.rstrip()
        return len(stripped) if len(stripped) > start and self._closing_token(stripped) else len(text)

    def _closing_token(self, text: str) -> str | None:
        return next((token for token in self._specials if text.endswith(token)), None)


class _UnstableTemplateError(ValueError):
    """Turns cannot be told from the renderings of the messages before them."""

    def __init__(self, turn: int):
        super().__init__(
            f"the chat template is not prefix-stable at message {turn + 1}: the conversation does not begin with the "
            "rendering of its first messages, so the assistant's tokens cannot be told; use --loss-on all, or "
            "--chat-template with a template that has {% generation %} markers"
        )


def split_at(text: str, spans: Sequence[Span]) -> list[tuple[str, bool]]:
    """`text` cut at the ends of the spans: pieces, and whether each is inside a span."""
    pieces, end = [], 0
    for start, stop in spans:
        pieces += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    pieces.append((text[end:], False))
    return [(piece, trained) for piece, trained in pieces if piece]
