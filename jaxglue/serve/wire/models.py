"""The served models, as OpenAI and vLLM list them."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.host import Host
from jaxglue.serve.served_models import ServedModel
from jaxglue.serve.wire import EVERY, Endpoint, Form


async def _list(host: Host, _: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [_described(host, model) for model in host.models]})


async def _show(host: Host, http: HttpRequest) -> Response:
    return JSONResponse(_described(host, host.models.find(http.path_params["name"])))


def _described(host: Host, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxglue",
        "root": model.root or model.name,
        "parent": model.parent,
        "max_model_len": host.length,
    }


FORM = Form((Endpoint("/v1/models", _list, "GET"), Endpoint("/v1/models/{name:path}", _show, "GET")), kinds=EVERY)
