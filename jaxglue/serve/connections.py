"""Connections to the server: closed where no request comes on them."""

from asyncio import AbstractEventLoop, BaseTransport
from collections.abc import Callable
from typing import Any

SECONDS = 20.0
"""Time after which a connection without a request is closed, and up to twice it at most."""


def bounded_protocol() -> type:
    """Return uvicorn's protocol with a limit on the time that a request's headers take."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        loop: AbstractEventLoop
        transport: Any
        cycle: Any

        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(transport)
            self._check(None)

        def _check(self, idle: Any) -> None:
            """Close the connection where no request has begun since the last check."""
            waits = self.cycle is None or self.cycle.response_complete
            state = (self.cycle,) if waits else None
            if state is not None and state == idle:
                self.transport.close()
            if not self.transport.is_closing():
                self.loop.call_later(SECONDS, self._check, state)

    return Bounded


def announcing_server(config: Any, announce: Callable[[], None]) -> Any:
    """Return uvicorn's server of this configuration, which calls a function once it listens."""
    from uvicorn import Server

    class Announcing(Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                announce()

    return Announcing(config)
