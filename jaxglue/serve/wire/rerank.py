"""Relevance of documents to a query, as Cohere's and Jina's clients ask for it."""

import uuid
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.generation.reading import judged, relevances
from jaxglue.serve.fields import read_body, read_flag, read_number
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.wire import Endpoint, Form

MOST_DOCUMENTS = 1024
_KNOWN = {"model", "query", "documents", "top_n", "return_documents", "instruction"}


async def _rerank(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, _KNOWN)
    model, query, documents = host.models.find(body.get("model")), body.get("query"), _documents(body)
    if not isinstance(query, str) or not query.strip():
        raise BadRequestError("query must be a text that is not empty", parameter="query")
    instruction = body.get("instruction")
    if not isinstance(instruction, str | None):
        raise BadRequestError("instruction must be a text", parameter="instruction")
    count = read_number(body, "top_n", int, 1, 2**31 - 1) or len(documents)
    read = await host.reading.read("rerank", lambda reader: [judged(reader, query, documents, instruction)])
    scores = relevances(read.found)
    order = np.argsort(-scores, kind="stable")[:count].tolist()
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": float(scores[index])} for index in order]
    if read_flag(body, "return_documents"):
        results = [each | {"document": {"text": documents[each["index"]]}} for each in results]
    usage = {"total_tokens": read.tokens, "prompt_tokens": read.tokens}
    return JSONResponse({"id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "results": results, "usage": usage})


def _documents(body: dict[str, Any]) -> list[str]:
    """Return the documents' texts."""
    listed = body.get("documents")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_DOCUMENTS:
        raise BadRequestError(f"documents must be a list of 1 to {MOST_DOCUMENTS} texts", parameter="documents")
    found = [each.get("text") if isinstance(each, dict) else each for each in listed]
    for index, each in enumerate(found):
        if not isinstance(each, str) or not each.strip():
            raise BadRequestError(f"documents[{index}] must be a text that is not empty", parameter="documents")
    return [str(each) for each in found]


FORM = Form((Endpoint("/v1/rerank", _rerank), Endpoint("/rerank", _rerank)), kinds=frozenset({"rerank"}))
