"""Configuration of data: sources with settings of their own (`chats.jsonl?weight=2`), and their processing."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import unquote

from jaxglue.settings.config import (
    Alias,
    Config,
    Kind,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Requires,
    Synonyms,
    is_jinja,
    plain_fields,
)
from jaxglue.settings.spelling import nearest

HUB_PREFIX = "hf:"
Format = Literal[
    "auto",
    "auto_chat",
    "messages",
    "conversations",
    "prompt_completion",
    "alpaca",
    "alpaca_chat",
    "question_answer",
    "segments",
    "text",
    "preference",
    "labeled",
]
LossOn = Literal["assistant", "completion", "last-turn", "all"]
Columns = Mapping[str, float]
"""Columns of numbers that an objective reads beside a row's text, each with the value of rows without it."""
NO_COLUMNS: Columns = MappingProxyType({})
TURN_END = "turn_end"
"""Stands for a token's text: the one that ends the chat template's turns."""
Overlong = Literal["truncate", "split", "drop", "error"]
DEFAULT_SEQ_LEN = 4096
"""Tokens in a row where no length is given; fewer for a model of fewer positions."""


@dataclass(frozen=True, kw_only=True)
class Source(Config):
    """A file, folder or data set with the settings of its rows."""

    name: str
    """Path, or `hf:owner/name`."""
    split: str = "train"
    """Split of a `datasets` folder or hub data set."""
    format: Format = "auto"
    """Row format."""
    loss_on: LossOn = "assistant"
    """Tokens with loss."""
    system: str = ""
    """System message of chats that have none."""
    rename: str = ""
    """New and old names of columns, `prompt=question,completion=answer`."""
    weight: PositiveFloat = 1.0
    """Passes over the source in an epoch."""
    share: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of an epoch's tokens; 0 leaves the choice to `weight`."""
    rows: PositiveInt | None = None
    """First rows to read, and no others."""
    overlong: Overlong | None = None
    """Treatment of its documents above `seq_len` tokens; None for that of all."""
    prompt: str = ""
    """Jinja text over a row's columns, by name or as `row["name"]`, that makes its prompt; the row then is of format
    prompt_completion."""
    completion: str = ""
    """Jinja text that makes its completion."""

    def validate(self) -> None:
        """Refuse malformed columns, and two kinds of weight."""
        _ = self.columns
        if bool(self.prompt) != bool(self.completion):
            raise ValueError(f"{self.name}: give both prompt and completion, or neither")
        if self.share and self.weight != 1:
            raise ValueError(f"{self.name}: weight and share are both given: leave one out")

    @property
    def columns(self) -> dict[str, str]:
        """Return old names of columns, by new name.

        Raises:
            ValueError: not of the form new=old,new=old.
        """
        pairs = [part.strip().split("=") for part in self.rename.split(",") if part.strip()]
        if bad := [pair for pair in pairs if len(pair) != 2 or not all(pair)]:
            raise ValueError(f"columns: expected new=old,new=old, such as prompt=question, got {'='.join(bad[0])!r}")
        return {new.strip(): old.strip() for new, old in pairs}

    def __str__(self) -> str:
        return self.name


_OPTIONS = {
    "columns": "rename",
    **{field.name: field.name for field in fields(Source) if field.name not in ("name", "rename")},
}
"""Fields by the names of their options."""


def parse_source(text: str, **defaults: str) -> Source:
    """Parse `name?option=value&option=value`; values are percent-decoded, and a file of the whole name comes first.

    Raises:
        ValueError: an unknown option, or a value out of its range.
    """
    name, _, query = (text, "", "") if os.path.exists(text) else text.partition("?")
    options = dict(defaults)
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in _OPTIONS or not equals:
            raise ValueError(f"{text}: unknown option {part!r}{nearest(key, _OPTIONS)}: use {', '.join(_OPTIONS)}")
        options[_OPTIONS[key]] = unquote(value)
    known = plain_fields(Source)
    try:
        return Source(name=name, **{key: _read(known[key][1], key, value) for key, value in options.items()})
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return files' names without their folders, and numbered where several sources share one."""
    short = [name if name.startswith(HUB_PREFIX) else os.path.basename(name.rstrip("/")) or name for name in names]
    return tuple(
        name if short.count(name) == 1 else f"{name}#{short[:index].count(name) + 1}"
        for index, name in enumerate(short)
    )


def _read(kind: Kind, key: str, value: str) -> Any:
    try:
        return kind.read_text(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


class LabelTask(NamedTuple):
    """Treatment of documents with labels."""

    values: int
    """Each label is a whole number below."""
    padding: int | None = None
    """Token at which no label is read at the end of a document: sequence classifiers skip it."""
    end: int | None = None
    """End of a text, at which none is read either: transformers' pipelines do not add it."""
    is_chat: bool = False
    """Documents are rendered, with the ends that the template writes."""


class AnswerTask(NamedTuple):
    """Treatment of preference data by an objective."""

    labeled: bool = False
    """Answers are judged one by one, each beside another prompt's answer (KTO)."""
    shared_prompt: bool = True
    """Rows hold a pair's prompt once."""
    copies: bool = False
    """Such rows say where operations that follow one continuation find copies of prompts."""
    prompt_loss: bool = False
    """The prompt's tokens count as a part of their own (ORPO)."""
    scored: bool = False
    """Answers are judged at their last token, for reward models."""
    padding: int | None = None
    """Token after which no answer is judged: sequence classifiers skip it at the end."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Data files, how to read them, and the packed row length.

    Raises:
        ValueError: a value out of range, or both `eval_data` and `eval_fraction`.
    """

    data: tuple[str, ...]
    """Files or folders (JSONL, JSON, CSV, TSV, Parquet, saved `datasets`), or `hf:owner/name` and
    `hf:owner/name:subset` on the Hugging Face hub, the only source that uses the network. Each may have settings of
    its own, `chats.jsonl?format=messages&weight=2`."""
    eval_data: Annotated[tuple[str, ...], Alias("eval_dataset")] = ()
    """Held-out data, from the same kinds of sources."""
    eval_fraction: Annotated[NonNegativeFloat, Alias("val_set_size", "val_size", "test_split_size")] = 0.0
    """Fraction of `data` to hold out instead, sampled with `seed`; above 1, a number of documents."""
    split: Annotated[str, Alias("dataset_train_split", "dataset_split")] = "train"
    """Split of a `datasets` folder or hub data set."""
    format: Format = "auto"
    """Row format; `auto` detects it from the first row's keys and reports it; `auto_chat` takes Alpaca's rows for
    chats, too, as LLaMA-Factory does."""
    columns: str = ""
    """New and old names of columns to rename, such as prompt=question,completion=answer."""
    system: Annotated[str, Alias("default_system", "default_system_message", "system_prompt")] = ""
    """System message of chats that have none."""
    mix_temperature: Annotated[float, Range(ge=1)] = 1.0
    """T: sources take shares proportional to their tokens to the power 1/T; 1 reads each once in an epoch."""
    loss_on: Annotated[
        LossOn,
        Alias("train_on_inputs", "train_on_prompt", values={True: "all", False: "assistant"}),
        Alias(
            "assistant_only_loss",
            "completion_only_loss",
            "train_on_responses_only",
            values={True: "assistant", False: "all"},
        ),
        Alias("mask_history", values={True: "last-turn"}),
        Alias("train_on"),
    ] = "assistant"
    """Tokens with loss. `assistant`: assistant turns or completions, and whole text rows. `completion`: completions,
    and whole chats and texts, as TRL by default. `last-turn`: of chats the last assistant message alone. `all`: every
    token."""
    mask_empty_thinking: bool = False
    """Leave out of the loss the empty thinking with which a chat template begins turns without reasoning."""
    allow_special_tokens: tuple[str, ...] = ()
    """Special tokens that messages of chats may hold; others are read as text there, and reported."""
    seq_len: (
        Annotated[int, Range(ge=2), Alias("max_seq_len", "max_seq_length", "max_length", "sequence_len", "cutoff_len")]
        | None
    ) = None
    """T: tokens in a packed row; by default 4,096, or the model's positions if those are fewer."""
    overlong: Annotated[Overlong, Alias("excess_length_strategy"), Synonyms(**{"raise": "error"})] = "truncate"
    """Treatment of documents above `seq_len` tokens, with counts reported; no image is cut. `split` makes documents of
    `seq_len` tokens of them, for pretraining."""
    image_max_tokens: PositiveInt | None = None
    """Most tokens of an image, which is made smaller to fit; by default 2,048, or fewer if the model's files say so."""
    image_max_pixels: Annotated[PositiveInt, Alias("max_pixels")] | None = None
    """Most pixels of an image, which is made smaller before the model's own rule of sizes; without
    `image_max_tokens`, that rule alone bounds it further."""
    video_max_pixels: PositiveInt | None = None
    """The same of a video's frame."""
    chat_template: Annotated[str, Alias("chat_template_path")] | None = None
    """Jinja file, or text with Jinja's braces, that replaces the tokenizer's chat template."""
    eos_token: Annotated[str, Alias("replace_eos", values={True: TURN_END})] | None = None
    """Token that ends texts in place of the tokenizer's; `turn_end` names the one that ends the chat template's
    turns."""
    stop_tokens: Annotated[tuple[str, ...], Alias("eot_tokens")] = ()
    """Further tokens at which answers end; results list them beside the end of turn and the eos token."""
    seed: Annotated[NonNegativeInt, Alias("random_state")] = 0
    """Seed of the held-out split and of the reported packing."""
    cache_dir: Annotated[str, Alias("dataset_prepared_path")] = "runs/cache"
    """Folder that caches tokenized data."""
    streaming: Annotated[bool, Alias("dataset_streaming"), Requires(("steps",), "a stream has no epochs")] = False
    """Tokenize and pack while training runs, for data larger than memory or disk: no cache, and a run of --steps."""
    stream_tokens: PositiveInt = 2**23
    """Tokens that are shuffled and packed together with --streaming; a step needs far fewer."""
    workers: (
        Annotated[PositiveInt, Alias("preprocessing_num_workers", "dataset_num_proc", "dataset_processes")] | None
    ) = None
    """Tokenizing processes; by default one, or one per CPU for large data without --streaming."""

    def validate(self) -> None:
        """Refuse missing data, two kinds of held-out data, and a missing template."""
        if not self.data:
            raise ValueError("data is empty: name at least one file, folder or hf:owner/name")
        for name in ("data", "eval_data", "cache_dir"):
            value = getattr(self, name)
            if not all(item.strip() for item in ([value] if isinstance(value, str) else value)):
                raise ValueError(f"{name}: an empty name would stand for the current folder: name a file or folder")
        if self.eval_fraction == 1 or (self.eval_fraction > 1 and self.eval_fraction % 1):
            raise ValueError(f"eval_fraction: expected below 1, or a number of documents, got {self.eval_fraction}")
        if self.eval_data and self.eval_fraction:
            raise ValueError("eval_data and eval_fraction are both given: leave one out")
        _check_mixing(self.sources, self.mix_temperature)
        if self.streaming:
            self._check_streaming()
        if any(source.share or source.weight != 1 for source in self.eval_sources):
            raise ValueError("eval_data: held-out data have no weight or share: each document counts once")
        if self.chat_template is not None and not (is_jinja(self.chat_template) or Path(self.chat_template).is_file()):
            raise ValueError(f"chat_template: no such file: {self.chat_template}")

    def _check_streaming(self) -> None:
        if self.eval_fraction:
            raise ValueError("streaming: nothing can be sampled from a stream: use eval_data in place of eval_fraction")
        if any(source.weight != 1 for source in self.sources) or self.mix_temperature != 1:
            raise ValueError("streaming: a stream's size is unknown: give its sources shares, not weights")
        if any(source.rows for source in self.sources):
            raise ValueError("streaming: a stream has no first rows: end it with --steps, and leave out rows=")
        if len(self.sources) > 1 and not all(source.share for source in self.sources):
            raise ValueError("streaming: several sources need a share each, such as chats.jsonl?share=0.7")

    @property
    def encoding(self) -> dict[str, Any]:
        """Return the settings of tokenization for all sources, without those at their defaults."""
        settings = {"allowed": self.allow_special_tokens, "mask_empty_thinking": self.mask_empty_thinking}
        return {name: value for name, value in settings.items() if value}

    @property
    def image_limits(self) -> dict[str, int | None]:
        """Return the limits of images, as they are read."""
        return {
            "max_tokens": self.image_max_tokens,
            "pixels": self.image_max_pixels,
            "frame_pixels": self.video_max_pixels,
        }

    @property
    def row_tokens(self) -> int:
        """Return T: `seq_len`, or its default."""
        return self.seq_len or DEFAULT_SEQ_LEN

    def overlong_of(self, source: Source) -> Overlong:
        """Return the treatment of a source's documents above `seq_len` tokens: its own, or that of all."""
        return self.overlong if source.overlong is None else source.overlong

    def within(self, positions: int) -> Self:
        """Return the configuration with its `seq_len`, whose default is at most the model's `positions`."""
        return self if self.seq_len else replace(self, seq_len=min(DEFAULT_SEQ_LEN, positions))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the training data."""
        return self._parse(self.data)

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """Return the sources of the held-out data."""
        return self._parse(self.eval_data)

    def _parse(self, texts: tuple[str, ...]) -> tuple[Source, ...]:
        common = {"format": self.format, "split": self.split, "loss_on": self.loss_on}
        return tuple(parse_source(text, **common, system=self.system, rename=self.columns) for text in texts)


def _check_mixing(sources: tuple[Source, ...], temperature: float) -> None:
    shares = [source.share for source in sources]
    if any(shares) and (not all(shares) or len(shares) < 2 or abs(sum(shares) - 1) > 1e-6):
        raise ValueError("data: give all sources a share, with a sum of 1, or none")
    if temperature != 1 and (any(shares) or any(source.weight != 1 for source in sources)):
        raise ValueError("mix_temperature: the sources have weights or shares already: leave one out")
