"""Thinking in the text of an answer, apart from what it says: in `<think>` tags, or in GPT-OSS's channels."""

import re

from jaxglue.generation.chat import CHANNEL, cut
from jaxglue.generation.grammar import END

BEGIN = "<think>"
_MESSAGE = re.compile(
    r"<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.DOTALL,
)


def split_thinking(text: str, *, opened: bool, channels: bool, grows: bool = False) -> tuple[str, str]:
    """Return what an answer thinks and what it says; of a text that grows, what is certain of both.

    Args:
        text: the answer without its tool calls.
        opened: it begins inside of tags, which the prompt has opened.
        channels: the model writes messages in channels.
        grows: more text may follow.
    """
    if channels and (CHANNEL in text or (grows and not text.strip())):
        return _by_channels(text)
    begin = text.lstrip()
    if grows and BEGIN.startswith(begin):
        return "", ""
    if not opened and not begin.startswith(BEGIN):
        return "", text
    thought, end, said = begin.removeprefix(BEGIN).partition(END)
    if grows and not end:
        thought = cut(thought, (END,))[0]
    return thought.strip(), said.lstrip()


def _by_channels(text: str) -> tuple[str, str]:
    messages = _MESSAGE.findall(text)
    thought = [body for channel, body in messages if channel.startswith("analysis")]
    said = [body for channel, body in messages if not channel.startswith("analysis")]
    return "\n".join(thought), "\n".join(said)
