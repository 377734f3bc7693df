"""Hints at the name that a misspelled one stands for."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the one known name of which `name` is a misspelling, empty if there is none."""
    close = sorted(other for other in set(known) if _is_misspelling(name.strip("-"), other.strip("-")))
    return f"; did you mean {close[0]}?" if len(close) == 1 else ""


def _is_misspelling(name: str, other: str) -> bool:
    """Tell whether one word of two names differs by a slip, or only the separators do.

    Whole words and digits say what a name means (eval_steps, top_k, beta2), so they must agree.
    """
    words, others = (text.lower().replace("-", "_").split("_") for text in (name, other))
    if "".join(words) == "".join(others):
        return True
    different = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and len(different) == 1 and _is_slip(*different[0])


def _is_slip(word: str, other: str) -> bool:
    """Tell whether a letter of a longer word is missing, added, wrong, or swapped with its neighbor."""
    if (
        min(len(word), len(other)) < 3
        or max(len(word), len(other)) < 4
        or word[0] != other[0]
        or not (word + other).isalpha()
    ):
        return False
    start = next((i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    rest, other_rest = word[start:], other[start:]
    swapped = rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:]
    return swapped or other_rest[1:] in (rest, rest[1:]) or rest[1:] == other_rest
