"""OpenAI's completions of texts and token ids."""

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxglue.generation.prompts import encode_prompt
from jaxglue.serve.call import make_call
from jaxglue.serve.fields import COMPLETION, read_body, read_echo, read_prompts
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.service import require_short
from jaxglue.serve.wire import Endpoint, Form
from jaxglue.serve.wire.chat import answer


async def _complete(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, COMPLETION)
    tokenizer, prompts = host.models.find(body.get("model")).voice.tokenizer, read_prompts(body)
    echo = [p if isinstance(p, str) else str(tokenizer.decode(p)) for p in prompts] if read_echo(body) else []
    encoded = [await _encode(host, tokenizer, prompt) for prompt in prompts]
    return await answer(host, http, await make_call(host, body, encoded, chat=False, echo=echo))


async def _encode(host: Host, tokenizer: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        await asyncio.to_thread(require_short, tokenizer, prompt, host.service.length)
        prompt = await asyncio.to_thread(encode_prompt, tokenizer, prompt, raw=True)
    if not prompt:  # an empty text, which some tokenizers begin with a token
        raise BadRequestError("prompt must not be empty: this tokenizer puts no token before it")
    return prompt


FORM = Form((Endpoint("/v1/completions", _complete),))
