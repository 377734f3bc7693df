"""Relevance of documents to a query, as Cohere's and Jina's clients ask for it."""

import uuid
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.data.read_rows import UnitText
from jaxglue.generation.reading import PartReader, judged, relevances
from jaxglue.serve.fields import read_body, read_flag, read_number
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.sent import Sent, read_sent, require_few
from jaxglue.serve.wire import Endpoint, Form

MOST_DOCUMENTS = 1024
_KNOWN = {"model", "query", "documents", "top_n", "return_documents", "instruction"}


async def _rerank(host: Host, http: HttpRequest) -> Response:
    service = host.reading
    body = await read_body(http, _KNOWN, sees=service.readers["rerank"].sees)
    model, documents = host.models.find(body.get("model")), _documents(body)
    query = read_sent(body.get("query"), "query")
    require_few([query, *documents])
    instruction = body.get("instruction")
    if not isinstance(instruction, str | None):
        raise BadRequestError("instruction must be a text", parameter="instruction")
    count = read_number(body, "top_n", int, 1, 2**31 - 1) or len(documents)

    def make(reader: PartReader) -> list[UnitText]:
        return [judged(reader, query.read(reader), [each.read(reader) for each in documents], instruction)]

    read = await service.read("rerank", make)
    scores = relevances(read.found)
    order = np.argsort(-scores, kind="stable")[:count].tolist()
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": float(scores[index])} for index in order]
    if read_flag(body, "return_documents"):
        results = [each | {"document": _written(body, documents[each["index"]], each["index"])} for each in results]
    usage = {"total_tokens": read.tokens, "prompt_tokens": read.tokens}
    return JSONResponse({"id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "results": results, "usage": usage})


def _written(body: dict[str, Any], document: Sent, index: int) -> Any:
    """Return a document as clients read it; one with images as it came."""
    return body["documents"][index] if document.media else {"text": document.text}


def _documents(body: dict[str, Any]) -> list[Sent]:
    """Return the documents."""
    listed = body.get("documents")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_DOCUMENTS:
        raise BadRequestError(f"documents must be a list of 1 to {MOST_DOCUMENTS}", parameter="documents")
    return [read_sent(each, f"documents[{index}]") for index, each in enumerate(listed)]


FORM = Form((Endpoint("/v1/rerank", _rerank), Endpoint("/rerank", _rerank)), kinds=frozenset({"rerank"}))
