"""Chat with a model: templates, end-of-turn tokens and streamed decoding around the generator."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from jaxglue.config import Alias, Config
from jaxglue.data.template import ChatTemplate
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.generate import Generator
from jaxglue.generation.sampling import SamplingConfig
from jaxglue.hf.adapter import find_base, random_seed
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.hub import model_path
from jaxglue.hf.identity import identify, identify_random
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.json_file import parse_json, read_json
from jaxglue.models import config_from_hf
from jaxglue.models.decoder import CausalLM
from jaxglue.models.parameters import split_model
from jaxglue.ops.quant.formats import Quantize

STDIN = Path("-")
"""Names standard input as a file of prompts, and standard output as a file of answers."""
_CHANNEL = "<|channel|>"
"""Token before a channel's name in the harmony format."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Config):
    """A model with an optional adapter, and how it answers."""

    model: Annotated[Path | None, Alias("base")] = None
    """A Hugging Face model folder, or owner/name on the hub; by default the adapter's base."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    adapter: Path | None = None
    """A PEFT adapter folder; its tokenizer and chat template take precedence."""
    random_weights: int | None = None
    """Seed to redraw the weights of a model trained with --random-weights; by default the adapter's record."""
    system: str | None = None
    """System message before each conversation."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of weights, activations and cache; auto is bfloat16 on GPUs and float32 on CPUs."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Hold the decoder layers' linear layers in NF4 or int8, as in training with this flag."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def validate(self) -> None:
        """Refuse a missing model, and an adapter that is no folder."""
        if self.adapter and not self.adapter.is_dir():
            raise ValueError(f"--adapter: no such folder: {self.adapter}")
        if not self.model and not self.adapter:
            raise ValueError("no model: give --model, or an --adapter, which names its base")

    @property
    def seed(self) -> int | None:
        """Return the seed of random weights; None for loaded ones."""
        if self.random_weights is None and self.adapter:
            return random_seed(self.adapter)
        return self.random_weights

    @property
    def folder(self) -> Path:
        """Return the base model's folder, downloaded if it is on the hub."""
        loads = self.seed is None
        if self.model is None:
            assert self.adapter is not None
            return find_base(self.adapter, weights=loads)
        return model_path(self.model, self.revision, weights=loads)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AssistantConfig):
    """Answer prompts with a model and an optional adapter."""

    prompt: tuple[str, ...] = ()
    """Prompt to answer; repeatable."""
    prompt_file: Path | None = None
    """File with one further prompt per line, - for standard input; in a .jsonl file, lines hold `prompt` or
    `messages`."""
    output: Path | None = None
    """JSONL file for prompts and answers, - for standard output; by default answers are printed as they come."""
    raw: bool = False
    """Continue the prompts verbatim, without the chat template."""

    def validate(self) -> None:
        """Refuse missing prompts and files, and a system message without a template."""
        super().validate()
        if not self.prompt and not self.prompt_file:
            raise ValueError("no prompt: give --prompt or --prompt-file")
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template: leave out --raw, or put the text into the prompt")
        if self.prompt_file and self.prompt_file != STDIN and not self.prompt_file.is_file():
            raise ValueError(f"--prompt-file: no such file: {self.prompt_file}")

    @property
    def prompts(self) -> tuple[str, ...]:
        """Return all prompts that are plain text, the file's last."""
        return tuple(row["prompt"] for row in read_prompts(self) if "prompt" in row)


def read_prompts(config: GenerateConfig) -> list[dict[str, Any]]:
    """Return the rows to answer, each with `prompt` or `messages`; raise ValueError for a malformed line."""
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in config.prompt]
    if config.prompt_file is None:
        return rows
    text = sys.stdin.read() if config.prompt_file == STDIN else config.prompt_file.read_text(encoding="utf-8")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if config.prompt_file.suffix != ".jsonl":
        return rows + [{"prompt": line} for _, line in lines]
    return rows + [_parse_row(line, f"{config.prompt_file}:{number}") for number, line in lines]


def _parse_row(line: str, origin: str) -> dict[str, Any]:
    row = parse_json(line, origin)
    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)):
        raise ValueError(f"{origin}: expected an object with a text `prompt` or a list `messages`")
    return row


class Assistant:
    """A loaded model that answers conversations.

    Raises:
        ValueError: bad folders, tensors or tokenizer.
    """

    def __init__(self, config: AssistantConfig):
        folder = config.folder
        config_from_hf(read_config(folder))  # before transformers reads the folder
        self.tokenizer = load_tokenizer(_tokenizer_folder(config, folder))
        self._stops = stop_tokens(self.tokenizer) | _generation_stops(folder)
        dtype = jnp.float32 if _in_float32(config.dtype) else jnp.bfloat16
        model = _load(config, folder, dtype)
        graphdefs, self._adapter, self._frozen = split_model(model, nnx.LoRAParam)
        self._generator = Generator(graphdefs, model.config, dtype=dtype)

    def answer(self, tokens: list[int], sampling: SamplingConfig) -> Iterator[str]:
        """Yield the answer to an encoded prompt in pieces; raises ValueError like `Generator.stream`."""
        new = self._generator.stream(self._adapter, self._frozen, tokens, sampling, self._stops)
        return stream_text(self.tokenizer, new)


def generate(config: GenerateConfig) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each prompt with its answer, streamed in pieces.

    Raises:
        ValueError: bad folders, tensors, tokenizer or prompts.
    """
    for row, answer in answer_rows(config):
        yield row.get("prompt") or row["messages"][-1].get("content", ""), answer


def answer_rows(config: GenerateConfig) -> Iterator[tuple[dict[str, Any], Iterator[str]]]:
    """Yield each row of `read_prompts` with its answer, streamed in pieces; raises like `generate`."""
    rows, assistant = read_prompts(config), Assistant(config)
    prompts = [_encode_row(assistant.tokenizer, row, config) for row in rows]
    for row, tokens in zip(rows, prompts, strict=True):
        yield row, assistant.answer(tokens, config.sampling)


def _encode_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], config: GenerateConfig) -> list[int]:
    if "prompt" in row:
        return encode_prompt(tokenizer, row["prompt"], system=config.system, raw=config.raw)
    return encode_messages(tokenizer, [*system_message(config.system), *row["messages"]])


def _in_float32(dtype: str) -> bool:
    return dtype == "float32" or (dtype == "auto" and jax.default_backend() == "cpu")


def _load(config: AssistantConfig, folder: Path, dtype) -> CausalLM:
    seed = config.seed
    if seed is None:
        model = load_model(folder, dtype=dtype, quantize=config.quantize)
    else:
        shape = config_from_hf(read_config(folder)).quantized(config.quantize)
        model = random_model(shape, dtype=dtype, seed=seed)
    if config.adapter:
        identity = identify(folder) if seed is None else identify_random(model.config, seed)
        add_adapter(model, config.adapter, identity, str(folder))
    return model


def _tokenizer_folder(config: AssistantConfig, folder: Path) -> Path:
    if config.adapter and (config.adapter / "tokenizer.json").is_file():
        return config.adapter
    return folder


def system_message(text: str | None) -> list[dict[str, str]]:
    """Return the messages that begin a conversation: the system's, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens that precede the answer to a conversation, as in training.

    Raises:
        ValueError: a missing chat template, or one that refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: use --raw to continue the text verbatim")
    return tokenizer.encode(ChatTemplate(tokenizer).render_prompt(messages), add_special_tokens=False)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Return the tokens that precede an answer, as in training.

    Args:
        tokenizer: of the model, with a chat template unless `raw`.
        prompt: the user's message.
        system: the system message before it.
        raw: encode the text verbatim, with the tokenizer's special prefix.

    Raises:
        ValueError: a missing chat template, or one that refuses the conversation.
    """
    if raw:
        return tokenizer.encode(prompt)
    return encode_messages(tokenizer, [*system_message(system), {"role": "user", "content": prompt}])


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-text token and the special token that ends an assistant turn."""
    stops = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        text = ChatTemplate(tokenizer).render(messages).rstrip()
        last = tokenizer.encode(text, add_special_tokens=False)[-1]
        stops |= {last} & {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(stops - {None})


def _generation_stops(folder: Path) -> frozenset[int]:
    """Return the end tokens in generation_config.json."""
    path = folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    tokens = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if wrong := [token for token in tokens if type(token) is not int]:
        raise ValueError(f"{path}: eos_token_id: expected token ids, got {wrong[0]!r}")
    return frozenset(tokens)


def stream_text(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> Iterator[str]:
    """Yield decoded text token by token; a character still incomplete at the end is shown as U+FFFD.

    Special tokens are skipped, except with channels (GPT-OSS), where they separate reasoning from the answer.
    """
    skips = _CHANNEL not in tokenizer.get_added_vocab()
    stream, seen, shown = DecodeStream(skip_special_tokens=skips), list[int](), 0
    for token in tokens:
        seen.append(token)
        if piece := stream.step(tokenizer.backend_tokenizer, token):
            shown += len(piece)
            yield piece
    if rest := tokenizer.backend_tokenizer.decode(seen, skip_special_tokens=skips)[shown:]:
        yield rest
