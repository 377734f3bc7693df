"""Tokenizer loading."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxglue.files.json_file import read_json
from jaxglue.files.regular_file import MAX_BYTES, open_regular, read_regular_text
from jaxglue.settings.spelling import nearest

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a tokenizer needs one."""
_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face folder, without network or remote code.

    Raises:
        ValueError: a missing folder or tokenizer, or one without a fast (`tokenizers`) implementation.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"tokenizer: no such folder: {folder}")
    if not any((folder / name).is_file() for name in FILES):
        raise ValueError(f"no tokenizer in {folder}: expected one of {', '.join(FILES)}; copy it from the base model")
    for path in folder.iterdir():  # transformers would wait for a pipe, and raise a traceback for damaged JSON
        if path.suffix != ".safetensors" and not path.is_dir() and path.exists():
            open_regular(path, MAX_BYTES if path.match("*token*") else None).close()
    for path in filter(Path.is_file, (folder / name for name in _JSON)):
        read_json(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise errors of many types for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason[:300]}") from error
    template: Any = tokenizer.chat_template
    named = template.values() if isinstance(template, dict) else () if template is None else (template,)
    for value in named:
        if not isinstance(value, str):
            raise ValueError(f"the chat template of the tokenizer in {folder} must be a text, got {value!r:.100}")
    for key in ("is_local", "local_files_only"):  # of this loading, and `save_pretrained` would write them
        tokenizer.init_kwargs.pop(key, None)
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer in {folder} has no tokenizer.json: save it once as a fast tokenizer")
    return tokenizer


def read_template(path: str | Path) -> str:
    """Read a chat template.

    Raises:
        ValueError: not UTF-8, or empty.
    """
    try:
        text = read_regular_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template: {path} is not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
    if not text.strip():
        raise ValueError(f"chat_template: {path} is empty: leave it out, or name a Jinja file")
    return text


def known_tokens(tokenizer: PreTrainedTokenizerBase, name: str, tokens: Sequence[str]) -> list[int]:
    """Return the ids of tokens that a setting names.

    Raises:
        ValueError: a text that is not one token of the tokenizer.
    """
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        special = ", ".join(str(token) for token in tokenizer.added_tokens_decoder.values())
        raise ValueError(
            f"{name}: the tokenizer has no token {unknown[0]!r:.100}{nearest(unknown[0], vocabulary)}: add it with "
            f"--new-tokens, or name one of its own, such as {special[:200]}"
        )
    return [vocabulary[token] for token in tokens]


def require_unicode(text: str) -> None:
    """Refuse half of a surrogate pair, which JSON and command lines may hold and tokenizers cannot read.

    Raises:
        ValueError: the text is no Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text holds half of a surrogate pair: {text[error.start]!r}") from None


def encode_beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text that goes on: with the tokenizer's special tokens at the beginning, and none at the end."""
    tokens, alone = tokenizer.encode("b"), tokenizer.encode("b", add_special_tokens=False)
    begins = (at for at in range(len(tokens)) if alone and tokens[at : at + len(alone)] == alone)
    added = len(tokens) - len(alone) - next(begins, len(tokens) - len(alone))
    encoded = tokenizer.encode(text)
    return encoded[: len(encoded) - added]


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding token of sequence classifiers: the tokenizer's, else the end of a text, as in TRL."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
