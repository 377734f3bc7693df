"""The tokenizer in a GGUF file: tokens, merges, pre-tokenizer, special tokens and the chat template."""

import json
import logging
from collections.abc import Collection
from typing import Any

from tokenizers.models import BPE
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
}
"""llama.cpp's names of pre-tokenizers by the expression that splits the text before byte-level BPE."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_O200K = _BEFORE + _UPPER + "*" + _LOWER + r"+(?i:'s|'t|'re"
"""Beginning of the expression of OpenAI's o200k, of GPT-OSS."""
_TEKKEN = "|".join(
    (
        *(f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*", r"\p{N}"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
"""Expression of Mistral's Tekken."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Pre-tokenizers with which llama.cpp takes words that are tokens whole, whatever the merges (`ignore_merges`)."""
_NO_MARKS = ("gpt-4o", "tekken")
"""Pre-tokenizers by which llama.cpp separates combining marks from their letters (measured in October 2026)."""
_SPACE = "\u2581"
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
    _check_model(model)
    is_byte_level = any(part["type"] == "ByteLevel" for part in _parts(state.get("pre_tokenizer"), "pretokenizers"))
    _check_normalizer(state.get("normalizer"), spaces=not is_byte_level)
    if model.get("byte_fallback") and not is_byte_level:
        _check_merges(merges, model["vocab"])
        found |= {"ggml.model": "llama", "ggml.pre": "default", "ggml.scores": _scores(tokens, merges)}
        found["ggml.add_space_prefix"] = _prepends_space(state)
        types = _byte_types(tokens, types, model.get("unk_token"))
    else:
        name = _pre_tokenizer(state.get("pre_tokenizer"))
        if name in _NO_MARKS:
            _log.warning("llama.cpp separates combining marks from letters in %s: such words have other tokens", name)
        _check_whole_words(name, model, tokenizer.all_special_tokens)
        found |= {"ggml.model": "gpt2", "ggml.pre": name, "ggml.merges": merges}
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


def _parts(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, which may be a sequence of some, in their order."""
    if state is None:
        return []
    return [part for each in state[name] for part in _parts(each, name)] if name in state else [state]


def _check_model(model: dict[str, Any]) -> None:
    """Raise ValueError for settings of BPE that llama.cpp does not have."""
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"--gguf: llama.cpp has no {name}, which the tokenizer's BPE sets to {model[name]!r:.40}")


def _check_normalizer(state: dict[str, Any] | None, *, spaces: bool) -> None:
    """Raise ValueError for a normalizer that changes texts, which llama.cpp does not; warn of NFC, which few have not.

    Args:
        state: of the normalizer.
        spaces: those of SentencePiece are not meant: a mark in front of the text and for each space.
    """
    marks = ({"type": "Prepend", "prepend": _SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    others = [part for part in _parts(state, "normalizers") if not (spaces and part in marks)]
    if others and all(part["type"] == "NFC" for part in others):
        _log.warning("llama.cpp does not normalize texts: those in decomposed form have other tokens there than in NFC")
    elif others:
        names = ", ".join(part["type"] for part in others)
        raise ValueError(f"--gguf: llama.cpp does not normalize texts, as the tokenizer does ({names})")


def _pre_tokenizer(state: dict[str, Any] | None) -> str:
    """Return llama.cpp's name of a pre-tokenizer before byte-level BPE.

    Raises:
        ValueError: it has none like this one.
    """
    parts = _parts(state, "pretokenizers")
    level = parts[-1] if parts and parts[-1]["type"] == "ByteLevel" else None
    if level is not None and level.get("add_prefix_space"):
        raise ValueError("--gguf: llama.cpp puts no space in front of texts, as the tokenizer does (add_prefix_space)")
    if level is not None and (name := _name_of_split(parts[:-1], splits_words=level.get("use_regex", True))):
        return name
    raise ValueError(
        f"--gguf: llama.cpp has no pre-tokenizer like this one: {json.dumps(state)[:200]}; "
        "known are those of GPT-2, Llama 3, Qwen, SmolLM, GPT-OSS and Mistral's Tekken"
    )


def _name_of_split(before: list[dict[str, Any]], *, splits_words: bool) -> str | None:
    """Return llama.cpp's name of a split before byte-level BPE, which may split GPT-2's words itself."""
    if splits_words:
        digits = {"type": "Digits", "individual_digits": True}
        return "gpt-2" if not before else "smollm" if before == [digits] else None
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    if before[0].get("invert") or before[0].get("behavior") not in ("Isolated", "isolated"):
        return None
    pattern = before[0]["pattern"].get("Regex", "")
    if pattern.startswith(_O200K) and r"\p{N}{1,3}" in pattern:
        return "gpt-4o"
    return "tekken" if pattern == _TEKKEN else _PRE_TOKENIZERS.get(pattern)


def _check_whole_words(name: str, model: dict[str, Any], special: Collection[str]) -> None:
    """Raise ValueError for tokens that are taken whole here and by merges there, or the reverse; warn for GPT-OSS."""
    if bool(model.get("ignore_merges")) == (name in _WHOLE_WORDS):
        return
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    merged = BPE(vocab=model["vocab"], merges=merges)
    words = [word for word in model["vocab"] if word not in special and len(merged.tokenize(word)) > 1]
    if not words:
        return
    message = (
        f"llama.cpp takes {len(words):,} tokens otherwise than the tokenizer (ignore_merges), such as {words[0]!r}"
    )
    if name != "gpt-4o":
        raise ValueError(f"--gguf: {message}")
    _log.warning("%s", message)


def _check_merges(merges: list[str], vocabulary: Collection[str]) -> None:
    """Raise ValueError for merges that are not SentencePiece's: llama.cpp merges any two tokens that make a third."""
    pairs, made, last = set(merges), set[str](), ""
    for merge in merges:
        token = merge.replace(" ", "")
        if token != last and token in made:
            raise ValueError(f"--gguf: llama.cpp merges all pairs that make {token!r} at once, and the tokenizer not")
        made.add(token)
        last = token
    for token in made:
        splits = ((token[:place], token[place:]) for place in range(1, len(token)))
        if absent := next(
            (s for s in splits if s[0] in vocabulary and s[1] in vocabulary and " ".join(s) not in pairs), None
        ):
            raise ValueError(f"--gguf: llama.cpp merges {absent[0]!r} and {absent[1]!r}, and the tokenizer does not")


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
