"""Bodies of requests, read and checked field by field, with errors that name the parameter."""

import asyncio
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from jaxglue.generation.config import SamplingConfig
from jaxglue.serve.lanes import paced
from jaxglue.serve.record import record_of
from jaxglue.serve.refusals import BadRequestError
from jaxglue.settings.spelling import nearest

_LARGEST_BODY, _BODY_SECONDS = 4 * 2**20, 60.0
_LARGE_BODY = 2**18
"""Bytes of a body that takes more than some milliseconds to parse."""
_LARGEST_WITH_IMAGES = 16 * 2**20
_MOST_CONTAINERS = _LARGE_BODY
"""Lists and objects of a body, each of which takes a microsecond, at most; a body that is not large has fewer."""
_MOST_ANSWERS, MOST_PROMPTS, MOST_IMAGES, MOST_PAIRS = 16, 128, 16, 64
MOST_LIKELY = 20
"""Likely tokens beside each of an answer's, at most."""
_SAMPLING: dict[str, tuple[Any, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, 2**31 - 1),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -1e3, 1e3),
    "frequency_penalty": (float, -1e3, 1e3),
    "seed": (int, -(2**53), 2**53),
}
"""Numbers that a request may set: type, least and greatest value."""
_GRAMMARS = {
    "json": (dict, "a JSON schema, as an object or text"),
    "regex": (str, "a regular expression"),
    "choice": (list, "a list of texts that are not empty"),
    "grammar": (str, "a grammar in Lark's notation"),
}
"""Kinds of grammars and their values; requests give `guided_…` or an entry of `structured_outputs`, as in vLLM."""
_SHARED = {"model", "stop", "stream", "stream_options", "logit_bias", "logprobs", "max_tokens", "n", "stop_token_ids"}
_SHARED |= {
    "max_completion_tokens",
    "structured_outputs",
    "response_format",
    *(f"guided_{kind}" for kind in _GRAMMARS),
    *_SAMPLING,
}
CHAT = _SHARED | {"messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
CHAT |= {"chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"}
COMPLETION = _SHARED | {"prompt", "echo", "images"}
"""Parameters of requests."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (0, 1),
    "chat_template": ("",),
    "conversation": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "ebnf": (),
    "echo": (False,),
    "enable_thinking": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "previous_response_id": ("",),
    "prompt": (),
    "prompt_logprobs": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Parameters of other servers that change an answer and are not served, with the values that ask for nothing."""
_NOTHING: tuple[Any, ...] = (False, 0, 1, "", [], {})
"""Values that ask for nothing of a parameter that another endpoint has."""


async def read_body(http: HttpRequest, known: Collection[str], *, sees: bool = False) -> dict[str, Any]:
    """Return the body's object, which may be larger where the model sees images.

    Parameters beside those known are left out, unless they would change the answer, or are likely to be misspelled.

    Of a model that sees images it may be larger.

    Raises:
        BadRequestError: it is too large, no JSON object, or has such a parameter.
    """
    parts, size, largest = [], 0, _LARGEST_WITH_IMAGES if sees else _LARGEST_BODY
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in http.stream():
                size += len(part)
                if size > largest:
                    raise BadRequestError(f"the body is larger than {largest / 2**20:.0f} MiB", 413)
                parts.append(part)
    except TimeoutError:
        raise BadRequestError(f"the body takes more than {_BODY_SECONDS:.0f} s", 408) from None
    content = b"".join(parts)
    try:
        body = await paced(_parsed, content) if len(content) > _LARGE_BODY else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    names = set(known)
    for name in sorted(body.keys() - names):
        neutral = _REFUSED.get(name, _NOTHING if name in CHAT | COMPLETION else None)
        if neutral is not None and body[name] is not None and not any(_same(body[name], value) for value in neutral):
            message = f"{name} is not supported, and would change the answer: leave it out"
            raise BadRequestError(message, parameter=name)
        if neutral is None and (hint := nearest(name, names)):
            raise BadRequestError(f"unknown parameter: {name:.100}{hint}", parameter=name)
        record_of(http).ignored.append(name)
    return {name: value for name, value in body.items() if name in names}


def _parsed(content: bytes) -> Any:
    """Return the value of a large body; raise BadRequestError for one of too many lists and objects."""
    if (count := content.count(b"[") + content.count(b"{")) > _MOST_CONTAINERS:
        raise BadRequestError(f"the body has about {count:,} lists and objects: at most {_MOST_CONTAINERS:,} are read")
    return json.loads(content)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat; raise BadRequestError for anything else."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequestError("messages must be a list of objects, and not empty", parameter="messages")
    return messages


def read_prompts(body: dict[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion, of texts or token ids; raise BadRequestError for anything else."""
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and not any(type(token) is int for token in prompt)
    prompts: list[Any] = prompt if many else [prompt]  # type: ignore[assignment]
    if not 0 < len(prompts) <= MOST_PROMPTS or not all(
        isinstance(p, str) or (isinstance(p, list) and p and all(type(token) is int for token in p)) for p in prompts
    ):
        wanted = f"a text or a list of token ids, and not empty, or a list of at most {MOST_PROMPTS} of these"
        raise BadRequestError(f"prompt must be {wanted}", parameter="prompt")
    return prompts


def read_sampling(body: dict[str, Any], defaults: SamplingConfig, room: int, seed: int) -> SamplingConfig:
    """Return the sampling that a body asks for.

    Args:
        body: of the request.
        defaults: of settings that it leaves out.
        room: tokens of an answer at most, which a larger limit means, too.
        seed: that it leaves out.

    Raises:
        BadRequestError: a value of another type, or outside of its range.
    """
    stated = {name: read_number(body, name, *limits) for name, limits in _SAMPLING.items()}
    settings = {name: getattr(defaults, name) for name in _SAMPLING} | {"seed": seed}
    settings |= {name: value for name, value in stated.items() if value is not None}
    names = ("max_completion_tokens", "max_output_tokens")
    name = next((name for name in names if body.get(name) is not None), "max_tokens")
    tokens = read_number(body, name, int, 1, 2**31 - 1)
    stop = defaults.stop if body.get("stop") is None else _stops(body)
    return SamplingConfig(**settings, max_tokens=min(room, tokens or room), stop=stop)


def read_count(body: dict[str, Any]) -> int:
    """Return the answers to each prompt."""
    return read_number(body, "n", int, 1, _MOST_ANSWERS) or 1


def read_usage(body: dict[str, Any]) -> bool:
    """Return whether a stream ends with the numbers of tokens."""
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise BadRequestError("stream_options must be an object", parameter="stream_options")
    return bool(options and options.get("include_usage"))


def read_log_probs(body: dict[str, Any], *, chat: bool) -> int | None:
    """Return the likely tokens to report beside each of an answer's; None for no log-probabilities."""
    if not chat:
        wanted = body.get("logprobs")
        return int(wanted) or None if isinstance(wanted, bool) else read_number(body, "logprobs", int, 0, MOST_LIKELY)
    count = read_number(body, "top_logprobs", int, 0, MOST_LIKELY)
    if count and not body.get("logprobs"):
        raise BadRequestError("top_logprobs come with logprobs: set it to true", parameter="top_logprobs")
    return count or 0 if body.get("logprobs") else None


def read_placed(body: dict[str, Any], prompts: Sequence[str | list[int]]) -> list[tuple[int, Any]]:
    """Return the first token and the value of each image of a completion; none without."""
    images = body.get("images")
    if images in (None, []):
        return []
    if len(prompts) != 1 or isinstance(prompts[0], str):
        raise BadRequestError("images are for one prompt, of token ids: send chats for texts", parameter="images")
    if not isinstance(images, list) or len(images) > MOST_IMAGES:
        raise BadRequestError(f"images must be a list of at most {MOST_IMAGES}", parameter="images")
    for image in images:
        token = image.get("token") if isinstance(image, dict) else None
        if type(token) is not int or not 0 <= token < len(prompts[0]):
            raise BadRequestError("each of images needs image_url and token, its first in prompt", parameter="images")
    return [(image["token"], image) for image in images]


def read_echo(body: dict[str, Any]) -> bool:
    """Return whether a completion repeats its prompt; one of 0 tokens does nothing else."""
    return read_flag(body, "echo") or False


def read_text(body: dict[str, Any], name: str) -> str:
    """Return a text of the body that may not be missing, empty or long."""
    if not isinstance(value := body.get(name), str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise BadRequestError(f"{name} must be a text, and not empty", parameter=name)
    return value


def read_flag(body: dict[str, Any], name: str) -> bool | None:
    """Return a truth value of the body; None without it."""
    if not isinstance(value := body.get(name), bool | None):
        raise BadRequestError(f"{name} must be true or false, got {value!r:.100}", parameter=name)
    return value


def read_continuation(body: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a chat's answer goes on with its last message, and whether it begins a turn of its own.

    Raises:
        BadRequestError: both, as vLLM says, or a last message that is not the assistant's.
    """
    continues = read_flag(body, "continue_final_message") or False
    begins = read_flag(body, "add_generation_prompt")
    if continues and begins:
        message = "continue_final_message goes on with the last message: set add_generation_prompt to false"
        raise BadRequestError(message, parameter="continue_final_message")
    return continues, not continues and begins is not False


def read_variables(body: dict[str, Any], template: str) -> dict[str, Any]:
    """Return further variables for the chat template; effort is its own variable, or thinking at all."""
    variables = body.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise BadRequestError("chat_template_kwargs must be an object", parameter="chat_template_kwargs")
    if (effort := body.get("reasoning_effort")) is None:
        return variables or {}
    if not isinstance(effort, str):
        raise BadRequestError("reasoning_effort must be a text", parameter="reasoning_effort")
    effort_or_thinking = {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
    for name, value in effort_or_thinking.items():
        if re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", template) and not (
            name == "reasoning_effort" and effort == "none"
        ):
            return {name: value, **(variables or {})}
    message = f"the model's chat template knows no effort of reasoning, such as {effort!r:.40}"
    raise BadRequestError(message, parameter="reasoning_effort")


def read_number(body: dict[str, Any], name: str, kind: Any, least: float, greatest: float) -> Any:
    """Return a number of the body; None without it."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= greatest:
        raise BadRequestError(
            f"{name} must be a number from {least:g} to {greatest:g}, got {value!r:.100}", parameter=name
        )
    return kind(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body["stop"]
    stops = [stop] if isinstance(stop, str) else stop
    fits = isinstance(stops, list) and len(stops) <= 16
    if not fits or not all(isinstance(s, str) and 0 < len(s) < 1024 and _is_unicode(s) for s in stops):
        wanted = "a text or a list of at most 16 texts of 1 to 1,023 characters"
        raise BadRequestError(f"stop must be {wanted}", parameter="stop")
    return tuple(stops)


def read_stop_tokens(body: dict[str, Any], vocabulary: int) -> list[int]:
    """Return further tokens that end the answer."""
    tokens = [] if body.get("stop_token_ids") is None else body["stop_token_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        message = f"stop_token_ids must be a list of token ids below {vocabulary}"
        raise BadRequestError(message, parameter="stop_token_ids")
    return tokens


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_biases(body: dict[str, Any], vocabulary: int) -> dict[int, float]:
    """Return the sums to add to logits of tokens."""
    stated = {} if body.get("logit_bias") is None else body["logit_bias"]
    try:
        biases = {int(token): float(value) for token, value in stated.items()}
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise BadRequestError("logit_bias must map token ids to numbers", parameter="logit_bias") from error
    if not all(0 <= token < vocabulary and abs(value) <= 1e6 for token, value in biases.items()):
        message = f"logit_bias must map token ids below {vocabulary} to numbers from -1e6 to 1e6"
        raise BadRequestError(message, parameter="logit_bias")
    return biases


def read_tool_choice(body: dict[str, Any], functions: Collection[str]) -> list[str] | None:
    """Return the functions of which the answer calls one; None where the model chooses whether to.

    Args:
        body: of the request.
        functions: the names of those that the request's tools offer.

    Raises:
        BadRequestError: another choice, or no such function.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if not functions:
            raise BadRequestError("tool_choice is required, but tools offer no function", parameter="tool_choice")
        return list(functions)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        wanted = 'none, auto, required or {"type": "function", "function": {"name": …}}'
        raise BadRequestError(f"tool_choice must be {wanted}", parameter="tool_choice")
    if name not in functions:
        raise BadRequestError(f"tool_choice names {name!r:.100}, which tools do not offer", parameter="tool_choice")
    return [name]


def read_grammar(body: dict[str, Any], calls: str | None = None) -> tuple[str, Any] | None:
    """Return the kind and value of the answer's grammar, if the body gives one; kinds are methods of `Grammars`.

    Args:
        body: of the request.
        calls: grammar of the calls that the answer must have.

    Raises:
        BadRequestError: several grammars, or a malformed one.
    """
    stated = _grammars(body) + ([] if calls is None else [("calls", calls)])
    if len(stated) > 1:
        wanted = "one of response_format, guided_…, a tool_choice that forces a call, and others"
        raise BadRequestError(f"an answer follows one grammar: give {wanted}")
    return next((("lark" if kind == "grammar" else kind, value) for kind, value in stated), None)


def _grammars(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the kinds and values of the grammars that a request gives, schemas as objects."""
    options = body.get("structured_outputs")
    is_read = isinstance(options, dict) and options.keys() <= _GRAMMARS.keys()
    if options is not None and not (is_read and any(value is not None for value in options.values())):
        raise BadRequestError(f"structured_outputs must be an object with one of: {', '.join(_GRAMMARS)}")
    entries = [(f"structured_outputs.{kind}", kind, value) for kind, value in (options or {}).items()]
    entries += [(f"guided_{kind}", kind, body.get(f"guided_{kind}")) for kind in _GRAMMARS]
    grammars = [(kind, _value(name, kind, value)) for name, kind, value in entries if value is not None]
    schema = None if body.get("response_format") is None else _schema(body["response_format"])
    return grammars if schema is None else [*grammars, ("json", schema)]


def _value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a grammar, checked, with a schema read from its text."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"{name} is no JSON: {error}") from error
    texts = kind != "choice" or (isinstance(value, list) and value and all(isinstance(t, str) and t for t in value))
    type_, wanted = _GRAMMARS[kind]
    if not isinstance(value, type_) or not texts:
        raise BadRequestError(f"{name} must be {wanted}")
    return value


def _schema(wanted: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise BadRequestError(
            "response_format must have the type text, json_object, or json_schema with a name and schema in json_schema"
        )
    return described["schema"]
