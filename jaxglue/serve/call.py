"""Parsed requests: a body's parameters as prompts, sampling and the way in which answers are written.

Chats are the common form: other protocols' bodies become those of chats, and their answers are written from a chat's.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from jaxglue.data.messages import content_texts, read_chat
from jaxglue.generation.assistant import Voice
from jaxglue.generation.prompts import render_messages
from jaxglue.generation.scheduler import Request
from jaxglue.serve.fields import (
    read_biases,
    read_count,
    read_flag,
    read_grammar,
    read_log_probs,
    read_messages,
    read_sampling,
    read_stop_tokens,
    read_tool_choice,
    read_usage,
    read_variables,
)
from jaxglue.serve.host import Host
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.service import TooLongError, require_short
from jaxglue.text.stream import special_stops
from jaxglue.text.thinking import Thought, thought_after
from jaxglue.text.tool_calls import call_grammar, format_of, parameters_of, schemas_of
from jaxglue.text.tool_formats import ToolFormat
from jaxglue.vision.rows import PromptImages

_MOST_IMAGES = 16
"""Images of a request."""


@dataclass(frozen=True)
class Call:
    """A parsed request."""

    model: str
    voice: Voice
    requests: list[Request]
    """One for each prompt."""
    stream: bool
    usage: bool
    """Report the tokens at the end of a stream."""
    log_probs: int | None
    """Likely tokens to report beside each of an answer's; None for no log-probabilities."""
    chat: bool
    thinks: Thought
    """State in which the answer begins."""
    functions: dict[str, dict[str, Any]]
    """The tools that the answer may call, with the schemas of their parameters."""
    form: ToolFormat | None
    """Format in which the model calls them; None without tools."""
    one_call: bool
    """Leave out calls after the first."""
    echo: Sequence[str]
    """Texts before the answers of completions, one for each prompt; empty for none."""
    named: bool
    """The request names the tool to call: an answer that calls it has stopped, as OpenAI says."""


@dataclass(frozen=True)
class ChatPrompt:
    """The text of a chat that an answer follows."""

    voice: Voice
    tokens: list[int]
    images: PromptImages | None
    thinks: Thought
    """State in which the answer begins."""
    schemas: dict[str, dict[str, Any]]
    """The tools that the answer may call, with the schemas of their arguments."""


async def chat_prompt(host: Host, body: dict[str, Any]) -> ChatPrompt:
    """Return the prompt of a chat's body.

    Raises:
        BadRequestError, ValueError: messages or tools that are malformed, or that the template leaves out.
        TooLongError: more tokens than the service takes.
    """
    voice, length = host.models.find(body.get("model")).voice, host.service.length
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    chat = host.assistant.attach(
        read_chat(read_messages(body), tools, "messages", sees=host.assistant.sight is not None)
    )
    if len(chat.images) > _MOST_IMAGES:
        raise BadRequestError(f"{len(chat.images)} images: at most {_MOST_IMAGES} are taken", parameter="messages")
    if host.config.system is not None:
        chat = chat.with_system(host.config.system)
    if len(chat.messages) > length:  # each takes more than a token
        raise TooLongError(f"{len(chat.messages):,} messages, and texts may have {length:,} tokens")
    contents = "\n".join(chain.from_iterable(content_texts(message["content"]) for message in chat.messages))
    await asyncio.to_thread(require_short, voice.tokenizer, contents, length)
    source = str(voice.tokenizer.chat_template)
    if "developer" not in source:  # such templates would leave the message out
        chat = chat.with_developer_as_system()
    options: dict[str, Any] = {"check": True, "needs_tools": True, "variables": read_variables(body, source)}
    template, text = render_messages(voice.tokenizer, chat, **options)
    await asyncio.to_thread(require_short, voice.tokenizer, text, length)
    # Beside the streams of others.
    prompt = await asyncio.to_thread(host.assistant.encode_rendered, template, text, chat.images)
    if chat.images and len(prompt.tokens) >= length:
        raise TooLongError(f"{len(prompt.tokens):,} tokens, and texts may have {length:,}")
    return ChatPrompt(voice, prompt.tokens, prompt.images, thought_after(text), schemas_of(chat.tools))


async def chat_call(host: Host, body: dict[str, Any]) -> Call:
    """Return a parsed chat; errors as of `chat_prompt` and `make_call`."""
    prompt = await chat_prompt(host, body)
    calls = _forced_calls(body, prompt.schemas, prompt.voice)
    state: dict[str, Any] = {"schemas": prompt.schemas, "calls": calls, "thinks": prompt.thinks}
    state["images"] = prompt.images
    return await make_call(host, body, [prompt.tokens], chat=True, **state)


def _forced_calls(body: dict[str, Any], schemas: Mapping[str, dict[str, Any]], voice: Voice) -> str | None:
    """Return the grammar of the calls that a chat asks for; None where the model chooses whether to call a tool."""
    if (names := read_tool_choice(body, schemas)) is None:
        return None
    several = body["tool_choice"] == "required" and read_flag(body, "parallel_tool_calls") is not False
    forced = {name: schemas[name] for name in names}
    return call_grammar(voice.tokenizer, forced, several=several)


async def make_call(
    host: Host,
    body: dict[str, Any],
    prompts: list[list[int]],
    *,
    chat: bool,
    schemas: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    calls: str | None = None,
    thinks: Thought = Thought.NONE,
    echo: Sequence[str] = (),
    images: PromptImages | None = None,
) -> Call:
    """Return a parsed request.

    Args:
        host: of the server.
        body: of the request.
        prompts: encoded.
        chat: report as in chats.
        schemas: of the tools that the answer may call.
        calls: grammar of the calls that it must have.
        thinks: state in which it begins.
        echo: texts before the answers, one for each prompt.
        images: of the prompts.

    Raises:
        BadRequestError, ValueError: parameters that are malformed, or beyond their bounds.
    """
    model = host.models.find(body.get("model"))
    voice, length, longest = model.voice, host.service.length, max(map(len, prompts))
    sampling = read_sampling(body, host.config.sampling, max(length - longest, 1), length, next(host.seeds))
    log_probs, count = read_log_probs(body, chat=chat), read_count(body)
    if len(prompts) * count > max(host.config.max_requests, 1):
        message = f"{len(prompts)} prompts with {count} answers each: at most {host.config.max_requests} are taken"
        raise BadRequestError(message, parameter="n")
    grammars, vocabulary = host.assistant, host.assistant.config.vocab_size
    make = partial(read_grammar, body, lambda: grammars.grammars.of(voice.tokenizer), calls, thinks=thinks)
    asked: dict[str, Any] = {
        "stop": {
            *voice.stops,
            *special_stops(voice.tokenizer, sampling.stop),
            *read_stop_tokens(body, vocabulary),
        },
        "logit_bias": read_biases(body, vocabulary),
        "ranks": voice.ranks,
        "grammar": await asyncio.to_thread(make),
        "top_log_probs": log_probs or 0,
        "n": count,
        "images": images,
    }
    return Call(
        model=model.name,
        voice=voice,
        requests=[Request(tokens, sampling, index, **asked) for index, tokens in enumerate(prompts)],
        stream=read_flag(body, "stream") or False,
        usage=read_usage(body),
        log_probs=log_probs,
        chat=chat,
        thinks=thinks,
        echo=echo,
        functions=parameters_of(schemas),
        form=format_of(str(voice.tokenizer.get_chat_template(tools=[]))) if schemas else None,
        one_call=read_flag(body, "parallel_tool_calls") is False,
        named=isinstance(body.get("tool_choice"), dict),
    )
