"""Prompts and conversations to answer: read from flags and files, and tokenized as in training."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.formats import read_row, refuse_media
from jaxglue.data.limits import template_time_limit
from jaxglue.data.messages import Chat, Messages
from jaxglue.data.template import ChatTemplate
from jaxglue.data.template_check import TemplateCheck
from jaxglue.data.tokenizer import encode_beginning, require_unicode
from jaxglue.files.json_file import parse_json
from jaxglue.files.regular_file import read_regular_text
from jaxglue.generation.config import STDIN, GenerateConfig

Row = dict[str, Any]


def read_prompts(config: GenerateConfig) -> list[Row]:
    """Return the rows to answer, each with `prompt` or `messages`.

    Raises:
        ValueError: a malformed line, or a file without prompts.
    """
    rows: list[Row] = [{"prompt": prompt} for prompt in config.prompt]
    if config.prompt_file is None:
        return rows
    lines = [(number, line) for number, line in enumerate(_read(config.prompt_file).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{config.prompt_file}: no prompts: expected one a line")
    if config.prompt_file.suffix != ".jsonl":
        return rows + [{"prompt": line} for _, line in lines]
    return rows + [_parse_row(line, f"{config.prompt_file}:{number}") for number, line in lines]


def _read(path: Path) -> str:
    try:
        if path != STDIN:
            return read_regular_text(path)
        return sys.stdin.read().removeprefix("\ufeff").replace("\r\n", "\n")  # as of a file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start + 1}: save the prompts as UTF-8") from error


def _parse_row(line: str, origin: str) -> Row:
    row = parse_json(line, origin)
    given = {"prompt", "messages"} & row.keys() if isinstance(row, dict) else set()
    if len(given) != 1 or not isinstance(row[key := given.pop()], str if key == "prompt" else list):
        raise ValueError(f"{origin}: expected an object with a text `prompt` or a list `messages`")
    return row


def prompt_of(row: Row) -> Any:
    """Return the prompt or the content of the last message of a row."""
    return row["prompt"] if "prompt" in row else row["messages"][-1].get("content", "")


def encode_rows(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], config: GenerateConfig) -> list[list[int]]:
    """Return the tokens that precede the answer to each row.

    Raises:
        ValueError: as `encode_prompt`; or messages that training would refuse, with the row's number.
    """
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(_encode_row(tokenizer, row, config))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return found


def _encode_row(tokenizer: PreTrainedTokenizerBase, row: Row, config: GenerateConfig) -> list[int]:
    if "messages" not in row:
        refuse_media(row)
        return encode_prompt(tokenizer, row["prompt"], system=config.system, raw=config.raw)
    chat = read_row(row, "messages")
    assert isinstance(chat, Chat)
    chat = chat if config.system is None else chat.with_system(config.system)
    template, text = render_messages(tokenizer, chat, check=True)
    return template.encode(text)


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the tokens that precede the answer to a conversation, as in training: special tokens in it are text.

    Raises:
        ValueError: a missing chat template, one that refuses the conversation, or text that is no Unicode.
    """
    template, text = render_messages(tokenizer, Chat(messages, None, []))
    return template.encode(text)


def render_messages(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, *, check: bool = False, variables: Mapping[str, Any] | None = None
) -> tuple[ChatTemplate, str]:
    """Return the template, and the text before the answer to a conversation, which it encodes.

    Args:
        tokenizer: of the model.
        chat: the conversation.
        check: refuse what training refuses.
        variables: further ones for the template, such as `enable_thinking`.

    Raises:
        ValueError: as `encode_messages`.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: use --raw to continue the text verbatim")
    template = ChatTemplate(tokenizer)
    with template_time_limit():
        messages, tools = template.protect(chat.messages, chat.tools)
        text = template.render_prompt(messages, tools, variables)
        if check:
            TemplateCheck(template)(messages, tools, text)
    require_unicode(text)
    return template, text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Return the tokens that precede an answer, as in training.

    Args:
        tokenizer: of the model, with a chat template unless `raw`.
        prompt: the user's message.
        system: the system message before it.
        raw: encode the text verbatim, with the tokenizer's special prefix.

    Raises:
        ValueError: a missing chat template, one that refuses the conversation, or text that is no Unicode.
    """
    if raw:
        require_unicode(prompt)
        return encode_beginning(tokenizer, prompt)
    return encode_messages(tokenizer, [*system_message(system), {"role": "user", "content": prompt}])


def system_message(text: str | None) -> list[dict[str, str]]:
    """Return the messages that begin a conversation: the system's, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]
