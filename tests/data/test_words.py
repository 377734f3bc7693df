"""Tokens of texts read word by word are those of whole texts."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from jaxglue.data import words
from jaxglue.data.words import WordTokenizer, reads_words_alone, split_words

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, ENDINGS, SPACES = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": None,
    "qwen2": rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{SPACES}",
    "qwen3.5": rf"{ENDINGS}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{SPACES}",
    "llama3": rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{SPACES}",
    "gpt4o": rf"{BEFORE}{UPPER}*{LOWER}+{ENDINGS}?|{BEFORE}{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACES}",
    "mistral": rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACES}",
}
PARTS = [
    *"  \n\t\r\"'abzTé1234.,;-_/\\<>|{#\0\v\x1c\x85\xa0\u2000\u2028\u3000\u180e\u200b\ufeff",
    *"\u0301\u0308\u037e\u1fef\u212b你世ſ😀ﬁ가٣²",
    *("  ", "\n ", "\n  \n", " the", " def ", "return", "'ll", "'S", "e\u0301", "ᄀ\u1161"),
    *("<|im_end|>", "<think>", "</think>", " <left>", "word", " word"),
]
ADDED = [
    AddedToken("<|im_end|>", special=True),
    AddedToken("<think>", normalized=False),
    AddedToken("</think>"),
    AddedToken("<left>", lstrip=True),
    AddedToken("word", single_word=True),
]


def make_tokenizer(pattern, normalizer=None, added=()):
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer = Tokenizer(models.BPE())
    split = pattern and pre.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre.Sequence([split, byte_level]) if split else byte_level
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the return def  return don't I'LL 12345 你世 naïve\n    the"] * 3, trainer)
    tokenizer.add_tokens([*added])
    return tokenizer


def random_texts(seed, count=150):
    rng = random.Random(seed)
    return ["".join(rng.choices(PARTS, k=rng.randrange(50))) for _ in range(count)]


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["plain", "nfc"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_words_have_the_tokens_of_whole_texts(pattern, normalizer):
    tokenizer = make_tokenizer(pattern, normalizer, ADDED)
    assert reads_words_alone(tokenizer)
    tokenize = WordTokenizer(tokenizer)
    for texts in (random_texts(0), random_texts(1)):
        whole = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        assert [np.frombuffer(tokens, np.int32).tolist() for tokens in tokenize(texts)] == whole


@pytest.mark.parametrize(
    "tokenizer",
    [
        make_tokenizer(r"\p{L}+ \p{L}+|\s+(?!\S)|\s+"),
        make_tokenizer(r" ?\p{L}+|\s+"),
        make_tokenizer(None, normalizers.NFKC()),
        make_tokenizer(None, added=[AddedToken("a b")]),
        make_tokenizer(None, added=[AddedToken("<x>", rstrip=True)]),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    ],
    ids=["spaces", "unknown", "nfkc", "spaced", "rstrip", "words"],
)
def test_other_tokenizers_read_whole_texts(tokenizer):
    assert not reads_words_alone(tokenizer)
    text = "a b  a<x> b"
    (tokens,) = WordTokenizer(tokenizer)([text])
    assert np.frombuffer(tokens, np.int32).tolist() == tokenizer.encode(text).ids


def test_texts_split_before_spaces_that_follow_other_characters():
    assert split_words("a b") == ["a", " b"]
    assert split_words(" a  b\n c\0 d ") == [" a", "  b\n c\0", " d", " "]


def test_remembered_words_are_few_and_short(monkeypatch):
    monkeypatch.setattr(words, "_MOST", 3)
    tokenize = WordTokenizer(make_tokenizer(None))
    tokenize(["a b " + "c" * 99])
    assert tokenize._known.keys() == {"a", " b"}
    tokenize(["d e"])
    assert not tokenize._known


def test_texts_of_new_words_are_read_whole(monkeypatch):
    monkeypatch.setattr(words, "_TRIAL", 2)
    tokenizer = make_tokenizer(None)
    tokenize = WordTokenizer(tokenizer)
    tokenize(["a b"])
    (tokens,) = tokenize(["c d"])
    assert np.frombuffer(tokens, np.int32).tolist() == tokenizer.encode("c d").ids
    assert tokenize._known.keys() == {"a", " b"}
