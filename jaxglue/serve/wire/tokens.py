"""Tokens of texts and chats, and texts of tokens, in vLLM's form."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.generation.engine import require_known
from jaxglue.serve.call import chat_prompt
from jaxglue.serve.fields import CHAT, read_body, read_flag
from jaxglue.serve.host import Host
from jaxglue.serve.lanes import beside
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.wire import Endpoint, Form

_TEXT = {"model", "prompt", "add_special_tokens", "return_token_strs"}


async def _tokenize(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _TEXT | CHAT, sees=host.sees)
    tokenizer = host.models.find(body.get("model")).voice.tokenizer
    if "messages" in body:
        tokens = (await chat_prompt(host, body, bounded=False)).tokens
    else:
        text, special = body.get("prompt"), read_flag(body, "add_special_tokens")
        if not isinstance(text, str):
            raise BadRequestError("prompt must be a text, or send messages", parameter="prompt")
        readable = text.encode(errors="replace").decode()
        tokens = await beside(len(text), tokenizer.encode, readable, add_special_tokens=special is not False)
    texts = tokenizer.convert_ids_to_tokens(tokens) if read_flag(body, "return_token_strs") else None
    counted = {"count": len(tokens), "max_model_len": host.service.length}
    return JSONResponse({**counted, "tokens": list(tokens), "token_strs": texts})


async def _detokenize(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, {"model", "tokens"})
    tokenizer, tokens = host.models.find(body.get("model")).voice.tokenizer, body.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise BadRequestError("tokens must be a list of token ids", parameter="tokens")
    if tokens:
        require_known(tokens, host.assistant.config.vocab_size, "tokens")
    text: Any = await beside(len(tokens), tokenizer.decode, tokens)
    return JSONResponse({"prompt": text})


async def _info(host: Host, _: HttpRequest) -> Response:
    tokenizer = host.models.base.voice.tokenizer
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    specials = dict.fromkeys(("bos_token", "eos_token", "pad_token")) | named
    described = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": host.service.length}
    return JSONResponse({**described, **specials, "chat_template": tokenizer.chat_template})


FORM = Form(
    (
        Endpoint("/tokenize", _tokenize),
        Endpoint("/detokenize", _detokenize),
        Endpoint("/tokenizer_info", _info, "GET"),
    )
)
