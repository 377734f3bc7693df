"""Thinking in the text of an answer, apart from what it says: between tags, or in GPT-OSS's channels."""

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.text.stream import CHANNEL, TAGS, Tags, added_tokens, cut

_MESSAGE = re.compile(
    r"<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.DOTALL,
)
_SAID = "<|message|>"


class Thought(Enum):
    """State in which an answer begins."""

    NONE = "without thinking"
    BEGUN = "inside of thinking, which the prompt has begun"
    POSSIBLE = "with thinking, if the model chooses to"


def thought_after(prompt: str) -> Thought:
    """Return the state in which the answer to a prompt begins; the prompt's end is enough."""
    text = prompt.rstrip()
    if text.endswith(tuple(tags.begin.rstrip() for tags in TAGS)):
        return Thought.BEGUN
    over = text.endswith((_SAID, *(tags.end for tags in TAGS)))
    return Thought.NONE if over else Thought.POSSIBLE


def thought_inside(text: str) -> Thought:
    """Return the state in which an answer goes on that begins with a text."""
    opened = any(text.rfind(tags.begin.rstrip()) > text.rfind(tags.end) for tags in TAGS)
    return Thought.BEGUN if opened else Thought.NONE


def tags_of(tokenizer: PreTrainedTokenizerBase) -> Tags | None:
    """Return the tags of a model that thinks between some: its vocabulary has them, or its chat template."""
    added, template = added_tokens(tokenizer).all, str(tokenizer.chat_template)
    return next((tags for tags in TAGS if tags.end in added or tags.end in template), None)


def split_thinking(
    text: str, *, tags: Tags | None = None, opened: bool, channels: bool, grows: bool = False
) -> tuple[str, str]:
    """Return an answer's thought and its text; while it grows, the certain part of each.

    Args:
        text: the answer without its tool calls.
        tags: around thinking, as of `tags_of`; by default `<think>` and its end.
        opened: it begins inside of tags, which the prompt has opened.
        channels: the model writes messages in channels.
        grows: more text may follow.
    """
    if channels and (CHANNEL in text or (grows and not text.strip())):
        return _by_channels(text)
    begin, end = tags or TAGS[0]
    start = text.lstrip()
    if grows and begin.startswith(start):
        return "", ""
    if not opened and not start.startswith(begin):
        return "", text
    thought, ended, said = start.removeprefix(begin).partition(end)
    if grows and not ended:
        thought = cut(thought, (end,))[0]
    return thought.strip(), said.lstrip()


def said(pieces: Iterable[str], tokenizer: PreTrainedTokenizerBase, thinks: Thought) -> Iterator[str]:
    """Yield what an answer in pieces says after its thinking; all of it if it does not think."""
    if thinks == Thought.NONE:
        yield from pieces
        return
    settings: dict[str, Any] = {"tags": tags_of(tokenizer), "opened": thinks == Thought.BEGUN}
    settings["channels"] = CHANNEL in added_tokens(tokenizer).all
    text, shown = "", 0
    for piece in pieces:
        text += piece
        new = split_thinking(text, **settings, grows=True)[1][shown:]
        shown += len(new)
        yield new
    yield split_thinking(text, **settings)[1][shown:]


def _by_channels(text: str) -> tuple[str, str]:
    messages = _MESSAGE.findall(text)
    thought = [body for channel, body in messages if channel.startswith("analysis")]
    said = [body for channel, body in messages if not channel.startswith("analysis")]
    return "\n".join(thought), "\n".join(said)
