"""Settings of `generate`, `score`, `serve` and `evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from jaxglue.generation.config import AnsweringConfig, AssistantConfig, SamplingConfig
from jaxglue.serve.local import LOOPBACK
from jaxglue.settings.config import Alias, NonNegativeInt, PositiveInt, Range

STDIN = Path("-")
"""Names standard input as a file of prompts, and standard output as a file of answers."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AnsweringConfig):
    """Answer prompts with a model and an optional adapter."""

    prompt: tuple[str, ...] = ()
    """Prompt to answer; repeatable."""
    prompt_file: Path | None = None
    """File with one further prompt per line, - for standard input; in a .jsonl file, lines hold `prompt` or
    `messages`."""
    image: tuple[str, ...] = ()
    """Image file before each prompt; repeatable."""
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
        if self.sampling != SamplingConfig() or self.exact:
            raise ValueError("nothing is sampled: leave out --max-tokens, --temperature, --exact and other such flags")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AnsweringConfig):
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
    max_length: Annotated[PositiveInt | None, Alias("max_model_len")] = None
    """The most tokens of prompt and answer together; by default the model's limit, where memory has room for it."""
    allowed_origins: Annotated[tuple[str, ...], Alias("cors_origins")] = ()
    """Origins whose web pages may ask, such as http://localhost:3000, and no others; * for all, with --api-key."""
    request_log: bool = True
    """Print a line for each request."""
    adapter_folder: Path | None = None
    """Folder whose adapters clients may load and unload while serving (/v1/load_lora_adapter), for trusted ones."""
    adapter_ranks: PositiveInt = 64
    """Ranks that adapters loaded while serving share, with --adapter-folder."""
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
        for origin in self.allowed_origins:
            _check_origin(origin)
        if "*" in self.allowed_origins and not self.api_key:
            raise ValueError("--allowed-origins * lets every web page ask: give --api-key, or name origins")
        if self.adapter_folder and not self.adapter_folder.is_dir():
            raise ValueError(f"--adapter-folder: no such folder: {self.adapter_folder}")
        if self.adapter_folder and self.adapter:
            raise ValueError("--adapter is the one of all requests: name it among --adapters to load others beside it")
        if self.host not in LOOPBACK and not self.api_key:
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
    def spare_ranks(self) -> int:
        """Return the ranks that stand free for adapters that are loaded while serving."""
        return self.adapter_ranks if self.adapter_folder else 0

    @property
    def served_name(self) -> str:
        """Return the model's name for clients."""
        return self.name or (self.adapter or self.folder).resolve().name


def _check_origin(origin: str) -> None:
    """Raise ValueError for a text that no browser sends as a page's origin."""
    parts = urlsplit(origin)
    if origin != "*" and (not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}"):
        raise ValueError(f"--allowed-origins: expected scheme and host, such as http://localhost:3000, got {origin!r}")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AssistantConfig):
    """Run tasks of lm-evaluation-harness on a model with an optional adapter, or measure answers in one pass."""

    tasks: tuple[str, ...] = ()
    """Names of tasks, separated by spaces or commas."""
    data: tuple[str, ...] = ()
    """Rows in place of tasks, as of training: of decisions, texts or documents."""
    columns: str = ""
    """New and old names of the rows' columns to rename, such as query=question."""
    diagram: Path | None = None
    """PNG for the reliability diagram of decisions."""
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
        if bool(names) == bool(self.data):
            raise ValueError("name tasks with --tasks, or files of rows with --data")
        if self.exact and self.data:
            raise ValueError("--exact is for tasks, and parts of rows are read together: leave out --data, or --exact")
        if self.diagram and not self.data:
            raise ValueError("--diagram: it is of decisions in files of rows: give --data")
        if self.sampling != SamplingConfig():
            raise ValueError(
                "tasks set how answers are sampled: leave out --max-tokens, --temperature and other such flags"
            )
        if self.system is not None and not self.chat_template:
            raise ValueError("--system needs the chat template: add --chat-template")
        if self.include_path and not self.include_path.is_dir():
            raise ValueError(f"--include-path: no such folder: {self.include_path}")


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(AssistantConfig):
    """Write the embeddings of texts, or mine hard negatives for pairs."""

    data: tuple[str, ...]
    """Files, folders or data sets: rows with `text`, or to mine those of training."""
    column: str = "text"
    """Column of the texts."""
    output: Path = Path("embeddings.npy")
    """NumPy file [texts, dimensions] in float32; a .jsonl file holds rows with `embedding`, or mined negatives."""
    query: bool = False
    """Put the prompt of queries before texts, not that of documents."""
    dimensions: PositiveInt | None = None
    """Leading dimensions to keep, normalized again."""
    mine: NonNegativeInt = 0
    """Write the rows of pairs with so many hard negatives each: the documents most similar to an anchor."""
    mine_margin: Annotated[float, Range(gt=0, le=1)] = 0.95
    """A negative is at most this share as similar as the positive: others may be positives, too."""

    def validate(self) -> None:
        """Refuse sampling, and mined rows in a file of numbers."""
        super().validate()
        if self.sampling != SamplingConfig() or self.exact:
            raise ValueError("nothing is sampled: leave out --max-tokens, --temperature, --exact and other such flags")
        if self.mine and self.output.suffix != ".jsonl":
            raise ValueError(f"--output {self.output}: rows with mined negatives need a .jsonl file")
