"""Answers to token ids as token ids with their log-probabilities, in vLLM's form, which loops of RL read.

What verifiers' training client, and with it prime-rl, asks: the client renders chats and reads answers itself.
"""

import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.answer_text import usage
from jaxglue.serve.call import make_call, read_few
from jaxglue.serve.fields import COMPLETION, read_body
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.under_way import Answers
from jaxglue.serve.wire import Endpoint, Form

_BODY = {"model", "token_ids", "sampling_params", "cache_salt", "priority", "stream"}
_PLACED = {"cache_salt", "priority", "skip_special_tokens", "routed_experts_prompt_start", "stream"}
"""Parameters that change no token here."""


async def _generate(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _BODY)
    tokens, sampling = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise BadRequestError("token_ids must be a list of token ids, and not empty", parameter="token_ids")
    if not isinstance(sampling, dict):
        raise BadRequestError("sampling_params must be an object", parameter="sampling_params")
    asked = {name: value for name, value in sampling.items() if name not in _PLACED and value is not None}
    if unknown := sorted(asked.keys() - COMPLETION):
        raise BadRequestError(f"sampling_params: {', '.join(unknown)[:100]} is not supported: leave it out")
    completion: dict[str, Any] = {**asked, "model": body.get("model"), "logprobs": 0}
    read_few(host, completion, 1)
    call = await make_call(host, completion, [tokens], chat=False)
    answers = Answers(host, http, call)
    await answers.finish(http)
    choices = [
        {
            "index": index,
            "token_ids": [token for token, _ in text.sampled],
            "logprobs": {
                "content": [{"token": f"token_id:{token}", "logprob": value} for token, value in text.sampled]
            },
            "finish_reason": text.finish,
        }
        for index, text in enumerate(answers.texts)
    ]
    counts = usage(call.requests, answers.texts)
    return JSONResponse({"request_id": f"generate-{uuid.uuid4().hex}", "choices": choices, "usage": counts})


FORM = Form((Endpoint("/inference/v1/generate", _generate),))
