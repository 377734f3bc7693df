"""A service whose answers are given, for tests of what surrounds them."""

import asyncio
from collections.abc import Sequence

from jaxglue.serve.service import Event

_TURNS = 16
"""Turns of a loop, in which what came is sent."""


class Told:
    """Gives one answer to every request, in pieces of tokens."""

    length, failure = 512, None

    def __init__(self, *pieces: Sequence[int], finish: str = "stop", length: int = 512):
        self._pieces, self._finish, self.length = pieces, finish, length
        self.tokens = [token for piece in pieces for token in piece]

    def submit(self, request, listen, owner=None):
        """Tell the answer: in a loop a piece at a time, each once those before are sent, elsewhere at once."""
        self.request, last = request, len(self._pieces) - 1
        events = [
            Event(0, list(tokens), [0.0] * len(tokens), self._finish if number == last else None)
            for number, tokens in enumerate(self._pieces)
        ]
        try:
            self._telling = asyncio.get_running_loop().create_task(_tell(events, listen))
        except RuntimeError:
            for event in events:
                listen(event)

    def cancel(self, *_):
        """Cancel nothing."""


async def _tell(events, listen):
    for event in events:
        listen(event)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
