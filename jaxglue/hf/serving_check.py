"""Check of a folder's tokenizer, chat template and stop tokens: opened again, it must serve as it was trained."""

import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import trained_stops
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.files.json_file import parse_json, read_json
from jaxglue.hf.serving import (
    CONFIG,
    GENERATION,
    TEMPLATE,
    has_tokenizer,
    load_own_tokenizer,
    served_stops,
    token_names,
)
from jaxglue.models.wrapper import text_config

Chats = Sequence[Mapping[str, Any]]
"""Conversations, each of `messages` and `tools`."""
_USER, _ASSISTANT = {"role": "user", "content": "Good day"}, {"role": "assistant", "content": "Hello, 7."}
PROBES: Chats = tuple(
    {"messages": messages, "tools": None}
    for messages in ([_USER], [_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER, _ASSISTANT])
)
_READER = Path(__file__).with_name("transformers_reader.py")
_log = logging.getLogger(__name__)
_TIMEOUT = 120
"""Seconds for transformers to read a folder."""
_END = 4
"""Tokens at the end of a conversation among which one must end the turn; white space may follow it."""
_TEXT = "Good day, 7."


def check_serving(
    folder: Path, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] | None = None, chats: Chats = PROBES
) -> PreTrainedTokenizerBase:
    """Open an exported folder again; it must render, tokenize and stop as the trained model. Return its tokenizer.

    Where torch is installed, transformers opens it in a process of its own, too.

    Args:
        folder: of a model or an adapter.
        tokenizer: of the training.
        stops: tokens that end the trained model's answers; by default the tokenizer's and its template's.
        chats: to render.

    Raises:
        ValueError: names what differs.
    """
    chats = json.loads(json.dumps(list(chats), default=str))
    expected = reading(tokenizer, chats)
    wanted = trained_stops(tokenizer) if stops is None else stops
    opened = load_tokenizer(folder)
    found = [("the opened folder", reading(opened, chats), served_stops(folder))]
    if _has_torch():
        try:
            found.append(("transformers", *read_by_transformers(folder, chats)))
        except ValueError as error:
            _log.warning("%s", error)
    for reader, read, listed in found:
        if different := next((name for name in expected if read.get(name) != expected[name]), None):
            raise ValueError(
                f"{folder}: {reader} differs in the {different}: {str(read.get(different))[:200]!r}, trained on "
                f"{str(expected[different])[:200]!r}; the export failed"
            )
        if missing := set(wanted) - listed:
            names = ", ".join(token_names(tokenizer, missing))
            raise ValueError(f"{folder}: {reader} does not stop at {names}; the export failed")
    return opened


def reading(tokenizer: PreTrainedTokenizerBase, chats: Chats) -> dict[str, Any]:
    """Return renderings of conversations, None for refused ones, and tokens of a text by a tokenizer, by name."""
    found: dict[str, Any] = {"eos token": tokenizer.eos_token, "tokens of a text": tokenizer(_TEXT)["input_ids"]}
    for number, chat in enumerate(chats if tokenizer.chat_template else (), 1):
        prompt = chat["messages"][-1]["role"] != "assistant"
        text = None
        with suppress(Exception):  # templates are foreign code
            text = tokenizer.apply_chat_template(
                chat["messages"], tools=chat["tools"], add_generation_prompt=prompt, tokenize=False
            )
        found[f"text of conversation {number}"] = text
        tokens = None if text is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        found[f"tokens of conversation {number}"] = tokens
    return found


def _has_torch() -> bool:
    """Tell whether torch is installed; commands hide it from imports."""
    try:
        return bool(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return False


def read_by_transformers(folder: Path, chats: Chats) -> tuple[dict[str, Any], frozenset[int]]:
    """Return `reading` and end tokens of a folder as transformers reads it in a process of its own.

    Raises:
        ValueError: it cannot, or takes too long.
    """
    command = [sys.executable, "-P", str(_READER), str(folder)]
    try:
        done = subprocess.run(
            command, input=json.dumps(list(chats)), capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{folder}: transformers did not read the folder within {_TIMEOUT} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{folder}: transformers cannot read the folder: {reason[:300]}")
    read = parse_json(done.stdout.splitlines()[-1], "transformers' reading")
    return read["reading"], frozenset(read["stops"])


class Verdict(NamedTuple):
    """Finding on a file of a folder, as it would be served."""

    subject: str
    found: str
    remedy: str = ""
    """Remedy; empty where nothing is wrong."""
    breaks: bool = False
    """Answers would be wrong or would not end."""


def inspect(folder: Path, base: Path | None = None) -> Iterator[Verdict]:
    """Yield how a folder's tokenizer, chat template and stop tokens agree.

    Args:
        folder: of a model or an adapter.
        base: of an adapter.

    Raises:
        ValueError: files that cannot be read.
    """
    tokenizer = load_own_tokenizer(base or folder, folder)
    yield _inspect_tokenizer(tokenizer, base or folder)
    yield _inspect_template(tokenizer, folder)
    lists_stops = (folder / GENERATION).is_file() or base is None
    ends, listed = trained_stops(tokenizer), served_stops(folder if lists_stops else base or folder)
    if missing := ends - listed:
        ids = ", ".join(map(str, sorted(missing)))
        yield Verdict(
            "stop tokens",
            f"{', '.join(token_names(tokenizer, missing))} ends texts or turns, but {GENERATION} does not list it",
            f"add {ids} to eos_token_id there, or export the run again",
            breaks=True,
        )
    else:
        yield Verdict("stop tokens", ", ".join(token_names(tokenizer, listed)))
    if _has_torch() and lists_stops and has_tokenizer(folder):
        yield _compare_with_transformers(tokenizer, folder, ends - missing)


def _inspect_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Verdict:
    rows = (text_config(read_json(folder / CONFIG)) if (folder / CONFIG).is_file() else {}).get("vocab_size")
    most = max(tokenizer.get_vocab().values())
    if isinstance(rows, int) and most >= rows:
        found = f"token {most}, but the model has {rows} rows"
        return Verdict("tokenizer", found, "take the tokenizer that belongs to the weights", breaks=True)
    return Verdict("tokenizer", f"{most + 1:,} tokens, texts end with {tokenizer.eos_token}")


def _inspect_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Verdict:
    remedy = "write it there too, or take it out of tokenizer_config.json"
    settings = folder / "tokenizer_config.json"
    old = read_json(settings).get("chat_template") if settings.is_file() else None
    if not tokenizer.chat_template:
        return Verdict("template", "none: chats are refused", "name one with --chat-template in training")
    if isinstance(old, str) and isinstance(tokenizer.chat_template, str) and old != tokenizer.chat_template:
        return Verdict("template", f"{TEMPLATE} and tokenizer_config.json differ", remedy)
    tokens = reading(tokenizer, PROBES[1:2])["tokens of conversation 1"]
    if tokens is None:
        return Verdict("template", "it refuses a question with its answer", "try another with --chat-template")
    ends = [token for token in tokens[-_END:] if token in trained_stops(tokenizer)]
    if not ends:
        found = "turns end with no token of their own, so answers may not end"
        return Verdict("template", found, "train with a template that ends turns with a special token", breaks=True)
    return Verdict("template", f"turns end with {', '.join(token_names(tokenizer, ends))}")


def _compare_with_transformers(tokenizer: PreTrainedTokenizerBase, folder: Path, ends: Collection[int]) -> Verdict:
    try:
        read, stops = read_by_transformers(folder, PROBES)
    except ValueError as error:
        return Verdict("transformers", str(error), "mend the file that it names", breaks=True)
    own = reading(tokenizer, PROBES)
    different = [name for name in own if read.get(name) != own[name]]
    if set(ends) - stops:
        different.append("list of stop tokens")
    if different:
        found = f"differs in the {', '.join(different)}"
        return Verdict("transformers", found, "compare the folder's files with the base's", breaks=True)
    return Verdict("transformers", "renders, tokenizes and stops alike")
