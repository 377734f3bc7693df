"""Texts of strangers that readers and templates stumble over: marks of all formats, special tokens, odd characters."""

import random
from collections.abc import Iterator

from jaxglue.text.stream import TAGS
from jaxglue.text.tool_calls import MARKS

MARKUP = (
    *sorted(MARKS),
    *(tag for tags in TAGS for tag in tags),
    *("<function=f>", "</function>", "<function=f/>", "<parameter=key>", "</parameter>", "<parameter=key/>"),
    *("<|channel|>final<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|return|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<bos>", "<|eot_id|>", "<|user|>", "[INST]"),
    *("```json", "```", "functools[", "functions.f:0", "call:f{", "; "),
)
"""Marks of tool calls, tags of thinking, and special tokens."""
CHARACTERS = (
    *("{", "}", "}}", "[", "]", '"', "'", "\\", "\\n", '\\"', ",", ":", ";", "(", ")"),
    *("\x00", "\x1b[31m", "\u2028", "\ufeff", "\u202e", "\ud83d", "\udc00", "🙂", "𝔸", "é", "e\u0301", "한국", "\t"),
)
"""Lone brackets and quotes, NUL and other control characters, halves of surrogate pairs, letters of 4 bytes."""
WORDS = (
    *("", " ", "\n", "\r\n", " a ", "\na\n", "  indented\n    twice\n", "90210", "00123", "1e5", "1e999", "NaN"),
    *("true", "True", "null", "None", "[]", "{}", '{"k": 1}', "['a']", "{{ 7 * 7 }}", "{% raw %}", "%(s)s"),
)
"""Texts that look like values of other types, like code, or like nothing."""
TEXTS = MARKUP + CHARACTERS + WORDS
_JOINS = ("", " ", "\n", "x")


def mixtures(seed: int, count: int, texts: tuple[str, ...] = TEXTS) -> Iterator[str]:
    """Yield so many random mixtures of texts."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = rng.choices(texts, k=rng.randint(1, 5))
        yield "".join(part + rng.choice(_JOINS) for part in parts)
