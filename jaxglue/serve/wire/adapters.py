"""Adapters loaded and unloaded while serving, in vLLM's form."""

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from jaxglue.serve.fields import read_body, read_text
from jaxglue.serve.host import Host
from jaxglue.serve.wire import Endpoint, Form


async def _load(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, {"lora_name", "lora_path"})
    assert host.adapters is not None
    await host.adapters.load(name := read_text(body, "lora_name"), read_text(body, "lora_path"))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, {"lora_name", "lora_int_id"})
    assert host.adapters is not None
    await host.adapters.unload(name := read_text(body, "lora_name"))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


FORM = Form(
    (Endpoint("/v1/load_lora_adapter", _load), Endpoint("/v1/unload_lora_adapter", _unload)),
    is_served=lambda config: config.adapter_folder is not None,
)
