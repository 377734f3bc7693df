"""Settings of `jaxglue draft`; importing them loads no JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.generation.config import AssistantConfig
from jaxglue.settings.config import Alias, PositiveFloat, PositiveInt, Range


@dataclass(frozen=True, kw_only=True)
class DraftConfig(AssistantConfig):
    """Train a draft head of EAGLE-3's kind for a model, with an optional adapter, that has none of its own."""

    data: tuple[str, ...]
    """Files, folders or data sets, as of `jaxglue train`."""
    columns: str = ""
    """New and old names of columns to rename, such as prompt=question,completion=answer."""
    output: Annotated[Path, Alias("output_dir")]
    """New folder of the head; absent or empty."""
    answers: Literal["own", "given"] = "own"
    """What the head learns on: what the model itself answers to the rows, in place of their last answers, by the flags
    of sampling; or the rows as they are."""
    drafts: Annotated[int, Range(ge=1, le=5), Alias("ttt_steps")] = 3
    """Drafts in a row that the head is trained for."""
    epochs: Annotated[PositiveInt, Alias("num_train_epochs")] = 1
    """Passes over the texts."""
    seq_len: Annotated[int, Range(ge=8, le=2**20), Alias("max_seq_length", "max_length")] = 2048
    """Tokens of a row, into which texts are packed; the longest text."""
    batch_size: PositiveInt = 8
    """Rows of an optimizer step."""
    learning_rate: Annotated[PositiveFloat, Alias("lr")] = 1e-4
    """Peak learning rate."""
    save_every: Annotated[PositiveInt, Alias("save_steps")] = 100
    """Optimizer steps between checkpoints, which stand beside the output folder until the head is written."""
    resume: bool = False
    """Continue the run of this output folder that was interrupted."""
    eval_fraction: Annotated[float, Range(gt=0, lt=1)] = 0.05
    """Share of the texts, the last ones, that are held out to measure how many drafts are accepted."""
