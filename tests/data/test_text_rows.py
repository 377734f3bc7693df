"""Texts to embed have the tokens that a saved tokenizer gives them, odd ones too, and end with a token of their own."""

import pytest
from tokenizers import processors

from jaxglue.data.read_rows import UnitText
from jaxglue.data.text_rows import ANCHOR, POSITIVE, TextEncoder, end_texts

BEGIN, END, BYTES = "<|im_start|>", "<|im_end|>", processors.ByteLevel(trim_offsets=False)
ODD = [
    *("hello", " ", "\n\n", END, f"a {BEGIN}b", "naïve 日本 🎉", "e\u0301\u00a0", "\u2028", "\x00"),
    *("x" * 50, "word " * 30),
]


@pytest.fixture(params=["nothing", "bytes", "begin", "bytes, begin", "end", "begin, end"])
def tokenizer(request, make_tokenizer):
    tokenizer = make_tokenizer()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BEGIN, END)]
    frame = [BEGIN] * ("begin" in request.param) + ["$A"] + [END] * ("end" in request.param)
    parts = [BYTES] * ("bytes" in request.param)
    parts += [processors.TemplateProcessing(single=frame, special_tokens=ids)] * (len(frame) > 1)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(parts) if parts else None
    return tokenizer


def test_texts_have_the_tokens_of_the_tokenizer_that_is_saved(tokenizer):
    begins, ends = (token in tokenizer.convert_ids_to_tokens(tokenizer.encode("b")) for token in (BEGIN, END))
    assert end_texts(tokenizer) == (not ends)
    encoder = TextEncoder(tokenizer, query="find: ", longest=12)
    for text in ODD:
        for kind, prompt in ((ANCHOR, "find: "), (POSITIVE, "")):
            tokens = encoder.encode_units([UnitText([], [encoder.part(kind, text)])]).tokens.tolist()
            assert tokens == tokenizer.encode(prompt + text, truncation=True, max_length=12)
            texts = tokenizer.convert_ids_to_tokens(tokens)
            assert texts[-1] == END and (texts[0] == BEGIN) == begins
    assert not end_texts(tokenizer)
