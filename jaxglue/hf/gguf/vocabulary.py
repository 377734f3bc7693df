"""The tokenizer in a GGUF file: tokens, merges, pre-tokenizer, special tokens and the chat template."""

import json
import logging
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import ChatTemplate

_log = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PRE_TOKENIZERS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        "llama-bpe"
    ),
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    "digits": "smollm",
    "": "gpt-2",
}
"""llama.cpp's names of pre-tokenizers by the expression that splits the text before byte-level BPE."""
_O200K = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
"""Part of the expression of OpenAI's o200k, of GPT-OSS."""
_MOST_STOPS = 3
"""End tokens that a GGUF file names: of a text, a turn and a message."""


def vocabulary_metadata(tokenizer: PreTrainedTokenizerBase, vocab_size: int, stops: Collection[int]) -> dict[str, Any]:
    """Return the metadata `tokenizer.…` of a GGUF file, without that prefix.

    Args:
        tokenizer: of the model, with byte-level BPE, or BPE with single bytes as in Llama 2.
        vocab_size: rows of the embedding; unused ones get names of their own.
        stops: tokens that end an answer.

    Raises:
        ValueError: a tokenizer of another kind, a pre-tokenizer that llama.cpp does not have, or more tokens than rows.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise ValueError(f"--gguf: a {model['type']} tokenizer cannot be written for llama.cpp: only BPE can")
    tokens, types = _tokens(tokenizer, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {"ggml.tokens": tokens}
    if model.get("byte_fallback"):
        found |= {"ggml.model": "llama", "ggml.pre": "default", "ggml.scores": _scores(tokens, merges)}
        found["ggml.add_space_prefix"] = _prepends_space(state)
        types = _byte_types(tokens, types, model.get("unk_token"))
    else:
        found |= {"ggml.model": "gpt2", "ggml.pre": _pre_tokenizer(state.get("pre_tokenizer")), "ggml.merges": merges}
    found["ggml.token_type"] = types
    found |= _special_tokens(tokenizer, stops)
    if tokenizer.chat_template:
        found["chat_template"] = tokenizer.get_chat_template()
    return found


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return each row's text and type: 1 normal, 3 control, 4 defined by the user, 5 unused."""
    vocabulary = tokenizer.get_vocab()
    if (most := max(vocabulary.values())) >= vocab_size:
        raise ValueError(f"--gguf: the tokenizer has token {most}, the embedding only {vocab_size} rows")
    tokens, types = [f"[PAD{index}]" for index in range(vocab_size)], [5] * vocab_size
    for token, index in vocabulary.items():
        tokens[index], types[index] = token, 1
    for index, added in tokenizer.added_tokens_decoder.items():
        is_marker = added.content.startswith("<|") and added.content.endswith("|>")
        types[index] = 3 if added.special or is_marker else 4
    return tokens, types


def _pre_tokenizer(state: dict[str, Any] | None) -> str:
    """Return llama.cpp's name of a pre-tokenizer before byte-level BPE."""
    parts = (state or {}).get("pretokenizers", [state] if state else [])
    splits = [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
    if any(part["type"] == "Digits" for part in parts):
        splits.append("digits")
    byte_level = [part for part in parts if part["type"] == "ByteLevel"]
    known = {part["type"] for part in parts} <= {"Split", "Digits", "ByteLevel"}
    if known and byte_level and len(splits) <= 1 and bool(splits) != byte_level[0].get("use_regex", True):
        pattern = next(iter(splits), "")
        if _O200K in pattern:
            return "gpt-4o"
        if pattern in _PRE_TOKENIZERS:
            return _PRE_TOKENIZERS[pattern]
    if known and splits == ["digits"] and byte_level:
        return _PRE_TOKENIZERS["digits"]
    raise ValueError(
        f"--gguf: llama.cpp has no pre-tokenizer like this one: {json.dumps(state)[:200]}; "
        "known are those of GPT-2, Llama 3, Qwen, SmolLM and GPT-OSS"
    )


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores by which sentencepiece's algorithm merges in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _byte_types(tokens: list[str], types: list[int], unknown: str | None) -> list[int]:
    """Return the types with those of single bytes (6), such as `<0x0A>`, and of the unknown token (2)."""
    is_byte = [len(token) == 6 and token.startswith("<0x") and token.endswith(">") for token in tokens]
    return [
        6 if byte else 2 if token == unknown else type_
        for byte, token, type_ in zip(is_byte, tokens, types, strict=True)
    ]


def _prepends_space(state: dict[str, Any]) -> bool:
    """Tell whether texts get a space in front."""
    normalizer, splitter = state.get("normalizer") or {}, state.get("pre_tokenizer") or {}
    normalizers = normalizer.get("normalizers", [normalizer])
    return any(part.get("type") == "Prepend" for part in normalizers) or splitter.get("prepend_scheme") in (
        "always",
        "first",
    )


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> dict[str, Any]:
    """Return the ids of special tokens, and whether texts begin with one."""
    ids = {"bos": tokenizer.bos_token_id, "unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    ends = sorted(stops, key=lambda token: (token != tokenizer.eos_token_id, token))
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if len(ends) > _MOST_STOPS:
        left_out = tokenizer.convert_ids_to_tokens(ends[_MOST_STOPS:])
        _log.warning("a GGUF file names %d end tokens, without %s", _MOST_STOPS, ", ".join(left_out))
    ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    found: dict[str, Any] = {f"ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    return found | {"ggml.add_bos_token": adds_bos(tokenizer), "ggml.add_eos_token": False}


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether llama.cpp should put BOS in front of texts: where the tokenizer does, and the template begins so.

    llama.cpp removes the template's own then.
    """
    if tokenizer.bos_token is None or tokenizer.bos_token_id not in tokenizer.encode("a")[:1]:
        return False
    if not tokenizer.chat_template:
        return True
    try:
        text = ChatTemplate(tokenizer).render_prompt([{"role": "user", "content": "a"}], None)
    except ValueError:  # a template may refuse this conversation
        return True
    return text.startswith(tokenizer.bos_token)
