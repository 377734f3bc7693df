"""The tokens of conversations: turns as messages, and what the chat template writes between them."""

import json
import logging
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.images import IMAGE_TAG, ImageRules
from jaxglue.data.template import ChatTemplate, trained_stops
from jaxglue.text.tool_calls import format_of, parameters_of, schemas_of, split_calls
from jaxglue.text.tool_formats import BareCalls
from jaxglue.vision.processor import Grid

Messages = list[dict[str, Any]]
_TURN = "■"
"""Stands for the text of a turn, and is in no template: a letter might be in the token that ends the turn."""
_log = logging.getLogger(__name__)


class _AnyTool(dict[str, dict[str, Any]]):
    """Tools, of which there is one of any name: an environment says that it knows none."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


class ConversationTemplate:
    """Conversations as a tokenizer's chat template writes them; one thread renders at a time.

    Args:
        tokenizer: of the model, with a chat template.
        rules: for images; None where there are none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: ImageRules | None = None):
        self.rules = rules
        self._template, self._tokenizer = ChatTemplate(tokenizer), tokenizer
        self._form = format_of(str(tokenizer.get_chat_template(tools=[])))
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in trained_stops(tokenizer)]
        self._lock, self._refused = Lock(), False

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, messages: Messages, tools: list[Any] | None, grids: Sequence[Grid] = ()) -> list[int]:
        """Return the tokens of a conversation, with images of these patches, up to the model's next turn.

        Raises:
            ValueError: the template refuses it.
        """
        with self._lock:
            return self._encode(self._template.render_prompt(*self._template.protect(messages, tools)), grids)

    def _encode(self, text: str, grids: Sequence[Grid]) -> list[int]:
        """Return the tokens of a rendering with images of these patches."""
        if not grids:
            return self._template.encode(text)
        assert self.rules is not None
        return self.rules.encode(self._template, text, grids)[0]

    def message(
        self, tokens: Sequence[int], tools: list[Any] | None, turn: int, *, ended: bool, any_tool: bool = False
    ) -> dict[str, Any]:
        """Return a turn of the model as a message, with its calls of tools; these stand between special tokens.

        Args:
            tokens: of the turn.
            tools: that may be called.
            turn: its number in the conversation.
            ended: the last token ended it.
            any_tool: read calls of unknown tools, too, where the format marks calls.
        """
        plain = {"role": "assistant", "content": self.text(tokens)}
        if not tools:
            return plain
        text = str(self._tokenizer.decode(list(tokens[: -1 if ended else None])))
        functions = parameters_of(schemas_of(tools))
        if any_tool and not isinstance(self._form, BareCalls):
            functions = _AnyTool(functions)
        rest, calls = split_calls(text, functions, self._form)
        if not calls:
            return plain
        for token in self._tokenizer.all_special_tokens:
            rest = rest.replace(token, "")
        listed = [
            # nine digits, which Mistral's templates ask for
            {"id": f"{turn:04}{number:05}", "type": "function"}
            | {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for number, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": rest.strip(), "tool_calls": listed}

    def between(
        self,
        prompt: Messages,
        said: Messages,
        replies: Messages,
        tools: list[Any] | None,
        last: int,
        where: str,
        grids: Sequence[Grid] = (),
    ) -> list[int] | None:
        """Return the tokens from the end of the model's turn to the start of its next.

        The turn's own tokens stay as they were sampled: a sign stands for its text in the template. None where the
        template refuses the model's tool calls, such as several at a time.

        Args:
            prompt: messages before the model's first turn.
            said: those since, of which the last is the model's.
            replies: to it.
            tools: that may be called.
            last: token of the turn.
            where: names the conversation in errors.
            grids: patches of the images of the replies.

        Raises:
            ValueError: the template refuses the replies, or leaves out the model's turn.
        """
        sign, replied = _TURN, json.dumps(replies, ensure_ascii=False)
        while sign in replied:
            sign += _TURN
        turns = [_signed(m, sign) if m["role"] == "assistant" else m for m in said]
        calls = bool(said[-1].get("tool_calls"))
        with self._lock:
            try:
                messages = self._template.protect([*prompt, *turns, *replies], tools)
                rendered = self._template.render_prompt(*messages)
            except ValueError as error:
                if not calls:
                    raise ValueError(f"--environment, {where}: {error}") from error
                if not self._refused:
                    self._refused = True
                    _log.warning("%s: %s; such conversations end at this turn", where, error)
                return None
            if sign not in rendered:
                raise ValueError(f"--environment, {where}: the chat template leaves out the model's turn")
            try:
                return self._after(rendered[rendered.rindex(sign) + len(sign) :], last, grids, calls=calls)
            except ValueError as error:
                raise ValueError(f"--environment, {where}: {error}") from error

    def _after(self, rest: str, last: int, grids: Sequence[Grid], *, calls: bool) -> list[int] | None:
        """Return the tokens of a rendering behind a turn that ended with this token."""
        if not calls:
            tokens = self._encode(rest, grids)
            return tokens[1:] if tokens[0] == last else tokens
        end = str(self._tokenizer.convert_ids_to_tokens(last))
        if end in rest:
            return self._encode(rest.partition(end)[2], grids)
        ends = [place for end in self._ends if (place := rest.find(end)) >= 0]
        return self._encode(rest[min(ends) :], grids) if ends else None


def conversation_text(said: Messages, written: Sequence[str]) -> str:
    """Return a conversation as a text, the model's turns as they were written."""
    if len(said) == 1 and len(written) == 1:
        return written[0]
    turns = iter(written)
    lines = [(m["role"], next(turns) if m["role"] == "assistant" else _spoken(m["content"])) for m in said]
    return "\n".join(f"{role}: {text}" for role, text in lines)


def _spoken(content: str | list[dict[str, Any]]) -> str:
    """Return a content as a text, with tags for its images."""
    return content if isinstance(content, str) else "".join(part.get("text", IMAGE_TAG) for part in content)


def _signed(message: dict[str, Any], sign: str) -> dict[str, Any]:
    """Put a sign in place of the text of a turn, or of the arguments of its last tool call."""
    if not (calls := message.get("tool_calls")):
        return message | {"content": sign}
    last = calls[-1] | {"function": calls[-1]["function"] | {"arguments": {sign: sign}}}
    return message | {"content": "", "tool_calls": [*calls[:-1], last]}


def named_results(replies: Messages, calls: Sequence[Mapping[str, Any]]) -> Messages:
    """Give results of tools the names and numbers of the calls in their order, where they say none."""
    known = iter(calls)
    named = []
    for reply in replies:
        call = next(known, None) if reply["role"] == "tool" else None
        own = {} if call is None else {"name": call["function"]["name"], "tool_call_id": call["id"]}
        named.append(own | reply)
    return named
