"""Settings of a model that answers, and of its sampling."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.hf.hub import model_path
from jaxglue.ops.choices import KVCache, Matmul, Quantize, Storage, choose_storage
from jaxglue.parts import PartsConfig
from jaxglue.settings.config import (
    Alias,
    Config,
    Excludes,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Synonyms,
)

Drafts = Literal["auto", "off", "1", "2", "3", "4", "5"]
"""Tokens that a draft head proposes for a step."""


def is_number(drafts: Drafts) -> bool:
    """Return whether drafts are asked for, in any case."""
    return drafts not in ("auto", "off")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Sampling distribution and stopping length."""

    max_tokens: Annotated[PositiveInt, Alias("max_new_tokens")] = 512
    """Maximum number of new tokens."""
    temperature: NonNegativeFloat = 0.7
    """Divides the logits; 0 selects the most likely token."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 0.95
    """Sample from the fewest most likely tokens whose probabilities reach this sum (nucleus, arXiv 1904.09751); 1
    samples from all."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0 samples from all."""
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    """Sample from tokens at least this share as likely as the likeliest one (arXiv 2407.01082); 0 samples from all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive logits of tokens in prompt and answer, and multiplies negative ones (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, as often as these are in it."""
    stop: tuple[str, ...] = ()
    """Text before which an answer ends; repeatable."""
    seed: int = 0
    """Seed of the sampling."""

    def validate(self) -> None:
        """Refuse an empty text as an end."""
        if "" in self.stop:
            raise ValueError("stop: every text holds the empty one, so no answer would have text: leave it out")

    @property
    def has_penalties(self) -> bool:
        """Return whether earlier tokens change the distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


GREEDY = SamplingConfig(temperature=0.0)
"""Sampling that always selects the most likely token."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(PartsConfig):
    """A model with an optional adapter, and how it answers."""

    model: Annotated[Path | None, Alias("base", "base_model", "model_name_or_path")] = None
    """A Hugging Face model folder, or owner/name on the hub; by default the adapter's base."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    adapter: Annotated[Path | None, Alias("adapter_name_or_path", "lora_model_dir")] = None
    """A PEFT adapter folder; its tokenizer and chat template take precedence."""
    random_weights: int | None = None
    """Seed to redraw the weights of a model trained with --random-weights; by default the adapter's record."""
    system: str | None = None
    """System message before each conversation."""
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], Alias("torch_dtype")] = "auto"
    """Dtype of weights, activations and cache; auto is bfloat16 on GPUs and float32 on CPUs."""
    quantize: Annotated[
        Quantize,
        Alias("quantise"),
        Alias("load_in_4bit", values={True: "nf4"}),
        Alias("load_in_8bit", values={True: "int8"}),
    ] = "none"
    """Hold the decoder layers' linear layers in NF4 or int8, as in training with this flag."""
    matmul: Matmul = "bf16"
    """Multiply the decoder layers' linear layers in FP8, as in training with this flag."""
    kv_cache: Annotated[KVCache, Alias("kv_cache_dtype")] = "auto"
    """Format of the cache of keys and values; fp8 takes half the memory, with a scale for each token and head."""
    exact: Annotated[
        bool,
        Excludes("kv_cache", "its keys are in 16 bits or more", lambda cache: cache == "fp8"),
        Excludes("quantize", "it is for weights of 16 or 32 bits", lambda storage: storage != "none"),
        Excludes("matmul", "it is for products of 16 or 32 bits", lambda matmul: matmul != "bf16"),
    ] = False
    """Give an answer the same bits whatever is decoded with it, those of training's forward pass; not for all models,
    and slower."""
    memory_limit: PositiveFloat | None = None
    """GPU memory for weights, cache and activations, GiB; by default all of JAX's share."""
    compilation_cache: Path | None = Path("~/.cache/jaxglue/xla")
    """Folder on a local disk that keeps compiled programs for the next call, unless JAX_COMPILATION_CACHE_DIR names
    one; none keeps none."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def validate(self) -> None:
        """Refuse a missing model, an adapter that is no folder, and two formats of weights."""
        choose_storage(self.quantize, self.matmul)
        if self.adapter and not self.adapter.is_dir():
            raise ValueError(f"--adapter: no such folder: {self.adapter}")
        if not self.model and not self.adapter:
            raise ValueError("no model: give --model, or an --adapter, which names its base")

    @property
    def named_adapters(self) -> dict[str, Path]:
        """Return the folders of adapters beside which the base answers, by name."""
        return {}

    @property
    def drafted(self) -> Drafts:
        """Return how many tokens a draft head proposes for a step."""
        return "off"

    @property
    def head_folder(self) -> Path | None:
        """Return the folder of a draft head of EAGLE-3's kind; None for the model's own, if it has one."""
        return None

    @property
    def spare_ranks(self) -> int:
        """Return the ranks that stand free for adapters that are loaded later."""
        return 0

    @property
    def seed(self) -> int | None:
        """Return the seed of random weights; None for loaded ones."""
        if self.random_weights is None and self.adapter:
            from jaxglue.hf.adapter import random_seed

            return random_seed(self.adapter)
        return self.random_weights

    @property
    def storage(self) -> Storage:
        """Return the storage of the decoder layers' linear layers: an adapter trained for one is merged into it."""
        if self.adapter and self.quantize == "none" and self.matmul == "bf16":
            from jaxglue.hf.adapter import served_storage_of

            return served_storage_of(self.adapter) or "none"
        return choose_storage(self.quantize, self.matmul)

    @property
    def folder(self) -> Path:
        """Return the base model's folder, downloaded if it is on the hub."""
        loads = self.seed is None
        if self.model is None:
            assert self.adapter is not None
            from jaxglue.hf.adapter import find_base

            return find_base(self.adapter, weights=loads)
        return model_path(self.model, self.revision, weights=loads)


@dataclass(frozen=True, kw_only=True)
class AnsweringConfig(AssistantConfig):
    """A model with an optional adapter that writes answers."""

    drafts: Annotated[
        Drafts,
        Synonyms(**{"0": "off"}),
        Excludes("exact", "drafts are verified several at a time", when=is_number),
    ] = "auto"
    """Tokens that the folder's draft head (MTP), or --draft-model, proposes for each step, which verifies them
    together; answers are those without. auto: as many as save time, by the answers at a time and how many drafts they
    accept."""
    draft_model: Annotated[
        Path | None,
        Alias("speculative_model", "speculative_draft_model_path"),
        Excludes("drafts", "it drafts", lambda drafts: drafts == "off"),
        Excludes("exact", "drafts are verified several at a time"),
    ] = None
    """Folder of a draft head of EAGLE-3's kind for the model, as jaxglue draft writes, or owner/name on the hub."""

    @property
    def drafted(self) -> Drafts:
        """See `AssistantConfig`."""
        return "off" if self.exact else self.drafts

    @property
    def head_folder(self) -> Path | None:
        """See `AssistantConfig`."""
        return None if self.draft_model is None else model_path(self.draft_model)
