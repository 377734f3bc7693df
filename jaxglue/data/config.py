"""What to train on, and how rows become packed tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Format = Literal["auto", "messages", "conversations", "prompt_completion", "text"]
LossOn = Literal["assistant", "all"]
Overlong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data files, their reading, and the length of a packed row.

    Raises:
        ValueError: a value out of range, or both `eval_data` and `eval_fraction`.
    """

    data: tuple[str, ...]
    """Files or folders (JSONL, JSON, Parquet, a saved `datasets` folder), or `hf:owner/name` of the Hugging Face hub,
    which is the only thing that uses the network."""
    eval_data: tuple[str, ...] = ()
    """Held-out data, in the same forms."""
    eval_fraction: float = 0.0
    """Share of the documents of `data` to hold out instead, drawn with `seed`."""
    split: str = "train"
    """The split to take of a `datasets` folder or a data set of the hub."""
    format: Format = "auto"
    """What a row holds; `auto` tells from the keys of the first row and reports it."""
    loss_on: LossOn = "assistant"
    """`assistant`: assistant turns, or completions; text rows, which have neither, as a whole. `all`: everything."""
    seq_len: int = 4096
    """T: tokens in a packed row."""
    overlong: Overlong = "truncate"
    """What happens to a document of more than `seq_len` tokens; the counts are reported."""
    chat_template: str | None = None
    """A Jinja file to use in place of the tokenizer's own chat template."""
    seed: int = 0
    """Draws the held-out split; the report packs with it."""
    cache_dir: str = "runs/cache"
    """Where tokenized data are kept for the next run."""
    workers: int | None = None
    """Tokenizing processes; by default as many as the CPUs where the data are many enough to pay for starting them."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data is empty: name at least one file, folder or hf:owner/name")
        _check_choices(self)
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len}: a row needs at least 2 tokens, one to predict from the other")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: expected 0 <= eval_fraction < 1")
        if self.eval_data and self.eval_fraction:
            raise ValueError("eval_data and eval_fraction are both given: leave one out")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: expected at least 1")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template: no such file: {self.chat_template}")

    @property
    def sources(self) -> tuple[str, ...]:
        """`data`, also where it is a single one."""
        return _as_tuple(self.data)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """`eval_data`; empty without."""
        return _as_tuple(self.eval_data)


def _as_tuple(sources: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (sources,) if isinstance(sources, str) else tuple(sources or ())


def _check_choices(config: DataConfig) -> None:
    for name, choices in (("format", Format), ("loss_on", LossOn), ("overlong", Overlong)):
        if (value := getattr(config, name)) not in get_args(choices):
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(get_args(choices))}")
