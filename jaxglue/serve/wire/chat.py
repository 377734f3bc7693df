"""OpenAI's chat completions."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.serve.answer_text import usage
from jaxglue.serve.call import Call, chat_call
from jaxglue.serve.fields import CHAT, read_body
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError, openai_body
from jaxglue.serve.under_way import Answers, EventStream, sent
from jaxglue.serve.wire import Endpoint, Form


async def _chat(host: Host, http: HttpRequest) -> Response:
    return await answer(host, http, await chat_call(host, await read_body(http, CHAT, sees=host.sees)))


async def answer(host: Host, http: HttpRequest, call: Call) -> Response:
    """Return the answers to a chat or completion, whole or as a stream; errors as of `Answers`."""
    answers = Answers(host, http, call)
    if call.stream:
        return EventStream(_chunks(_head(call, stream=True), call, answers), answers)
    await answers.finish(http)
    choices = [text.choice(index) for index, text in enumerate(answers.texts)]
    counts = usage(call.requests, answers.texts)
    return JSONResponse({**_head(call, stream=False), "choices": choices, "usage": counts})


async def _chunks(head: dict[str, Any], call: Call, answers: Answers) -> AsyncIterator[str]:
    """Yield server-sent events."""
    if call.usage:
        head = {**head, "usage": None}
    try:
        if call.chat:
            for index in range(len(answers.texts)):
                start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield sent({**head, "choices": [start]})
        async for index in answers.progress():
            if chunk := answers.texts[index].chunk(index):
                yield sent({**head, "choices": [chunk]})
        if call.usage:
            yield sent({**head, "choices": [], "usage": usage(call.requests, answers.texts)})
        yield "data: [DONE]\n\n"
    except BadRequestError as error:
        yield sent(openai_body(error))


def _head(call: Call, *, stream: bool) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * stream if call.chat else "text_completion"
    name = ("chatcmpl-" if call.chat else "cmpl-") + uuid.uuid4().hex
    return {"id": name, "object": kind, "created": int(time.time()), "model": call.model}


FORM = Form((Endpoint("/v1/chat/completions", _chat),))
