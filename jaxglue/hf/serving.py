"""Files that decide how a folder is served: tokenizer, chat template and stop tokens."""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import trained_stops
from jaxglue.data.tokenizer import FILES, load_tokenizer, read_template
from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import read_json, write_json

GENERATION = "generation_config.json"
CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
_TEXTS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name special tokens."""


def folder_stops(folder: Path) -> frozenset[int]:
    """Return the end tokens that a folder's generation_config.json and config.json list."""
    return frozenset(token for name in (GENERATION, CONFIG) for token in _listed(folder / name))


def served_stops(folder: Path) -> frozenset[int]:
    """Return the end tokens that other programs take from a folder: generation_config.json's, where there is one."""
    return frozenset(_listed(folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)))


def _listed(path: Path) -> list[int]:
    stops = _read_settings(path).get("eos_token_id")
    tokens = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if wrong := [token for token in tokens if type(token) is not int or abs(token) >= 2**31]:
        raise ValueError(f"{path}: eos_token_id: expected token ids, got {wrong[0]!r:.100}")
    return tokens


def _read_settings(path: Path) -> dict[str, Any]:
    """Return a file's settings, above those of the text model in a wrapper's; empty without the file."""
    raw = read_json(path) if path.is_file() else {}
    return {**text, **raw} if isinstance(text := raw.get("text_config"), dict) else raw


def stop_tokens(tokenizer: PreTrainedTokenizerBase, *folders: Path | None) -> frozenset[int]:
    """Return the tokens that end an answer: those of the tokenizer and its template, and those that folders list."""
    return trained_stops(tokenizer).union(*map(folder_stops, filter(None, folders)))


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder brings a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def load_own_tokenizer(base: Path, adapter: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer with which a model was trained: the adapter's where it brings one, else the base's.

    A chat template that only one of them has is used with the other's tokenizer.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    if adapter is None or not has_tokenizer(adapter):
        tokenizer = load_tokenizer(base)
        if adapter is not None and (adapter / TEMPLATE).is_file():
            tokenizer.chat_template = read_template(adapter / TEMPLATE)
        return tokenizer
    tokenizer = load_tokenizer(adapter)
    if not tokenizer.chat_template and has_tokenizer(base):
        tokenizer.chat_template = load_tokenizer(base).chat_template
    return tokenizer


def render_example(tokenizer: PreTrainedTokenizerBase) -> str:
    """Render a chat of one question by a tokenizer's template.

    Raises:
        ValueError: the template fails.
    """
    messages = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "7"}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates are programs
        raise ValueError(f"the chat template fails: {error}") from error


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Path | None = None) -> None:
    """Make a folder's files describe a tokenizer and its chat template; files that do so already stay as they are.

    Args:
        folder: of the model, with or without a tokenizer.
        tokenizer: to be described.
        source: folder that the tokenizer's files are copied from where the vocabulary differs; None saves new ones.
    """
    present = load_tokenizer(folder) if has_tokenizer(folder) else None
    if present is None or not _same_vocabulary(present, tokenizer):
        for path in _tokenizer_files(folder):
            path.unlink()
        if source is None or not has_tokenizer(source):
            tokenizer.save_pretrained(folder)
            return
        for path in _tokenizer_files(source):
            shutil.copyfile(path, folder / path.name)
        present = load_tokenizer(folder)
    _write_special_tokens(folder, present.special_tokens_map, tokenizer.special_tokens_map)
    if present.chat_template != tokenizer.chat_template:
        _write_template(folder, tokenizer.chat_template)


def _tokenizer_files(folder: Path) -> set[Path]:
    return {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}


def _same_vocabulary(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Tell whether two tokenizers give the same tokens, and their single special tokens alone may have other roles."""
    one.backend_tokenizer.no_truncation()  # as data's encoder has left the other
    one.backend_tokenizer.no_padding()
    lists = [
        {key: value for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, str)}
        for tokenizer in (one, other)
    ]
    named = isinstance(other.chat_template, dict) and one.chat_template != other.chat_template
    return lists[0] == lists[1] and not named and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


def _write_special_tokens(folder: Path, present: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Enter the special tokens that differ."""
    changed = {key: wanted.get(key) for key in present.keys() | wanted.keys() if present.get(key) != wanted.get(key)}
    for path in (folder / name for name in _TEXTS if changed):
        raw = read_json(path) if path.is_file() else None
        if raw is not None:
            write_json(path, raw | changed)


def _write_template(folder: Path, template: str | None) -> None:
    """Write a chat template in place of the folder's."""
    for path in folder.glob("chat_template*"):
        path.unlink()
    path = folder / "tokenizer_config.json"
    raw = read_json(path) if path.is_file() else {}
    if "chat_template" in raw:  # read where the file of the template is unknown
        write_json(path, raw | {"chat_template": template})
    if template is not None:
        with atomic_file(folder / TEMPLATE) as temporary:
            temporary.write_text(template, encoding="utf-8")


def write_stops(folder: Path, stops: Collection[int], base: Path | None = None) -> None:
    """Enter end tokens into a folder's generation_config.json and config.json, beside those listed there.

    Args:
        folder: of a model or an adapter; without generation_config.json, it gets one.
        stops: to be listed.
        base: folder of an adapter's base, whose end tokens are listed too.
    """
    path = folder / CONFIG
    settings = _read_settings(path)
    if settings:
        _enter(path, read_json(path), settings.get("eos_token_id"), stops)
    path = folder / GENERATION
    raw = read_json(path) if path.is_file() else _first_settings(settings, base)
    _enter(path, raw, raw.get("eos_token_id", settings.get("eos_token_id")), stops)


def _first_settings(settings: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """Return the first entries of a folder's first generation_config.json."""
    if base is not None and (base / GENERATION).is_file():
        return read_json(base / GENERATION)
    settings = _read_settings(base / CONFIG) if base is not None and (base / CONFIG).is_file() else settings
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: settings[name] for name in names if settings.get(name) is not None}


def _enter(path: Path, raw: dict[str, Any], listed: Any, stops: Collection[int]) -> None:
    """Write settings with further end tokens, unless the file has them all."""
    before = listed if isinstance(listed, list) else [] if listed is None else [listed]
    tokens = [*before, *sorted(set(stops) - set(before))]
    entry = tokens[0] if len(tokens) == 1 else tokens
    if tokens and (raw.get("eos_token_id") not in (entry, tokens) or not path.is_file()):
        write_json(path, raw | {"eos_token_id": entry})


def token_names(tokenizer: PreTrainedTokenizerBase, tokens: Collection[int]) -> Iterator[str]:
    """Yield tokens as texts."""
    return (str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(tokens))
