"""Texts that pre-tokenizers split in different places: contractions, digits, white space, marks and rare letters."""

import random

PIECES = (
    *("a", "Z", "the", " hello", "'s", "'S", "'re", "'LL", "'ſ", "don't", "ÿ", "ß", "İ", "ǅ", "ʰ", "ª", "中", "日本語"),
    *("한글", "אב", "0", "12", "1234", "٣", "Ⅷ", "½", "²", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b"),
    *("\x0c", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u3000", "\u200b", "\u200d", "\ufeff"),
    *("\u00ad", "\u180e", ".", ",", "!!!", "...", "-", "--", "_", "__", "/", "//", "\\", "<", "|", "{", "}", "[INST]"),
    *("#", "$", "€", "™", "😀", "👩\u200d👩\u200d👧", "\U0001f1e9", "\U00010348", "\U0001d7d8", "\ud7ff", "\ue000"),
    *("\ufffd", "\U000e0041", "\x01", "\x7f", "\u0378", "ﬁ", "Å", "ﷺ", "ꙮ", "Ꭰ", "ა", "˙", "‿", "々", "ー", "①", "𞤀"),
)
MARKS = ("\u0301", "e\u0301", "\u0e33", "ا\u064b", "नि", "\u20dd", "\u0488", "A\u030a")
"""Combining marks, alone and with letters."""


def split_texts(count: int, seed: int, pieces: tuple[str, ...] = PIECES + MARKS) -> list[str]:
    """Return so many random mixtures."""
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randint(1, 14))) for _ in range(count)]
