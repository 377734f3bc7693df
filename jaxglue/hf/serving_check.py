"""Check of a folder's tokenizer, chat template and stop tokens: opened again, it must serve as it was trained."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import trained_stops
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.serving import CONFIG, GENERATION, folder_stops, token_names
from jaxglue.json_file import parse_json, read_json

Chats = Sequence[Mapping[str, Any]]
"""Conversations, each of `messages` and `tools`."""
_USER, _ASSISTANT = {"role": "user", "content": "Good day"}, {"role": "assistant", "content": "Hello, 7."}
PROBES: Chats = tuple(
    {"messages": messages, "tools": None}
    for messages in ([_USER], [_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER, _ASSISTANT])
)
_READER = Path(__file__).with_name("transformers_reader.py")
_TIMEOUT = 120
"""Seconds for transformers to read a folder."""
_TEXT = "Good day, 7."


def check_serving(
    folder: Path, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] | None = None, chats: Chats = PROBES
) -> None:
    """Open an exported folder again; it must render, tokenize and stop as the trained model.

    Where torch is installed, transformers opens it in a process of its own, too.

    Args:
        folder: of a model or an adapter.
        tokenizer: of the training.
        stops: tokens that end the trained model's answers; by default the tokenizer's and its template's.
        chats: to render.

    Raises:
        ValueError: names what differs.
    """
    expected = reading(tokenizer, chats)
    wanted = trained_stops(tokenizer) if stops is None else stops
    found = [("the folder, opened again", reading(load_tokenizer(folder), chats), folder_stops(folder))]
    if _has_torch():
        found.append(("transformers", *read_by_transformers(folder, chats)))
    for reader, read, listed in found:
        if different := next((name for name in expected if read.get(name) != expected[name]), None):
            raise ValueError(
                f"{folder}: {reader} gives another {different}: {str(read.get(different))[:200]!r}, trained on "
                f"{str(expected[different])[:200]!r}; the export failed"
            )
        if missing := set(wanted) - listed:
            names = ", ".join(token_names(tokenizer, missing))
            raise ValueError(f"{folder}: {reader} does not stop at {names}; the export failed")


def reading(tokenizer: PreTrainedTokenizerBase, chats: Chats) -> dict[str, Any]:
    """Return what a tokenizer makes of conversations and a text, by name; conversations that it refuses are None."""
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
        ValueError: it cannot.
    """
    command = [sys.executable, "-P", str(_READER), str(folder)]
    done = subprocess.run(
        command, input=json.dumps(list(chats)), capture_output=True, text=True, check=False, timeout=_TIMEOUT
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{folder}: transformers cannot read the folder: {reason[:300]}")
    read = parse_json(done.stdout.splitlines()[-1], "transformers' reading")
    return read["reading"], frozenset(read["stops"])


def problems(folder: Path) -> Iterator[str]:
    """Yield what would be served otherwise than the folder's own files say, one line each.

    Raises:
        ValueError: files that cannot be read.
    """
    tokenizer, listed = load_tokenizer(folder), folder_stops(folder)
    ends = trained_stops(tokenizer)
    if missing := ends - listed:
        names = ", ".join(token_names(tokenizer, missing))
        yield f"{GENERATION} and {CONFIG} do not list {names}, which ends the template's turns or the tokenizer's texts"
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    rows = config.get("vocab_size")
    if isinstance(rows, int) and (most := max(tokenizer.get_vocab().values())) >= rows:
        yield f"the tokenizer has token {most}, the model only {rows}"
    if not tokenizer.chat_template:
        yield "the tokenizer has no chat template"
    elif not ends - {tokenizer.eos_token_id} and not _ends_turns(tokenizer):
        yield "the chat template ends turns with no token of its own, so answers to chats may not end"
    settings = folder / "tokenizer_config.json"
    old = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(old, str) and isinstance(tokenizer.chat_template, str) and old != tokenizer.chat_template:
        yield "tokenizer_config.json and chat_template.jinja hold different templates"
    if _has_torch():
        read, theirs = read_by_transformers(folder, PROBES)
        own = reading(tokenizer, PROBES)
        yield from (f"transformers gives another {name}" for name in own if read.get(name) != own[name])
        if ends - theirs and not missing:
            yield f"transformers does not stop at {', '.join(token_names(tokenizer, ends - theirs))}"


def _ends_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the template ends a turn with the eos token."""
    read = reading(tokenizer, PROBES[1:2])
    tokens = read["tokens of conversation 1"] or []
    return tokenizer.eos_token_id in tokens[-4:]
