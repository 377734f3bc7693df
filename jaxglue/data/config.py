"""What to train on, and how rows become packed tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.config import Config, NonNegativeInt, PositiveInt, Range

Format = Literal["auto", "messages", "conversations", "prompt_completion", "text"]
LossOn = Literal["assistant", "all"]
Overlong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Data files, their reading, and the length of a packed row.

    Raises:
        ValueError: a value out of range, or both `eval_data` and `eval_fraction`.
    """

    data: tuple[str, ...]
    """Files or folders (JSONL, JSON, Parquet, a saved `datasets` folder), or `hf:owner/name` of the Hugging Face hub,
    which is the only thing that uses the network."""
    eval_data: tuple[str, ...] = ()
    """Held-out data, in the same forms."""
    eval_fraction: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of the documents of `data` to hold out instead, drawn with `seed`."""
    split: str = "train"
    """The split to take of a `datasets` folder or a data set of the hub."""
    format: Format = "auto"
    """What a row holds; `auto` tells from the keys of the first row and reports it."""
    loss_on: LossOn = "assistant"
    """`assistant`: assistant turns, or completions; text rows, which have neither, as a whole. `all`: everything."""
    seq_len: Annotated[int, Range(ge=2)] = 4096
    """T: tokens in a packed row."""
    overlong: Overlong = "truncate"
    """What happens to a document of more than `seq_len` tokens; the counts are reported."""
    chat_template: str | None = None
    """A Jinja file to use in place of the tokenizer's own chat template."""
    seed: NonNegativeInt = 0
    """Draws the held-out split; the report packs with it."""
    cache_dir: str = "runs/cache"
    """Where tokenized data are kept for the next run."""
    workers: PositiveInt | None = None
    """Tokenizing processes; by default as many as the CPUs where the data are many enough to pay for starting them."""

    def validate(self) -> None:
        """Refuse missing data, two kinds of held-out data, and a missing template."""
        if not self.data:
            raise ValueError("data is empty: name at least one file, folder or hf:owner/name")
        if self.eval_data and self.eval_fraction:
            raise ValueError("eval_data and eval_fraction are both given: leave one out")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template: no such file: {self.chat_template}")
