"""Wire forms: endpoints for the clients of one protocol, a file each; `FORMS` names them all.

A form is a module with `FORM = Form(endpoints…)`. An endpoint reads a request, asks `call.py` for its answers and
writes them; keys, origins, the log, metrics and refusals are the server's, which is the same for all.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxglue.hf.reading import KINDS
from jaxglue.parts import Registry
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError, openai_error


@dataclass(frozen=True)
class Endpoint:
    """An address that answers."""

    path: str
    answer: Callable[[Host, HttpRequest], Awaitable[Response]]
    """`answer(host, request)` returns a response, or raises ValueError or BadRequestError."""
    method: str = "POST"
    is_open: bool = False
    """Answer also without the key."""


@dataclass(frozen=True)
class Form:
    """Endpoints of one protocol."""

    endpoints: tuple[Endpoint, ...]
    error: Callable[[BadRequestError], Response] = openai_error
    """Writes a refusal as the protocol's clients read it."""
    is_served: Callable[[ServeConfig], bool] = lambda _: True
    """Tells whether the settings ask for it."""
    kinds: frozenset[str] = frozenset({"text"})
    """What a model must be for: text, or an answer in one pass (`jaxglue.hf.reading.KINDS`)."""


_TEXT = ("chat", "completions", "responses", "messages", "tokens", "generate", "adapters")
_NAMES = (*_TEXT, "decisions", "embeddings", "rerank", "models", "health", "metrics")
EVERY = frozenset({"text", *KINDS})
"""What models may be for."""
FORMS: Registry[Form] = Registry(
    "wire form",
    {name: f"jaxglue.serve.wire.{name}:FORM" for name in _NAMES},
)
"""Forms by name."""
