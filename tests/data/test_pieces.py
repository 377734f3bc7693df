"""Pieces of a text have the tokens that they have inside of it, with tokenizers that put a space before texts."""

import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.pieces import PieceTokenizer
from jaxglue.generation.prompts import encode_messages

PARTS = [*"  \n▁ab.,?é", " the", "the", " sum", "[INST]", "[/INST]", "</s>", "<|end|>\n", "<|end|>", "<tool>", "word"]
ADDED = [
    *(AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "[INST]", "[/INST]")),
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<tool>", normalized=True),
]
REPLACE = normalizers.Replace(" ", "▁")
KINDS = {
    "llama2": (normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None),
    "mistral": (None, pre.Metaspace(prepend_scheme="first", split=False)),
    "always": (None, pre.Sequence([pre.Metaspace(prepend_scheme="always")])),
    "gemma": (REPLACE, pre.Split(" ", "merged_with_previous")),
    "gpt2": (None, pre.ByteLevel(add_prefix_space=True)),
}


def make_backend(normalizer, splitter):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if normalizer:
        backend.normalizer = normalizer
    if splitter:
        backend.pre_tokenizer = splitter
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["the sum of a and b is the sum, is it? the word é"] * 3, trainer)
    backend.add_special_tokens(ADDED[:-1])
    backend.add_tokens(ADDED[-1:])
    return backend


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(kind):
    backend, draw = make_backend(*KINDS[kind]), random.Random(0)
    tokenize = PieceTokenizer(backend)
    assert tokenize.exact
    for _ in range(200):
        text = "".join(draw.choices(PARTS, k=draw.randrange(30)))
        whole = backend.encode(text, add_special_tokens=False)
        starts = {start for (_, before), (start, _) in pairwise(whole.offsets) if start >= before}
        cuts = sorted(draw.sample(sorted(starts), min(len(starts), 3)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert [token for piece in tokenize.encode(pieces) for token in piece] == whole.ids, pieces


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["llama2", "mistral"])
def test_answers_of_sentencepiece_are_trained_as_they_are_generated(kind):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(*KINDS[kind]), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    user, answer = {"role": "user", "content": "the sum?"}, {"role": "assistant", "content": "the word"}
    row = Row("row", {"messages": [user, answer, user, answer]})
    encoded = Encoder(tokenizer, format="messages", loss_on="assistant").encode([row])
    rendered = tokenizer.apply_chat_template(row.value["messages"], tokenize=False)
    assert encoded.tokens.tolist() == tokenizer.encode(rendered, add_special_tokens=False)
    (prompt,) = np.flatnonzero(np.diff(encoded.mask, prepend=0) == 1)[:1]
    assert encoded.tokens[:prompt].tolist() == encode_messages(tokenizer, [user])
    trained = encoded.tokens[encoded.mask > 0].tolist()
    assert tokenizer.decode(trained, skip_special_tokens=False).replace("</s>", "</s> ").split() == [
        *("the", "word</s>", "the", "word</s>")
    ]


def test_special_tokens_in_a_message_are_text_with_sentencepiece():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(*KINDS["llama2"]), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokens = encode_messages(tokenizer, [{"role": "user", "content": "the</s>sum"}])
    assert tokenizer.eos_token_id not in tokens
    assert " the</s>sum[/INST]" in tokenizer.decode(tokens)


def test_a_tokenizer_that_adds_other_texts_is_refused():
    backend = make_backend(normalizers.Replace("b", "bb"), None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    with pytest.raises(ValueError, match="adds to texts"):
        Encoder(tokenizer, format="prompt_completion", loss_on="assistant")
