"""The HTTP server of a loaded model: endpoints of all wire forms behind a key, errors as their clients read them."""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxglue.generation.assistant import Assistant, Voice
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.host import Host
from jaxglue.serve.loaded_adapters import LoadedAdapters
from jaxglue.serve.local import foreign_page
from jaxglue.serve.metrics import Metrics
from jaxglue.serve.reading import ReadService
from jaxglue.serve.record import Recorded, record_of
from jaxglue.serve.refusals import BadRequestError, openai_error, refusal_of
from jaxglue.serve.served_models import ServedModel, ServedModels
from jaxglue.serve.service import Service
from jaxglue.serve.wire import FORMS, Endpoint, Form


def make_app(
    assistant: Assistant, service: Service, config: ServeConfig, reader: ReadService | None = None
) -> Starlette:
    """Return the application of a model that writes text, and perhaps answers in one pass, too."""
    models = _models(assistant, config)
    adapters = LoadedAdapters(assistant, service, models, config) if config.adapter_folder else None
    return _application(Host((assistant, service), reader, config, models, Metrics(service), adapters))


def make_read_app(reader: ReadService, config: ServeConfig) -> Starlette:
    """Return the application of a model that answers in one pass alone."""
    voice = Voice(next(iter(reader.readers.values())).model.tokenizer, frozenset(), None)
    models = ServedModels(ServedModel(config.served_name, voice))
    return _application(Host(None, reader, config, models, Metrics(None)))


def _application(host: Host) -> Starlette:
    config, metrics = host.config, host.metrics
    forms = [form for form in FORMS.values() if form.is_served(config) and form.kinds & host.kinds]
    routes = [
        Route(endpoint.path, _guarded(host, form, endpoint), methods=[endpoint.method])
        for form in forms
        for endpoint in form.endpoints
    ]
    handlers: dict[Any, Any] = {HTTPException: _no_route, Exception: _failed}
    middleware = [Middleware(Recorded, metrics=metrics, logs=config.request_log)]
    if origins := config.allowed_origins:
        names: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **names, allow_private_network=True))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


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
            refusal = refusal_of(error)
            record_of(http).refusal = str(refusal)
            return form.error(refusal)

    return run


def _check_caller(config: ServeConfig, headers: Mapping[str, str]) -> None:
    """Raise BadRequestError for a page of an origin that is not let in, or a request without the key.

    Where no key is set, the server answers to this machine's own names alone.
    """
    if reason := foreign_page(headers, config.allowed_origins, any_host=config.api_key is not None):
        raise BadRequestError(reason, 403)
    if config.api_key is None:
        return
    key = headers.get("x-api-key", headers.get("authorization", "").removeprefix("Bearer "))
    spellings = {config.api_key.encode(errors="replace"), config.api_key.encode("latin-1", errors="replace")}
    if not any(hmac.compare_digest(key.encode("latin-1"), spelling) for spelling in spellings):  # bytes, as they came
        message = "no or a wrong API key: send it as a bearer token, or as x-api-key"
        raise BadRequestError(message, 401, code="invalid_api_key")


async def _no_route(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path} is not served: {error.detail}"
    response = openai_error(BadRequestError(message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _failed(_: HttpRequest, __: Exception) -> Response:
    return openai_error(BadRequestError("an error of the server, which its log shows", 500))
