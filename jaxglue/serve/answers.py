"""Answers to the prompts of flags and files, row by row."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxglue.data.formats import row_media, with_system
from jaxglue.data.messages import Chat, read_chat
from jaxglue.files.json_file import parse_json, read_json
from jaxglue.files.regular_file import read_regular_text
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.grammar import Grammar
from jaxglue.generation.prompts import encode_prompt
from jaxglue.generation.scheduler import Request
from jaxglue.generation.sight import Prompt
from jaxglue.serve.config import STDIN, GenerateConfig
from jaxglue.text.thinking import Thought, said, thought_after

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
    keys = {"prompt", "messages"} & row.keys() if isinstance(row, dict) else set()
    if len(keys) != 1 or not isinstance(row[key := keys.pop()], str if key == "prompt" else list):
        raise ValueError(f"{origin}: expected an object with a text `prompt` or a list `messages`")
    return row


def prompt_of(row: Row) -> Any:
    """Return the prompt or the content of the last message of a row."""
    return row["prompt"] if "prompt" in row else row["messages"][-1].get("content", "")


def encode_rows(assistant: Assistant, rows: Sequence[Row], config: GenerateConfig) -> list[Prompt]:
    """Return the prompt of each row.

    Raises:
        ValueError: as `encode_prompt`; or messages that training would refuse, with the row's number.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            prompts.append(_encode_row(assistant, row, config))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    return prompts


def _encode_row(assistant: Assistant, row: Row, config: GenerateConfig) -> Prompt:
    media = [*config.image, *row_media(row)]
    if "messages" not in row and not media:
        return Prompt(encode_prompt(assistant.tokenizer, row["prompt"], system=config.system, raw=config.raw))
    if config.raw and media:
        raise ValueError("images need the chat template: leave out --raw")
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    chat = with_system(read_chat(messages, row.get("tools"), "messages", sees=True), row)
    assert isinstance(chat, Chat)
    chat = chat if config.system is None else chat.with_system(config.system)
    return assistant.encode(chat, media, check="messages" in row)


def _image_folder(config: GenerateConfig) -> Path:
    file = config.prompt_file
    return Path() if file is None or file == STDIN or config.image else file.parent


_END = 16
"""Last tokens of a prompt, which tell whether it has begun to think."""


def generate(config: GenerateConfig) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each prompt with its answer in pieces, which stream if there is one prompt or `batch_size` is 1.

    Raises:
        ValueError: bad folders, tensors, tokenizer or prompts.
    """
    for row, answer in answer_rows(config):
        yield prompt_of(row), answer


def answer_rows(
    config: GenerateConfig, say: Callable[[str], None] | None = None
) -> Iterator[tuple[dict[str, Any], Iterator[str]]]:
    """Yield each row of `read_prompts` with its answer in pieces; as `generate`, `say` as in `Assistant.answers`."""
    rows, assistant = read_prompts(config), Assistant(config, images=_image_folder(config))
    prompts = encode_rows(assistant, rows, config)
    thoughts = [_thought(assistant, config, row, prompt.tokens) for row, prompt in zip(rows, prompts, strict=True)]
    grammars = {thinks: _grammar(assistant, config, thinks) for thinks in set(thoughts)}
    asked = list(enumerate(zip(prompts, map(grammars.get, thoughts), strict=True)))
    if len(rows) == 1 or config.batch_size == 1:
        answers = (
            assistant.answer(prompt.tokens, config.sampling, index, grammar, prompt.images)
            for index, (prompt, grammar) in asked
        )
    else:
        requests = [
            Request(prompt.tokens, config.sampling, index, grammar=grammar, images=prompt.images)
            for index, (prompt, grammar) in asked
        ]
        texts = assistant.answers(requests, batch_size=config.batch_size, say=say)
        answers = (iter([text]) for text in texts)
    for row, answer, thinks in zip(rows, answers, thoughts, strict=True):
        yield row, said(answer, assistant.tokenizer, thinks)
    if say and (drafts := assistant.engine.drafts).made:
        say(f"{drafts.accepted:,} of {drafts.made:,} drafts accepted ({drafts.accepted / drafts.made:.0%})")


def _thought(assistant: Assistant, config: GenerateConfig, row: dict[str, Any], tokens: list[int]) -> Thought:
    """Return how an answer that is to follow a grammar begins; others are shown with their thinking."""
    held = config.json_schema is not None or config.regex is not None
    if not held or (config.raw and "prompt" in row):
        return Thought.NONE
    return thought_after(str(assistant.tokenizer.decode(tokens[-_END:])))


def _grammar(assistant: Assistant, config: GenerateConfig, thinks: Thought) -> Grammar | None:
    if config.json_schema is not None:
        return assistant.grammars.json(read_json(config.json_schema), thinks=thinks)
    return None if config.regex is None else assistant.grammars.regex(config.regex, thinks=thinks)
