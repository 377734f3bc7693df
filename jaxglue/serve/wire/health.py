"""Whether the server answers."""

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.wire import EVERY, Endpoint, Form


async def _health(host: Host, _: HttpRequest) -> Response:
    if host.failure:
        raise BadRequestError(host.failure, 503)
    return JSONResponse({"status": "ok"})


FORM = Form((Endpoint("/health", _health, "GET", is_open=True),), kinds=EVERY)
