"""Chat with a model: templates, end-of-turn tokens and streamed decoding around the generator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

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
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.json_file import read_json
from jaxglue.models import config_from_hf
from jaxglue.models.decoder import CausalLM
from jaxglue.models.parameters import split_model
from jaxglue.ops.quant.formats import Quantize

_CHANNEL = "<|channel|>"
"""Token before a channel's name in the harmony format."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """Answer prompts with a model and an optional adapter."""

    model: Path
    """A Hugging Face model folder."""
    adapter: Path | None = None
    """A PEFT adapter folder; its tokenizer and chat template take precedence."""
    random_weights: int | None = None
    """Seed to redraw the weights of a model trained with --random-weights."""
    prompt: tuple[str, ...] = ()
    """Prompt to answer; repeatable."""
    prompt_file: Path | None = None
    """File with one further prompt per line."""
    system: str | None = None
    """System message before each prompt."""
    raw: bool = False
    """Continue the prompts verbatim, without the chat template."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of weights, activations and cache; auto is bfloat16 on GPUs and float32 on CPUs."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Hold the decoder layers' linear layers in NF4 or int8, as in training with this flag."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def validate(self) -> None:
        """Refuse missing prompts and files, and a system message without a template."""
        if not self.prompt and not self.prompt_file:
            raise ValueError("no prompt: give --prompt or --prompt-file")
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template: leave out --raw, or put the text into the prompt")
        if self.adapter and not self.adapter.is_dir():
            raise ValueError(f"--adapter: no such folder: {self.adapter}")
        if self.prompt_file and not self.prompt_file.is_file():
            raise ValueError(f"--prompt-file: no such file: {self.prompt_file}")

    @property
    def prompts(self) -> tuple[str, ...]:
        """Return all prompts, the file's last."""
        lines = self.prompt_file.read_text(encoding="utf-8").splitlines() if self.prompt_file else []
        return (*self.prompt, *filter(str.strip, lines))


def generate(config: GenerateConfig) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each prompt with its answer, streamed in pieces.

    Raises:
        ValueError: bad folders, tensors, tokenizer or prompts.
    """
    config_from_hf(read_config(config.model))  # before transformers reads the folder
    tokenizer = load_tokenizer(_tokenizer_folder(config))
    prompts = {
        prompt: encode_prompt(tokenizer, prompt, system=config.system, raw=config.raw) for prompt in config.prompts
    }
    dtype = jnp.float32 if _in_float32(config.dtype) else jnp.bfloat16
    model = _load(config, dtype)
    graphdefs, adapter, frozen = split_model(model, nnx.LoRAParam)
    generator = Generator(graphdefs, model.config, dtype=dtype)
    stop = stop_tokens(tokenizer) | _generation_stops(config.model)
    for prompt in config.prompts:
        tokens = generator.stream(adapter, frozen, prompts[prompt], config.sampling, stop)
        yield prompt, stream_text(tokenizer, tokens)


def _in_float32(dtype: str) -> bool:
    return dtype == "float32" or (dtype == "auto" and jax.default_backend() == "cpu")


def _load(config: GenerateConfig, dtype) -> CausalLM:
    if config.random_weights is None:
        model = load_model(config.model, dtype=dtype, quantize=config.quantize)
    else:
        shape = config_from_hf(read_config(config.model)).quantized(config.quantize)
        model = random_model(shape, dtype=dtype, seed=config.random_weights)
    if config.adapter:
        add_adapter(model, config.adapter, _identity(config, model), str(config.model))
    return model


def _identity(config: GenerateConfig, model: CausalLM) -> Identity:
    if config.random_weights is None:
        return identify(config.model)
    return identify_random(model.config, config.random_weights)


def _tokenizer_folder(config: GenerateConfig) -> Path:
    if config.adapter and (config.adapter / "tokenizer.json").is_file():
        return config.adapter
    return config.model


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
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: use --raw to continue the text verbatim")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return ChatTemplate(tokenizer).encode_prompt([*messages, {"role": "user", "content": prompt}])


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
