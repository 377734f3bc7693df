"""Metrics for Prometheus."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxglue.serve.host import Host
from jaxglue.serve.wire import EVERY, Endpoint, Form


async def _metrics(host: Host, _: HttpRequest) -> Response:
    return Response(host.metrics.text(), media_type=CONTENT_TYPE_LATEST)


FORM = Form((Endpoint("/metrics", _metrics, "GET"),), kinds=EVERY)
