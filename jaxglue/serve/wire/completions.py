"""OpenAI's completions of texts and token ids."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxglue.generation.assistant import Voice
from jaxglue.generation.prompts import encode_prompt
from jaxglue.generation.sight import Prompt
from jaxglue.serve.call import Echo, make_call, read_few
from jaxglue.serve.fields import COMPLETION, read_body, read_echo, read_log_probs, read_placed, read_prompts
from jaxglue.serve.host import Host
from jaxglue.serve.lanes import beside
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.service import TooLongError, require_short
from jaxglue.serve.wire import Endpoint, Form
from jaxglue.serve.wire.chat import answer
from jaxglue.vision.images import image_source
from jaxglue.vision.rows import PromptImages


async def _complete(host: Host, http: HttpRequest) -> Response:
    body = await read_body(http, COMPLETION, sees=host.sees)
    voice, prompts = host.models.find(body.get("model")).voice, read_prompts(body)
    read_few(host, body, len(prompts))  # before work on them
    encoded, images = [await _encode(host, voice.tokenizer, prompt) for prompt in prompts], None
    if placed := read_placed(body, prompts):
        encoded[0], images = await _seen(host, encoded[0], placed)
    echo = await _echo(host, body, voice, prompts, encoded, images) if read_echo(body) else []
    return await answer(host, http, await make_call(host, body, encoded, chat=False, echo=echo, images=images))


async def _seen(host: Host, tokens: list[int], placed: list[tuple[int, Any]]) -> Prompt:
    """Return a prompt of token ids with images in their places."""
    sight = host.assistant.sight
    if sight is None:
        raise BadRequestError("this model sees no images: send text alone", parameter="images")
    _check_length(host, tokens)
    sources = [(token, image_source(image, None)) for token, image in placed]
    return await beside(len(tokens), sight.place, tokens, sources)


async def _echo(
    host: Host,
    body: dict[str, Any],
    voice: Voice,
    prompts: list[str | list[int]],
    encoded: list[list[int]],
    images: PromptImages | None,
) -> list[Echo]:
    """Return the prompts that a completion repeats, with log-probabilities where it asks for these."""
    texts = [p if isinstance(p, str) else str(voice.tokenizer.decode(p)) for p in prompts]
    if (top := read_log_probs(body, chat=False)) is None:
        return [Echo(text, None) for text in texts]
    for tokens in encoded:
        _check_length(host, tokens)
    return list(map(Echo, texts, await host.scores(encoded, voice, top, images)))


def _check_length(host: Host, tokens: list[int]) -> None:
    if len(tokens) > host.service.length:
        raise TooLongError(f"the prompt has {len(tokens):,} tokens, and texts may have {host.service.length:,}")


async def _encode(host: Host, tokenizer: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        await beside(len(prompt), require_short, tokenizer, prompt, host.service.length)
        prompt = await beside(len(prompt), encode_prompt, tokenizer, prompt, raw=True)
    if not prompt:  # an empty text, which some tokenizers begin with a token
        raise BadRequestError("prompt must not be empty: this tokenizer puts no token before it")
    return prompt


FORM = Form((Endpoint("/v1/completions", _complete),))
