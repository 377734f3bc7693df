"""The HTTP server of a loaded model: endpoints of all wire forms behind a key, errors as their clients read them."""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxglue.generation.assistant import Assistant, Voice
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.host import Host
from jaxglue.serve.local import foreign_page
from jaxglue.serve.refusals import BadRequestError, openai_error, refusal_of
from jaxglue.serve.served_models import ServedModel, ServedModels
from jaxglue.serve.service import Service
from jaxglue.serve.wire import FORMS, Endpoint, Form


def make_app(assistant: Assistant, service: Service, config: ServeConfig) -> Starlette:
    """Return the application."""
    host = Host(assistant, service, config, _models(assistant, config))
    forms = [form for form in FORMS.values() if form.is_served(config)]
    routes = [
        Route(endpoint.path, _guarded(host, form, endpoint), methods=[endpoint.method])
        for form in forms
        for endpoint in form.endpoints
    ]
    handlers: dict[Any, Any] = {HTTPException: _no_route, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=handlers)


def _models(assistant: Assistant, config: ServeConfig) -> ServedModels:
    """Return the base and its adapters by their names."""
    none = np.zeros(assistant.ranks, np.bool_) if assistant.ranks else None
    base = Voice(assistant.tokenizer, assistant.stops, none)
    models = ServedModels(ServedModel(config.served_name, base))
    for name, voice in assistant.voices.items():
        models.add(ServedModel(name, voice, parent=config.served_name, root=str(config.named_adapters[name])))
    return models


def _guarded(host: Host, form: Form, endpoint: Endpoint) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return the endpoint behind the key, with refusals in the form of its clients."""

    async def run(http: HttpRequest) -> Response:
        try:
            if not endpoint.is_open:
                _check_caller(host.config, http.headers)
            return await endpoint.answer(host, http)
        except ClientDisconnect:  # nobody reads the answer
            return Response(status_code=499)
        except (BadRequestError, ValueError) as error:
            return form.error(refusal_of(error))

    return run


def _check_caller(config: ServeConfig, headers: Mapping[str, str]) -> None:
    """Raise BadRequestError for a request without the key, or where none is set, for one of a page of elsewhere."""
    if config.api_key is None:
        if reason := foreign_page(headers):
            raise BadRequestError(reason, 403)
        return
    key = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")  # bytes, as they came
    spellings = {config.api_key.encode(errors="replace"), config.api_key.encode("latin-1", errors="replace")}
    if not any(hmac.compare_digest(key, spelling) for spelling in spellings):
        message = "no or a wrong API key: send it as a bearer token"
        raise BadRequestError(message, 401, code="invalid_api_key")


async def _no_route(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path} is not served: {error.detail}"
    response = openai_error(BadRequestError(message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _failed(_: HttpRequest, __: Exception) -> Response:
    return openai_error(BadRequestError("an error of the server, which its log shows", 500))
