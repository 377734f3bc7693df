"""Chat with a model: templates, end-of-turn tokens, streamed decoding, and a conversation in the terminal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool
from transformers import PreTrainedTokenizerBase

from jaxglue.data.progress import DataProgress
from jaxglue.files.json_file import read_json
from jaxglue.generation.config import AssistantConfig, GenerateConfig, SamplingConfig
from jaxglue.generation.engine import STEPS, Engine
from jaxglue.generation.grammar import Grammar, Grammars
from jaxglue.generation.pages import free_bytes
from jaxglue.generation.prompts import encode_messages, encode_rows, prompt_of, read_prompts, system_message
from jaxglue.generation.scheduler import Request
from jaxglue.generation.text import TAGS, before, decode, in_order, special_stops, stream_text, without
from jaxglue.generation.thinking import Thought, said, thought_after
from jaxglue.hf.adapter import adapter_labels, warn_of_adapter_inside
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.serving import load_own_tokenizer, stop_tokens
from jaxglue.hf.several import add_adapters
from jaxglue.models import config_from_hf
from jaxglue.models.decoder import CausalLM
from jaxglue.models.parameters import split_model
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.projection.fp8 import check_fp8

HELP = "/reset forgets the conversation · /system TEXT sets the system message\nCtrl-C stops an answer · Ctrl-D leaves"
_END = 16
"""Last tokens of a prompt, which tell whether it has begun to think."""
_FINAL = "<|channel|>final<|message|>"
"""Start of the answer proper in the harmony format; its template takes no other channel back."""


@dataclass(frozen=True)
class Voice:
    """An adapter among several: its tokenizer, with a template of its own, and its part of their ranks."""

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    """Tokens that end its answers."""
    ranks: Bool[np.ndarray, " R"] | None
    """Its ranks among those of all adapters; None where all requests use all."""


class Assistant:
    """A loaded model that answers conversations.

    Args:
        config: of the model.
        stays: the process answers more than once, so programs for long answers are worth compiling.

    Raises:
        ValueError: bad folders, tensors or tokenizer.
    """

    def __init__(self, config: AssistantConfig, *, stays: bool = False):
        folder, named = config.folder, config.named_adapters
        if count_labels(config):
            name = config.adapter or folder
            raise ValueError(f"{name} is a reward model or classifier, which writes no text: use jaxglue score")
        self.tokenizer, model, self.dtype = load_parts(config)
        self.config = model.config
        self.stops = stop_tokens(self.tokenizer, folder, config.adapter)
        ranks = add_adapters(model, named, _identity(config, model), str(folder)) if named else {}
        self.voices = {name: self._voice(folder, named[name], own) for name, own in ranks.items()}
        """Each adapter's tokenizer, stops and ranks, by its name."""
        self.ranks = max(map(len, ranks.values()), default=0)
        """Ranks of all adapters together; 0 without adapters by name."""
        self.graphdefs, self.adapter, self.frozen = split_model(model, nnx.LoRAParam)
        ahead = stays and jax.default_backend() != "cpu"
        self.engine = Engine(self.graphdefs, self.config, dtype=self.dtype, kv_cache=config.kv_cache, ahead=ahead)
        self.memory = None if config.memory_limit is None else free_bytes(config.memory_limit * 2**30)

    def _voice(self, base: Path, adapter: Path, ranks: Bool[np.ndarray, " R"]) -> Voice:
        tokenizer = load_own_tokenizer(base, adapter)
        return Voice(tokenizer, self.stops | stop_tokens(tokenizer, base, adapter), ranks)

    @cached_property
    def grammars(self) -> Grammars:
        """Return what makes grammars of the model's tokens; raise ValueError where llguidance is not installed."""
        stops = self.stops.union(*(voice.stops for voice in self.voices.values()))
        return Grammars(self.tokenizer, self.config.vocab_size, stops)

    def answer(
        self, tokens: list[int], sampling: SamplingConfig, index: int = 0, grammar: Grammar | None = None
    ) -> Iterator[str]:
        """Yield the answer to an encoded prompt in pieces; `index`, `grammar` and errors as of `Engine.stream`."""
        stops = self.stops | special_stops(self.tokenizer, sampling.stop)
        options: dict[str, Any] = {"index": index, "grammar": grammar, "memory": self.memory}
        new = self.engine.stream(self.adapter, self.frozen, tokens, sampling, stops, **options)
        return before(stream_text(self.tokenizer, new), sampling.stop)

    def answers(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Iterator[str]:
        """Yield the answers to requests in their order, decoded together, each as soon as those before it are.

        Args:
            requests: encoded prompts with their sampling, for one answer each.
            batch_size: the most requests at a time; by default as many as memory holds.
            say: receives a line about batch and cache before the first answer.

        Raises:
            ValueError: as `Engine.generate`.
        """
        if not requests:
            return
        requests = [
            replace(request, stop={*request.stop, *special_stops(self.tokenizer, request.sampling.stop)})
            for request in requests
        ]
        plan = self.engine.plan(requests, slots=batch_size, memory=self.memory)
        if say:
            say(f"{len(requests)} prompts, {plan}")
        ends = [request.sampling.stop for request in requests]

        def ended(number: int, _: int, tokens: list[int]) -> bool:
            recent = STEPS + max(map(len, ends[number]), default=0)  # a token may be less than a character
            text = decode(self.tokenizer, tokens[-2 * recent :]) if ends[number] else ""
            return any(end in text for end in ends[number])

        weights = self.adapter, self.frozen
        found = self.engine.generate(*weights, requests, self.stops, plan=plan, until=ended if any(ends) else None)
        numbered = ((completion.number, without(completion.tokens, self.stops)) for completion in found)
        for text, own in zip(in_order(self.tokenizer, numbered), ends, strict=True):
            yield "".join(before([text], own))


def generate(config: GenerateConfig) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each prompt with its answer in pieces, which stream if there is one prompt or `batch_size` is 1.

    Raises:
        ValueError: bad folders, tensors, tokenizer or prompts.
    """
    for row, answer in answer_rows(config):
        yield prompt_of(row), answer


def answer_rows(
    config: GenerateConfig, say: Callable[[str], None] | None = None
) -> Iterator[tuple[dict[str, Any], Iterator[str]]]:
    """Yield each row of `read_prompts` with its answer in pieces; as `generate`, `say` as in `Assistant.answers`."""
    rows, assistant = read_prompts(config), Assistant(config)
    prompts = encode_rows(assistant.tokenizer, rows, config)
    thoughts = [_thought(assistant, config, row, tokens) for row, tokens in zip(rows, prompts, strict=True)]
    grammars = {thinks: _grammar(assistant, config, thinks) for thinks in set(thoughts)}
    asked = list(enumerate(zip(prompts, map(grammars.get, thoughts), strict=True)))
    if len(rows) == 1 or config.batch_size == 1:
        answers = (assistant.answer(tokens, config.sampling, index, grammar) for index, (tokens, grammar) in asked)
    else:
        requests = [Request(tokens, config.sampling, index, grammar=grammar) for index, (tokens, grammar) in asked]
        texts = assistant.answers(requests, batch_size=config.batch_size, say=say)
        answers = (iter([text]) for text in texts)
    for row, answer, thinks in zip(rows, answers, thoughts, strict=True):
        yield row, said(answer, assistant.tokenizer, thinks)


def _thought(assistant: Assistant, config: GenerateConfig, row: dict[str, Any], tokens: list[int]) -> Thought:
    """Return how an answer that is to follow a grammar begins; others are shown with their thinking."""
    held = config.json_schema is not None or config.regex is not None
    if not held or (config.raw and "prompt" in row):
        return Thought.NONE
    return thought_after(str(assistant.tokenizer.decode(tokens[-_END:])))


def _grammar(assistant: Assistant, config: GenerateConfig, thinks: Thought) -> Grammar | None:
    if config.json_schema is not None:
        return assistant.grammars.json(read_json(config.json_schema), thinks=thinks)
    return None if config.regex is None else assistant.grammars.regex(config.regex, thinks=thinks)


def _in_float32(dtype: str) -> bool:
    return dtype == "float32" or (dtype == "auto" and jax.default_backend() == "cpu")


def count_labels(config: AssistantConfig) -> int:
    """Return the scores of a token under a model, or the adapter on it; 0 for one that writes text.

    Raises:
        ValueError: a bad config.json.
    """
    shape = config_from_hf(read_config(config.folder))  # before transformers reads the folder
    if config.adapter is not None and (labels := adapter_labels(config.adapter)):
        return labels
    return shape.labels if shape.scores else 0


def load_parts(config: AssistantConfig, *, labels: int = 0) -> tuple[PreTrainedTokenizerBase, CausalLM, Any]:
    """Load a tokenizer and a model with its adapter, with scores where it has labels; return also the dtype."""
    folder = config.folder
    warn_of_adapter_inside(folder, config.adapter)
    tokenizer = load_own_tokenizer(folder, config.adapter)
    dtype = jnp.float32 if _in_float32(config.dtype) else jnp.bfloat16
    return tokenizer, load_assistant(config, folder, dtype, labels=labels), dtype


def load_assistant(config: AssistantConfig, folder: Path, dtype, *, labels: int = 0) -> CausalLM:
    """Load the model in a folder, with the configuration's storage and adapter, with scores where it has labels."""
    seed = config.seed
    if config.matmul == "fp8" and jax.default_backend() != "cpu":
        check_fp8(compute_capability())
    if seed is None:
        model = load_model(folder, dtype=dtype, quantize=config.storage, labels=labels, progress=DataProgress())
    else:
        shape = config_from_hf(read_config(folder)).quantized(config.storage)
        model = random_model(shape.scored(labels) if labels else shape, dtype=dtype, seed=seed)
    if config.adapter:
        add_adapter(model, config.adapter, _identity(config, model), str(folder))
    return model


def _identity(config: AssistantConfig, model: CausalLM) -> Identity:
    return identify(config.folder) if config.seed is None else identify_random(model.config, config.seed)


class ChatSession:
    """Messages so far, answered by one loaded model."""

    def __init__(self, assistant: Assistant, sampling: SamplingConfig, system: str | None = None):
        self._assistant, self._sampling, self._system = assistant, sampling, system
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces, and remember it, or as much of it as came before an interruption.

        Raises:
            ValueError: the conversation is too long, or the template refuses it; the question is forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        tokens = encode_messages(self._assistant.tokenizer, [*system_message(self._system), *asked])
        pieces: list[str] = []
        try:
            for piece in self._assistant.answer(tokens, self._sampling):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": _said("".join(pieces))}]

    def command(self, line: str) -> str:
        """Run a command that begins with a slash; return what to show."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.messages = []
            return "the conversation is forgotten"
        if name == "/system":
            self._system, self.messages = text.strip() or None, []
            return f"system message: {self._system or 'none'}; the conversation begins anew"
        return HELP if name == "/help" else f"unknown command {name}\n{HELP}"


def _said(text: str) -> str:
    """Return an answer without thinking that chat templates do not take back."""
    for begin in (_FINAL, *(tags.end for tags in TAGS[1:])):
        text = text.rpartition(begin)[2]
    return text


def converse(session: ChatSession, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Read lines and write answers until the input ends.

    Args:
        session: of the model.
        read: returns a line after a prompt; EOFError ends the conversation, KeyboardInterrupt drops the line.
        write: shows text without adding a newline.
    """
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            continue
        if line.startswith("/"):
            write(session.command(line) + "\n")
        elif line:
            _answer(session, line, write)


def _answer(session: ChatSession, line: str, write: Callable[[str], None]) -> None:
    pieces = session.ask(line)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        write(" [stopped]")
    except ValueError as error:
        write(f"{error}: /reset begins anew")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    write("\n")
