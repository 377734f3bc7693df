"""Fixtures of model folders' tests."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def sentencepiece():
    """Make a tokenizer as Llama 2's: BPE over characters, with single bytes for others."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell"), ("▁hell", "o"), ("l", "o")]
    for piece in ("▁", *"helo", *(a + b for a, b in merges)):
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
