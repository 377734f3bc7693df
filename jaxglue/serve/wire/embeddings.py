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
from jaxglue.serve.wire import Endpoint, Form

MOST_TEXTS = 2048
_KNOWN = {"model", "input", "encoding_format", "dimensions", "input_type"}


async def _embed(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _KNOWN)
    model, service = host.models.find(body.get("model")), host.reading
    inputs, form = _inputs(body), body.get("encoding_format") or "float"
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


def _units(reader: PartReader, inputs: list[Any], *, query: bool) -> list[UnitText]:
    """Return the units of texts, and of token ids, which are read as they are."""
    vocabulary, units = reader.model.config.vocab_size, list[UnitText]()
    for each in inputs:
        if isinstance(each, str):
            units += texts(reader, [each], query=query)
            continue
        if not all(0 <= token < vocabulary for token in each):
            raise ValueError(f"input holds a token id outside of the vocabulary of {vocabulary:,}")
        tokens = np.array(each, np.int32).tobytes()
        units.append(UnitText([], [PartText(pieces=[tokens], kind=ANCHOR if query else POSITIVE)]))
    return units


def _inputs(body: dict[str, Any]) -> list[Any]:
    """Return texts or lists of token ids."""
    value = body.get("input")
    one = isinstance(value, str) or (isinstance(value, list) and value and all(type(each) is int for each in value))
    inputs: Any = [value] if one else value
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_TEXTS:
        raise BadRequestError(f"input must be a text, token ids, or a list of 1 to {MOST_TEXTS}", parameter="input")
    for each in inputs:
        is_ids = isinstance(each, list) and each and all(type(token) is int for token in each)
        if not is_ids and not (isinstance(each, str) and each.strip()):
            raise BadRequestError("input: expected texts or lists of token ids that are not empty", parameter="input")
    return inputs


FORM = Form((Endpoint("/v1/embeddings", _embed),), kinds=frozenset({"embed"}))
