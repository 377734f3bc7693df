"""Text of tokens that come one by one."""

from tokenizers import Tokenizer


class TokenDecoder:
    """Decoder of tokens one by one, each after those before it.

    A run of single bytes that is no character makes characters before it unreadable, too: what is shown stays.
    """

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        self._tokens, self._shown = list[int](), 0
        """The tokens of the last text and those after it, which are decoded together; how many are shown."""
        self._before = ""
        """Text of those that are shown."""

    @property
    def waiting(self) -> int:
        """Return the number of tokens whose text is not shown."""
        return len(self._tokens) - self._shown

    def add(self, token: int) -> str:
        """Return the text that a token completes; none inside of a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._show(text)

    def text_of(self, token: int) -> str:
        """Return the text that a token would complete, with U+FFFD for the part of a character; add nothing."""
        return self._decode([*self._tokens, token])[len(self._before) :]

    def rest(self) -> str:
        """Return the text of the waiting tokens, with U+FFFD in place of a character that is incomplete."""
        return self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        """Note that the tokens' text is shown; return its new part."""
        if len(text) <= len(self._before):
            return ""
        piece = text[len(self._before) :]
        self._tokens = self._tokens[self._shown :]
        self._shown, self._before = len(self._tokens), self._decode(self._tokens)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return str(self.backend.decode(tokens, skip_special_tokens=False))
