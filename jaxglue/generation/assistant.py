"""A loaded model with its adapters, which answers encoded prompts."""

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

from jaxglue.data.messages import Chat
from jaxglue.data.progress import DataProgress
from jaxglue.data.template import ChatTemplate
from jaxglue.generation.config import AssistantConfig, SamplingConfig
from jaxglue.generation.drafts import load_head
from jaxglue.generation.engine import Engine
from jaxglue.generation.exact import obstacle
from jaxglue.generation.grammar import Grammar, Grammars
from jaxglue.generation.pages import free_bytes
from jaxglue.generation.prompts import render_messages
from jaxglue.generation.scheduler import Request
from jaxglue.generation.sight import Admit, Prompt, Sight, attach, make_rules
from jaxglue.hf.adapter import adapter_labels, warn_of_adapter_inside
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.identity import Identity, identify, identify_random
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.serving import load_own_tokenizer, stop_tokens
from jaxglue.hf.several import SpareRanks, add_adapters
from jaxglue.models import config_from_hf, with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.lora import merge_served
from jaxglue.models.parameters import split_model
from jaxglue.models.tower_config import TowerConfig
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.choices import SERVED
from jaxglue.ops.projection.fp8 import check_fp8
from jaxglue.text.stream import before, decode, in_order, special_stops, stream_text, without
from jaxglue.vision.images import ImageSource
from jaxglue.vision.processor import read_processor
from jaxglue.vision.rows import PromptImages


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
        images: folder of the images that prompts name by relative paths; by default they name no files.

    Raises:
        ValueError: bad folders, tensors or tokenizer.
    """

    def __init__(self, config: AssistantConfig, *, stays: bool = False, images: Path | None = None):
        folder, named = config.folder, config.named_adapters
        if count_labels(config):
            scorer = config.adapter or folder
            raise ValueError(f"{scorer} is a reward model or classifier, which writes no text: use jaxglue score")
        self.tokenizer, model, self.dtype = load_parts(config)
        model.config.require_causal(config.adapter or folder)
        self.config = model.config
        self.stops = stop_tokens(self.tokenizer, folder, config.adapter)
        self._folder, spare = folder, config.spare_ranks
        identity = _identity(config, model) if named or spare else {}
        ranks = add_adapters(model, named, identity, str(folder), spare=spare) if named or spare else {}
        self.voices = {name: self.voice(named[name], of_adapter) for name, of_adapter in ranks.items()}
        """Each adapter's tokenizer, stops and ranks, by its name."""
        self.ranks = max(map(len, ranks.values()), default=spare)
        """Ranks of all adapters together; 0 without adapters by name."""
        if config.exact:
            _require_exact(model.config, self.dtype, rank=self.ranks)
        self.tile = key_tile(model.config.layer_kinds[0].head_dim) if config.exact else None
        """Tokens at whose multiples texts begin in a row, so that theirs have the same bits in any; None for any."""
        self.spare = SpareRanks(model, identity, str(folder), spare=spare, total=self.ranks) if spare else None
        """Ranks for adapters that are loaded later."""
        self.graphdefs, self.adapter, self.frozen = split_model(model, nnx.LoRAParam)
        trees = self.adapter, self.frozen
        options: dict[str, Any] = {"dtype": self.dtype, "adapter": config.adapter, "own": config.head_folder}
        head = load_head(config.drafted, folder, self.config, self.graphdefs, trees, **options)
        if head is not None:
            self.adapter, self.frozen = head.beside(trees)
        self.engine = Engine(
            self.graphdefs,
            self.config,
            dtype=self.dtype,
            kv_cache=config.kv_cache,
            ahead=stays and jax.default_backend() != "cpu",
            drafting=head and head.drafting,
            exact=config.exact,
        )
        self.rules = None if self.config.vision is None else make_rules(folder, self.tokenizer, files=images)
        """Rules for images; None of a model that sees none."""
        tower = self.engine, self.adapter, self.frozen
        self.sight = None if self.rules is None else Sight(self.rules, *tower, {})
        self.memory = None if config.memory_limit is None else free_bytes(config.memory_limit * 2**30)

    def voice(self, adapter: Path, ranks: Bool[np.ndarray, " R"]) -> Voice:
        """Return the voice of an adapter's folder, of which these ranks are."""
        tokenizer = load_own_tokenizer(self._folder, adapter)
        return Voice(tokenizer, self.stops | stop_tokens(tokenizer, self._folder, adapter), ranks)

    @cached_property
    def grammars(self) -> Grammars:
        """Return what makes grammars of the model's tokens; raise ValueError where llguidance is not installed."""
        stops = self.stops.union(*(voice.stops for voice in self.voices.values()))
        return Grammars(self.tokenizer, self.config.vocab_size, stops)

    def answer(
        self,
        tokens: list[int],
        sampling: SamplingConfig,
        index: int = 0,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
    ) -> Iterator[str]:
        """Yield the answer to an encoded prompt in pieces; `index`, `grammar` and errors as of `Engine.stream`."""
        stops = self.stops | special_stops(self.tokenizer, sampling.stop)
        new = self.engine.stream(
            self.adapter,
            self.frozen,
            tokens,
            sampling,
            stops,
            index=index,
            grammar=grammar,
            images=images,
            memory=self.memory,
        )
        return before(stream_text(self.tokenizer, new), sampling.stop)

    def encode(self, chat: Chat, media: Sequence[Any] = (), **options: Any) -> Prompt:
        """Return the prompt of a conversation, as in training; `options` and errors as of `render_messages`.

        Args:
            chat: with images in their places, or without.
            media: images of the places that name none.
        """
        chat = self.attach(chat, media)
        template, text = render_messages(self.tokenizer, chat, **options)
        return self.encode_rendered(template, text, chat.images)

    def attach(self, chat: Chat, media: Sequence[Any] = ()) -> Chat:
        """Return a chat with its images; raise ValueError for some that cannot be seen."""
        return attach(self.rules, chat, media)

    def encode_rendered(
        self, template: ChatTemplate, text: str, images: Sequence[ImageSource], admit: Admit | None = None
    ) -> Prompt:
        """Return the prompt of a rendered conversation with these images; arguments and errors as of `Sight.encode`."""
        return Prompt(template.encode(text)) if self.sight is None else self.sight.encode(template, text, images, admit)

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
            recent = self.engine.window_tokens + max(
                map(len, ends[number]), default=0
            )  # a token may be less than a character
            text = decode(self.tokenizer, tokens[-2 * recent :]) if ends[number] else ""
            return any(end in text for end in ends[number])

        weights = self.adapter, self.frozen
        found = self.engine.generate(*weights, requests, self.stops, plan=plan, until=ended if any(ends) else None)
        numbered = ((completion.number, without(completion.tokens, self.stops)) for completion in found)
        for text, own in zip(in_order(self.tokenizer, numbered), ends, strict=True):
            yield "".join(before([text], own))


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
    seed, storage = config.seed, config.storage  # of which an adapter's file may tell
    if config.matmul == "fp8" and jax.default_backend() != "cpu":
        check_fp8(compute_capability())
    vision = tower_of(folder)
    if seed is None:
        model = load_model(folder, dtype=dtype, quantize=storage, labels=labels, vision=vision, progress=DataProgress())
    else:
        shape = config_from_hf(read_config(folder)).quantized(storage)
        shape = shape if vision is None else vision.within(shape)
        model = random_model(shape.scored(labels) if labels else shape, dtype=dtype, seed=seed)
    if config.adapter:
        add_adapter(model, config.adapter, _identity(config, model), str(folder))
        if storage in SERVED:
            merge_served(model)  # once, as no other adapter will be asked for
    return model


def tower_of(folder: Path) -> TowerConfig | None:
    """Return the shape of the vision tower of a folder; None of a model that sees no images here."""
    raw = read_config(folder)
    processor = read_processor(folder, raw)
    if processor is None:
        return None
    return with_vision(config_from_hf(raw), raw, hears=True, mean=processor.mean, std=processor.std).vision


def _require_exact(model: DecoderConfig, dtype, rank: int) -> None:
    """Raise ValueError for a model whose answers depend on what is decoded with them; arguments as of `obstacle`."""
    if (reason := obstacle(model, dtype, rank=rank)) is not None:
        raise ValueError(f"--exact cannot be kept: {reason}: leave it out")


def _identity(config: AssistantConfig, model: CausalLM) -> Identity:
    return identify(config.folder) if config.seed is None else identify_random(model.config, config.seed)
