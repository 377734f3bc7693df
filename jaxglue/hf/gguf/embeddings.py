"""Metadata by which llama.cpp's server embeds texts as training did."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.read_rows import beginning, ending

_POOLING = {"mean": 1, "last": 3}
"""llama.cpp's numbers of poolings."""


def embedding_metadata(
    architecture: str, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pooling, and the tokens before and behind texts.

    Args:
        architecture: llama.cpp's name of the model's.
        tokenizer: of the model.
        record: how the model embeds (`jaxglue.hf.reading`).

    Raises:
        ValueError: tokens that see later ones, or several before or behind a text.
    """
    if record.get("bidirectional"):
        raise ValueError("--gguf: llama.cpp lets no token of this type of model see later ones: export a folder")
    found: dict[str, Any] = {f"{architecture}.pooling_type": _POOLING[record["pooling"]]}
    for name, tokens in (("bos", beginning(tokenizer)), ("eos", ending(tokenizer))):
        ids = np.frombuffer(tokens, np.int32).tolist()
        if len(ids) > 1:
            named = " ".join(tokenizer.convert_ids_to_tokens(ids))
            raise ValueError(f"--gguf: the tokenizer puts {named} around texts, and llama.cpp one token at each end")
        found[f"tokenizer.ggml.add_{name}_token"] = bool(ids)
        found |= {f"tokenizer.ggml.{name}_token_id": token for token in ids}
    return found
