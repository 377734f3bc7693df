"""Settings of answers: model, prompts and sampling."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.hf.hub import model_path
from jaxglue.ops.choices import KVCache, Matmul, Quantize, Storage, choose_storage
from jaxglue.settings.config import Alias, Config, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range

STDIN = Path("-")
"""Names standard input as a file of prompts, and standard output as a file of answers."""


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
class AssistantConfig(Config):
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
    memory_limit: PositiveFloat | None = None
    """GPU memory for weights, cache and activations, GiB; by default all of JAX's share."""
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
    def seed(self) -> int | None:
        """Return the seed of random weights; None for loaded ones."""
        if self.random_weights is None and self.adapter:
            from jaxglue.hf.adapter import random_seed

            return random_seed(self.adapter)
        return self.random_weights

    @property
    def storage(self) -> Storage:
        """Return the storage of the decoder layers' linear layers."""
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
class GenerateConfig(AssistantConfig):
    """Answer prompts with a model and an optional adapter."""

    prompt: tuple[str, ...] = ()
    """Prompt to answer; repeatable."""
    prompt_file: Path | None = None
    """File with one further prompt per line, - for standard input; in a .jsonl file, lines hold `prompt` or
    `messages`."""
    output: Path | None = None
    """JSONL file for prompts and answers, - for standard output; by default answers are printed as they come."""
    batch_size: PositiveInt | None = None
    """The most prompts to answer at a time; by default as many as free memory holds. With 1, answers stream."""
    raw: bool = False
    """Continue the prompts verbatim, without the chat template."""
    json_schema: Path | None = None
    """File with a JSON schema that answers follow; needs llguidance."""
    regex: str | None = None
    """Regular expression, as of Rust's regex, that answers match as a whole; needs llguidance."""

    def validate(self) -> None:
        """Refuse missing prompts and files, and a system message without a template."""
        super().validate()
        if not self.prompt and not self.prompt_file:
            raise ValueError("no prompt: give --prompt, or --prompt-file with a file or - for standard input")
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template: leave out --raw, or put the text into the prompt")
        if self.prompt_file and self.prompt_file != STDIN and not self.prompt_file.is_file():
            raise ValueError(f"--prompt-file: no such file: {self.prompt_file}")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("--json-schema and --regex: an answer follows one of them; leave the other out")
        if self.json_schema and not self.json_schema.is_file():
            raise ValueError(f"--json-schema: no such file: {self.json_schema}")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(AssistantConfig):
    """Score texts, conversations or pairs of answers with a reward model."""

    data: tuple[str, ...]
    """Files, folders or data sets, as of `jaxglue train`; rows may have two answers."""
    columns: str = ""
    """New and old names of columns to rename, such as prompt=question,completion=answer."""
    output: Path | None = None
    """JSONL file for the rows with their scores; by default scores are printed."""

    def validate(self) -> None:
        """Refuse sampling."""
        super().validate()
        if self.sampling != SamplingConfig():
            raise ValueError("nothing is sampled: leave out --max-tokens, --temperature and other such flags")


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AssistantConfig):
    """Serve a model with an optional adapter over OpenAI's HTTP interface."""

    host: str = "127.0.0.1"
    """Address to listen at; others than this machine's own need --api-key."""
    port: Annotated[int, Range(ge=0, le=65535)] = 8000
    """Port to listen at."""
    api_key: str | None = None
    """Token that clients must send; by default none, for clients on this machine."""
    name: str | None = None
    """Name of the model for clients; by default the folder's."""
    adapters: Annotated[tuple[str, ...], Alias("lora_modules")] = ()
    """Adapters to serve beside the base, such as first=runs/first/adapter: requests name one, or the base, as model."""
    batch_size: PositiveInt = 64
    """The most answers at a time."""
    max_length: PositiveInt = 8192
    """The most tokens of prompt and answer together, within the model's limit."""
    max_requests: PositiveInt = 256
    """Requests being answered or waiting, beyond which further ones are refused."""

    def validate(self) -> None:
        """Refuse to serve other machines without a token, and adapters without names, folders or a base."""
        super().validate()
        if self.adapters and self.adapter:
            raise ValueError("--adapter is the one of all requests: name it among --adapters, or leave these out")
        if absent := [folder for folder in self.named_adapters.values() if not folder.is_dir()]:
            raise ValueError(f"--adapters: no such folder: {absent[0]}")
        if self.served_name in self.named_adapters:
            raise ValueError(f"--adapters: {self.served_name} is the base's name: use another, or give --name")
        if self.host not in _LOOPBACK and not self.api_key:
            raise ValueError(f"--host {self.host} lets other machines in: give --api-key, which clients must send")

    @property
    def named_adapters(self) -> dict[str, Path]:
        """Return the folders of adapters by their names; raise ValueError for one that is malformed or given twice."""
        named = dict[str, Path]()
        for entry in self.adapters:
            name, equals, folder = entry.partition("=")
            if not (name and equals and folder) or name in named:
                raise ValueError(f"--adapters: expected NAME=FOLDER with a name of its own, got {entry!r:.100}")
            named[name] = Path(folder)
        return named

    @property
    def served_name(self) -> str:
        """Return the model's name for clients."""
        return self.name or (self.adapter or self.folder).resolve().name


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AssistantConfig):
    """Run tasks of lm-evaluation-harness on a model with an optional adapter."""

    tasks: tuple[str, ...]
    """Names of tasks, separated by spaces or commas."""
    include_path: Path | None = None
    """Folder with further tasks, as YAML files."""
    num_fewshot: NonNegativeInt | None = None
    """Examples before each question; by default the task's."""
    limit: PositiveInt | None = None
    """Questions of each task; by default all."""
    chat_template: bool = False
    """Put questions through the model's chat template."""
    output: Path | None = None
    """JSON file for the results."""

    def validate(self) -> None:
        """Split the names of tasks; refuse sampling, which tasks set, and a missing folder of tasks."""
        super().validate()
        names = tuple(name.strip() for item in self.tasks for name in item.split(",") if name.strip())
        object.__setattr__(self, "tasks", names)
        if not names:
            raise ValueError("no task: name some with --tasks")
        if self.sampling != SamplingConfig():
            raise ValueError(
                "tasks set how answers are sampled: leave out --max-tokens, --temperature and other such flags"
            )
        if self.system is not None and not self.chat_template:
            raise ValueError("--system needs the chat template: add --chat-template")
        if self.include_path and not self.include_path.is_dir():
            raise ValueError(f"--include-path: no such folder: {self.include_path}")
