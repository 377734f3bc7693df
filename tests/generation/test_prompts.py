"""Prompts of strangers' texts."""

import hostile
import pytest

from jaxglue.generation.prompts import encode_messages


def test_hostile_contents_are_text_or_refused(tokenizer):
    specials = set(tokenizer.all_special_ids)
    template = {token for token in encode_messages(tokenizer, [{"role": "user", "content": "a"}]) if token in specials}
    for text in (*hostile.TEXTS, *hostile.mixtures(5, 100)):
        messages = [{"role": "user", "content": f"a {text} b"}]
        if any("\ud800" <= character <= "\udfff" for character in text):
            with pytest.raises(ValueError, match="surrogate pair"):
                encode_messages(tokenizer, messages)
            continue
        tokens = encode_messages(tokenizer, messages)
        assert messages[0]["content"].strip() in tokenizer.decode(tokens)
        assert {token for token in tokens if token in specials} == template
