"""Chats as consecutive pieces of text, trained on or not."""

from collections.abc import Iterator, Sequence

from jaxglue.data.messages import Chat, Messages, Tools
from jaxglue.data.template import ChatTemplate, Span, plain_pieces, split_at
from jaxglue.data.template_check import TemplateCheck


class ChatSplitter:
    """Splitter of chats where their loss mask changes, and inside special tokens that are text."""

    def __init__(self, template: ChatTemplate, loss_on: str):
        self._template, self._all = template, loss_on == "all"
        self._check = TemplateCheck(template)

    def __call__(self, chat: Chat) -> Iterator[tuple[str, bool]]:
        """Yield (text, trained) pieces, to be tokenized one by one.

        Raises:
            ValueError: an unknown role, a message that the template leaves out, or turns that cannot be told apart.
        """
        messages, tools = self._template.protect(chat.messages, chat.tools)
        split = self._split_whole if self._all else self._split_turns
        pieces = split(messages, tools, chat.trained)
        self._check(messages, tools, "".join(piece for piece, _ in pieces))
        return ((part, trained) for piece, trained in pieces for part in plain_pieces(piece))

    def _split_turns(self, messages: Messages, tools: Tools, trained: Sequence[bool | None]) -> list[tuple[str, bool]]:
        return split_at(*self._trained_spans(messages, tools, trained))

    def _trained_spans(
        self, messages: Messages, tools: Tools, trained: Sequence[bool | None]
    ) -> tuple[str, list[Span]]:
        """Render a chat; return its text and the spans of the assistant's turns that are trained on."""
        turns = [flag for message, flag in zip(messages, trained, strict=True) if message["role"] == "assistant"]
        if any(flag for message, flag in zip(messages, trained, strict=True) if message["role"] != "assistant"):
            raise ValueError("only an assistant's message can have a weight ('weight' or 'train') of its own")
        text, spans = self._template.render_with_spans(messages, tools)
        if False not in turns:
            return text, spans
        if len(spans) != len(turns):
            raise ValueError(
                f"the chat template marks {len(spans)} spans for {len(turns)} assistant messages, so their weights "
                "cannot be assigned"
            )
        return text, [span for span, flag in zip(spans, turns, strict=True) if flag is not False]

    def _split_whole(self, messages: Messages, tools: Tools, trained: Sequence[bool | None]) -> list[tuple[str, bool]]:
        """Split a chat of which every token is trained on but those of assistant messages with weight 0."""
        if False not in trained:
            return [(self._template.render(messages, tools), True)]
        text, spans = self._trained_spans(messages, tools, [flag is False for flag in trained])
        return [(piece, not inside) for piece, inside in split_at(text, spans)]
