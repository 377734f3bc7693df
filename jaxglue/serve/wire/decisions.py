"""Decisions in one pass: System One's questions by id, and OpenAI's decisions in a list."""

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxglue.data.questions import (
    CHOICE,
    SCORE,
    YES_NO,
    Question,
    expected_level,
    make_question,
    read_questions,
    read_state,
)
from jaxglue.generation.reading import decisions, probabilities
from jaxglue.objectives.decide import label_masses
from jaxglue.serve.fields import MOST_IMAGES, read_body
from jaxglue.serve.host import Host
from jaxglue.serve.reading import Read
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.sent import read_parts
from jaxglue.serve.wire import Endpoint, Form

MOST_QUESTIONS = 400
_SYSTEM_ONE = {"state", "questions", "instructions"}
_OPENAI = {"input", "questions", "instructions"}
_TYPES = {"predicate": YES_NO, "choice": CHOICE, "score": SCORE}


async def _system_one(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, {"model", *_SYSTEM_ONE}, sees=_sees(host))
    model = host.models.find(body.get("model"))
    questions = read_questions(body.get("questions"), most=MOST_QUESTIONS)
    state, images = read_parts(body.get("state"), "state")
    read, found = await _ask(host, read_state(state), questions, _instructions(body), images)
    pairs = zip(questions.items(), found, strict=True)
    answers = {name: _system_one_answer(question, p) for (name, question), p in pairs}
    masses = zip(questions, label_masses(read.found).tolist(), strict=True)
    diagnostics = {name: {"label_mass": mass} for name, mass in masses}
    usage = {"input_tokens": read.tokens, "output_tokens": len(questions)}
    identifier = f"sysone-{uuid.uuid4().hex}"
    head = {"id": identifier, "model": model.name}
    return JSONResponse({**head, "answers": answers, "usage": usage, "diagnostics": diagnostics})


async def _openai(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, {"model", *_OPENAI}, sees=_sees(host))
    model, listed = host.models.find(body.get("model")), body.get("questions")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_QUESTIONS:
        raise BadRequestError(f"questions must be a list of 1 to {MOST_QUESTIONS} questions", parameter="questions")
    asked = [_openai_question(index, each) for index, each in enumerate(listed)]
    questions = {str(index): question for index, (_, question, _) in enumerate(asked)}
    state, images = _input(body.get("input"))
    read, found = await _ask(host, state, questions, _instructions(body), images)
    answers = [_openai_answer(*each, p) for each, p in zip(asked, found, strict=True)]
    usage = {
        "input_tokens": read.tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(asked),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read.tokens + len(asked),
    }
    head = {"id": f"dec_{uuid.uuid4().hex}", "object": "decision", "created_at": int(time.time()), "model": model.name}
    return JSONResponse({**head, "answers": answers, "usage": usage})


def _sees(host: Host) -> bool:
    return host.reading.readers["decide"].sees


async def _ask(
    host: Host, state: str, questions: Mapping[str, Question], system: str | None, images: Sequence[Any]
) -> tuple[Read, list[np.ndarray]]:
    """Return the probabilities of each question's options."""
    if len(images) > MOST_IMAGES:
        raise BadRequestError(f"{len(images)} images: at most {MOST_IMAGES} are taken")
    service = host.reading
    make = partial(decisions, states=[(state, questions)], system=system, media=images)
    read = await service.read("decide", make)
    return read, probabilities(service.readers["decide"], read.found, list(questions.values()))


def _instructions(body: dict[str, Any]) -> str | None:
    """Return the request's instructions, which are the system message."""
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise BadRequestError("instructions must be a text", parameter="instructions")
    return instructions or None


def _system_one_answer(question: Question, p: np.ndarray) -> dict[str, Any]:
    best = int(p.argmax())
    if question.type == YES_NO:
        return {"type": YES_NO, "noul": float(p[0])}
    if question.type == CHOICE:
        names = [option.name for option in question.options]
        by_name = dict(zip(names, p.tolist(), strict=True))
        return {"type": CHOICE, "choice": names[best], "confidence": float(p[best]), "probabilities": by_name}
    legend = {str(level): option.name for level, option in enumerate(question.options)}
    by_level = {str(level): float(each) for level, each in enumerate(p)}
    score = expected_level(p.tolist())
    return {
        "type": SCORE,
        "score": score,
        "confidence": float(p[best]),
        "legend": legend,
        "probabilities": by_level,
    }


def _openai_question(index: int, value: Any) -> tuple[str | None, Question, list[Any]]:
    """Return a question's name, the question, and the values that its options stand for."""
    where = f"questions[{index}]"
    if not isinstance(value, dict) or value.get("type") not in [*_TYPES]:
        raise BadRequestError(f"{where}: type must be one of {', '.join(_TYPES)}", parameter=where)
    if unknown := sorted(value.keys() - {"type", "name", "instructions", "choices", "levels"}):
        raise BadRequestError(f"{where}: unknown parameter {unknown[0]!r}", parameter=f"{where}.{unknown[0]}")
    kind, name, instructions = _TYPES[value["type"]], value.get("name"), value.get("instructions")
    if not isinstance(name, str | None) or not isinstance(instructions, str | None):
        raise BadRequestError(f"{where}: name and instructions must be texts", parameter=where)
    values: list[Any] = []
    criteria: Any = None
    if kind != YES_NO:
        field = "choices" if kind == CHOICE else "levels"
        key = "value" if kind == CHOICE else "label"
        listed = value.get(field)
        if not isinstance(listed, list) or not all(isinstance(each, dict) and key in each for each in listed):
            raise BadRequestError(f"{where}.{field} must be a list of objects with {key}", parameter=f"{where}.{field}")
        values = [each[key] for each in listed]
        distinct = {(type(each), each) for each in values if isinstance(each, str | bool)}
        if len(distinct) < len(values):
            raise BadRequestError(f"{where}.{field}: values must be texts or booleans, and distinct", parameter=where)
        described = [each.get("description") for each in listed]
        if not all(isinstance(text, str | None) for text in described):
            raise BadRequestError(f"{where}.{field}: descriptions must be texts", parameter=f"{where}.{field}")
        criteria = _criteria(kind, values, described)
    try:
        return name, make_question(kind, instructions or "", criteria), values
    except ValueError as error:
        raise BadRequestError(f"{where}: {error}", parameter=where) from error


def _criteria(kind: str, values: Sequence[Any], described: Sequence[Any]) -> Any:
    names = [str(value).lower() if isinstance(value, bool) else value for value in values]
    if kind == CHOICE:
        if len(set(names)) < len(names):  # "true" beside true
            names = [f"{name} ({type(value).__name__})" for name, value in zip(names, values, strict=True)]
        return dict(zip(names, described, strict=True))
    return [name if text is None else f"{name} - {text}" for name, text in zip(names, described, strict=True)]


def _openai_answer(name: str | None, question: Question, values: Sequence[Any], p: np.ndarray) -> dict[str, Any]:
    best = int(p.argmax())
    if question.type == YES_NO:
        return {"type": "predicate", "name": name, "probability": float(p[0])}
    if question.type == CHOICE:
        listed = [{"value": value, "probability": float(each)} for value, each in zip(values, p, strict=True)]
        head = {"type": "choice", "name": name, "choice": values[best]}
    else:
        listed = [
            {"value": level, "label": label, "probability": float(each)}
            for level, (label, each) in enumerate(zip(values, p, strict=True))
        ]
        head = {"type": "score", "name": name, "score": expected_level(p.tolist())}
    return {**head, "confidence": float(p[best]), "probabilities": listed}


def _input(value: Any) -> tuple[str, Sequence[Any]]:
    """Return the text of an input, and its images: a text, or messages, each behind its role."""
    if isinstance(value, str):
        return read_state(value), ()
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise BadRequestError("input must be a text, or a list of messages and tool calls", parameter="input")
    shown = [read_parts(each.get("content"), "input") for each in value]
    lines = [_message({**each, "content": content}) for each, (content, _) in zip(value, shown, strict=True)]
    return read_state("\n".join(line for line in lines if line)), [image for _, images in shown for image in images]


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise BadRequestError("parts of a message's content must be texts", parameter="input")
        content = "\n".join(str(text) for text in texts)
    if isinstance(content, str):
        return f"{message.get('role', 'user')}: {content}"
    if message.get("type") == "function_call":
        return f"call {message.get('name')}: {message.get('arguments')}"
    if message.get("type") == "function_call_output":
        return f"result: {message.get('output')}"
    raise BadRequestError("input: an item is neither a message nor a tool call", parameter="input")


FORM = Form(
    (Endpoint("/v1/systemone", _system_one), Endpoint("/v1/decisions", _openai)),
    kinds=frozenset({"decide"}),
)
