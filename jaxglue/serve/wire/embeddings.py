"""OpenAI's embeddings."""

import base64
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.data.read_rows import PartText, UnitText
from jaxglue.data.text_rows import ANCHOR, POSITIVE
from jaxglue.generation.reading import PartReader, texts, vectors
from jaxglue.serve.fields import read_body, read_number
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.sent import Sent, read_sent, require_few
from jaxglue.serve.wire import Endpoint, Form

MOST_TEXTS = 2048
_KNOWN = {"model", "input", "messages", "encoding_format", "dimensions", "input_type"}


async def _embed(host: Host, http: HttpRequest) -> Response:
    service = host.reading
    body = await read_body(http, _KNOWN, sees=service.readers["embed"].sees)
    model, inputs, form = host.models.find(body.get("model")), _inputs(body), body.get("encoding_format") or "float"
    require_few(inputs)
    if form not in ("float", "base64"):
        raise BadRequestError("encoding_format must be float or base64", parameter="encoding_format")
    if body.get("input_type") not in (None, "query", "document"):
        raise BadRequestError("input_type must be query or document", parameter="input_type")
    width = service.readers["embed"].model.config.hidden_size
    dimensions = read_number(body, "dimensions", int, 1, width)
    is_query = body.get("input_type") == "query"
    read = await service.read("embed", lambda reader: _units(reader, inputs, query=is_query))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, form)}
        for index, row in enumerate(vectors(read.found, dimensions))
    ]
    usage = {"prompt_tokens": read.tokens, "total_tokens": read.tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def _written(row: np.ndarray, form: str) -> Any:
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "base64" else row.tolist()


def _units(reader: PartReader, inputs: list[Sent | list[int]], *, query: bool) -> list[UnitText]:
    """Return the units of texts with their images, and of token ids, which are read as they are."""
    vocabulary, units = reader.model.config.vocab_size, list[UnitText]()
    for each in inputs:
        if isinstance(each, Sent):
            units += texts(reader, [each.read(reader)], query=query)
            continue
        if not all(0 <= token < vocabulary for token in each):
            raise ValueError(f"input holds a token id outside of the vocabulary of {vocabulary:,}")
        tokens = np.array(each, np.int32).tobytes()
        units.append(UnitText([], [PartText(pieces=[tokens], kind=ANCHOR if query else POSITIVE)]))
    return units


def _inputs(body: dict[str, Any]) -> list[Sent | list[int]]:
    """Return texts with their images, or lists of token ids."""
    if body.get("messages") is not None:
        return [_message(body)]
    value = body.get("input")
    inputs: Any = [value] if isinstance(value, str | dict) or _is_ids(value) else value
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_TEXTS:
        raise BadRequestError(f"input must be a text, token ids, or a list of 1 to {MOST_TEXTS}", parameter="input")
    return [each if _is_ids(each) else read_sent(each, f"input[{index}]") for index, each in enumerate(inputs)]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _message(body: dict[str, Any]) -> Sent:
    """Return what a user's message shows, in which vLLM's clients send images."""
    messages = body["messages"]
    one = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    if body.get("input") is not None or not isinstance(one, dict) or one.get("role") != "user":
        wanted = "one of a user, and no input beside it: a text is read without a chat template"
        raise BadRequestError(f"messages must be {wanted}", parameter="messages")
    return read_sent({"content": one.get("content")}, "messages")


FORM = Form((Endpoint("/v1/embeddings", _embed),), kinds=frozenset({"embed"}))
