"""A service whose answers are given, for tests of what surrounds them."""

from collections.abc import Sequence

from jaxglue.serve.service import Event


class Told:
    """Gives one answer to every request, in pieces of tokens."""

    length, failure = 512, None

    def __init__(self, *pieces: Sequence[int], finish: str = "stop", length: int = 512):
        self._pieces, self._finish, self.length = pieces, finish, length
        self.tokens = [token for piece in pieces for token in piece]

    def submit(self, request, listen, owner=None):
        """Tell the answer at once."""
        self.request = request
        for tokens in self._pieces[:-1]:
            listen(Event(0, list(tokens), [0.0] * len(tokens), None))
        listen(Event(0, list(self._pieces[-1]), [0.0] * len(self._pieces[-1]), self._finish))

    def cancel(self, *_):
        """Cancel nothing."""
