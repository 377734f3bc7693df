"""Parsed requests: a body's parameters as prompts, sampling and the way in which answers are written.

Chats are the common form: other protocols' bodies become those of chats, and their answers are written from a chat's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxglue.data.messages import Chat, content_texts, read_chat, without_images
from jaxglue.generation.assistant import Voice
from jaxglue.generation.grammar import Grammar
from jaxglue.generation.prompts import render_messages
from jaxglue.generation.scheduler import Request
from jaxglue.generation.scoring import PromptScores
from jaxglue.generation.sight import Prompt
from jaxglue.serve.fields import (
    MOST_IMAGES,
    MOST_PAIRS,
    read_biases,
    read_continuation,
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
from jaxglue.serve.lanes import beside, compile_grammar, is_long, paced
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.service import TooLongError, require_short
from jaxglue.text.stream import special_stops
from jaxglue.text.thinking import Thought, thought_after, thought_inside
from jaxglue.text.tool_calls import call_grammar, format_of, parameters_of, schemas_of
from jaxglue.text.tool_formats import ToolFormat
from jaxglue.vision.rows import PromptImages


class Echo(NamedTuple):
    """A prompt that a completion repeats."""

    text: str
    scores: PromptScores | None
    """Log-probabilities of its tokens, where they are asked for."""


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
    echo: Sequence[Echo]
    """Prompts that come before the answers of completions; empty for none."""
    empty: bool
    """Generate nothing: a completion that only repeats its prompts."""
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


async def chat_prompt(host: Host, body: dict[str, Any], *, bounded: bool = True) -> ChatPrompt:
    """Return the prompt of a chat's body.

    Args:
        host: of the server.
        body: of the request.
        bounded: refuse texts that are too long to answer, before they are rendered and encoded.

    Raises:
        BadRequestError, ValueError: messages or tools that are malformed, or that the template leaves out.
        TooLongError: more tokens than the service takes.
    """
    voice, length = host.models.find(body.get("model")).voice, host.service.length if bounded else 2**31
    messages, tools = read_messages(body), None if body.get("tool_choice") == "none" else body.get("tools")
    if len(messages) > length:  # each takes more than a token
        raise TooLongError(f"{len(messages):,} messages, and texts may have {length:,} tokens")
    shown = without_images(messages)
    if shown != messages and not host.sees:
        raise BadRequestError("this model sees no images: send text alone", parameter="messages")
    is_large = len(shown) + (len(tools) if isinstance(tools, list) else 0) > _MANY or any(map(_is_long, shown))
    dump = partial(json.dumps, [shown, tools], ensure_ascii=False)
    text = await paced(dump) if is_large else dump()
    await beside(len(text), require_short, voice.tokenizer, text, _HIDDEN * length)

    def encode() -> ChatPrompt:
        chat = read_chat(messages, tools, "messages", sees=host.sees)
        if len(chat.images) > MOST_IMAGES:
            raise BadRequestError(f"{len(chat.images)} images: at most {MOST_IMAGES} are taken", parameter="messages")
        chat = host.assistant.attach(chat) if chat.images else chat
        if len(chat.images) > MOST_PAIRS:
            raise BadRequestError(
                f"videos of {len(chat.images)} frames, or pairs of these: at most {MOST_PAIRS} are taken",
                parameter="messages",
            )
        contents = "\n".join(chain.from_iterable(content_texts(message["content"]) for message in chat.messages))
        require_short(voice.tokenizer, contents, length)
        if host.config.system is not None:
            chat = chat.with_system(host.config.system)
        return _encoded(host, body, chat, voice, length)

    return await beside(len(text), encode) if is_long(len(text)) or host.sees else encode()


def _is_long(message: dict[str, Any]) -> bool:
    """Return whether a message's content, which is not checked yet, has a long text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return any(isinstance(text, str) and is_long(len(text)) for text in texts)


_MANY = 4096
"""Messages and tools that take more than some milliseconds to write as JSON."""
_HIDDEN = 4
"""Tokens of a chat as JSON for one that a prompt may have: templates leave some out, and write others shorter."""


def _encoded(host: Host, body: dict[str, Any], chat: Chat, voice: Voice, length: int) -> ChatPrompt:
    """Return a chat's prompt; errors as of `chat_prompt`."""
    source = str(voice.tokenizer.chat_template)
    if "developer" not in source:  # such templates would leave the message out
        chat = chat.with_developer_as_system()
    continues, begins = read_continuation(body)
    options: dict[str, Any] = {"check": True, "needs_tools": True, "variables": read_variables(body, source)}
    template, text = render_messages(voice.tokenizer, chat, **options, answers=begins, continues=continues)
    require_short(voice.tokenizer, text, length)
    thinks = thought_inside("".join(content_texts(chat.messages[-1]["content"]))) if continues else thought_after(text)

    def admit(tokens: int) -> None:
        if tokens >= length:
            raise TooLongError(f"{tokens:,} tokens, and texts may have {length:,}")

    images = chat.images
    prompt = host.assistant.encode_rendered(template, text, images, admit) if images else Prompt(template.encode(text))
    return ChatPrompt(voice, prompt.tokens, prompt.images, thinks, schemas_of(chat.tools))


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


def read_few(host: Host, body: dict[str, Any], prompts: int) -> int:
    """Return the answers to each of some prompts; raise BadRequestError for more than a request may have in all."""
    count, most = read_count(body), max(host.config.max_requests, 1)
    if prompts * count > most:
        message = f"{prompts} prompts with {count} answers each: at most {most} are taken"
        raise BadRequestError(message, parameter="n")
    return count


async def _grammar(host: Host, voice: Voice, stated: tuple[str, Any] | None, thinks: Thought) -> Grammar | None:
    """Return a grammar of this kind and value; raise ValueError for one that is not understood."""
    if stated is None:
        return None
    kind, value = stated
    return await compile_grammar(
        lambda: getattr(host.assistant.grammars.of(voice.tokenizer), kind)(value, thinks=thinks)
    )


async def make_call(
    host: Host,
    body: dict[str, Any],
    prompts: list[list[int]],
    *,
    chat: bool,
    schemas: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    calls: str | None = None,
    thinks: Thought = Thought.NONE,
    echo: Sequence[Echo] = (),
    images: PromptImages | None = None,
) -> Call:
    """Return a parsed request; a completion with `echo` may have `max_tokens` of 0.

    Args:
        host: of the server.
        body: of the request.
        prompts: encoded.
        chat: report as in chats.
        schemas: of the tools that the answer may call.
        calls: grammar of the calls that it must have.
        thinks: state in which it begins.
        echo: prompts that come before the answers.
        images: of the prompts.

    Raises:
        BadRequestError, ValueError: parameters that are malformed, or beyond their bounds.
    """
    model = host.models.find(body.get("model"))
    voice, seed = model.voice, next(host.seeds)
    if empty := bool(echo) and body.get("max_tokens") == 0:
        body = body | {"max_tokens": 1}
    rooms = [max(host.service.length - len(tokens), 1) for tokens in prompts]
    samplings = [read_sampling(body, host.config.sampling, room, seed) for room in rooms]
    log_probs, count = read_log_probs(body, chat=chat), read_few(host, body, len(prompts))
    vocabulary = host.assistant.config.vocab_size
    asked: dict[str, Any] = {
        "stop": {
            *voice.stops,
            *special_stops(voice.tokenizer, samplings[0].stop),
            *read_stop_tokens(body, vocabulary),
        },
        "logit_bias": read_biases(body, vocabulary),
        "ranks": voice.ranks,
        "grammar": await _grammar(host, voice, read_grammar(body, calls), thinks),
        "top_log_probs": log_probs or 0,
        "n": count,
        "images": images,
    }
    return Call(
        model=model.name,
        voice=voice,
        requests=[
            Request(tokens, sampling, index, **asked)
            for index, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ],
        stream=read_flag(body, "stream") or False,
        usage=read_usage(body),
        log_probs=log_probs,
        chat=chat,
        thinks=thinks,
        echo=echo,
        empty=empty,
        functions=parameters_of(schemas),
        form=format_of(str(voice.tokenizer.get_chat_template(tools=[]))) if schemas else None,
        one_call=read_flag(body, "parallel_tool_calls") is False,
        named=isinstance(body.get("tool_choice"), dict),
    )
