"""Look at training data as the model would see them, without GPU or weights.

jaxglue data preview --model models/Qwen3-8B --data chats.jsonl
jaxglue data preview --recipe quickstart
"""

from pathlib import Path

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from jaxglue.commands.configs import PreviewConfig
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.prepare import prepare_data, read_vision
from jaxglue.data.progress import DataProgress
from jaxglue.data.report import Bin, count_duplicates, length_bins, longest, trained_parts
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.hub import model_path
from jaxglue.hf.serving import load_own_tokenizer
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.terminal.console import Console
from jaxglue.training.workload import row_text, settle

_BAR = 40
_SHADES = ("bold black on green3", "bold black on spring_green3"), ("dim", "default")
"""Styles of trained and of other tokens, in turns."""


def main(config: PreviewConfig) -> None:
    """Print a preview."""
    preview(config)


def preview(config: PreviewConfig, console: Console | None = None) -> None:
    """Print a preview.

    Raises:
        ValueError: an unusable model folder or data.
    """
    console = console or Console()
    folder = model_path(config.model.model, config.model.revision, weights=False)
    tokenizer = load_own_tokenizer(config.model.tokenizer or folder, config.model.adapter)
    model = _read_model(folder) if config.data.seq_len is None else None
    config = settle(config, model, devices=1) if model else config
    task = config.objective.task(shared_prompt=True)
    columns = config.objective.columns
    processor = read_vision(folder, tokenizer, **config.data.image_limits)
    prepared = prepare_data(
        config.data, tokenizer, progress=DataProgress(), task=task, columns=columns, processor=processor
    )
    data = prepared.train
    for document in range(min(config.rows, len(data))):
        console.rule(f"document {document + 1}: {data.lengths[document]:,} tokens, {data.targets[document]:,} targets")
        console.print(_colored(data, document, tokenizer, config.max_tokens, console.color_system is not None))
    console.rule("all documents")
    bins = length_bins(data.lengths)
    console.print("\n".join([*_bars(bins), "", str(prepared.report)]))
    rows = [] if prepared.stream else longest(data, config.data.sources, config.rows)
    lines = [f"rows: {row_text(config.data.row_tokens, model)}"]
    lines += [f"duplicates: {count_duplicates(data):,} documents"]
    lines += [f"longest: {length:,} tokens, {origin}" for length, origin in rows]
    console.print("\n".join(lines), soft_wrap=True)
    if config.picture:
        _draw(bins, config.picture)


def _read_model(folder: Path) -> DecoderConfig | None:
    """Return the model's architecture; None for a folder that holds a tokenizer alone."""
    return config_from_hf(read_config(folder)) if (folder / "config.json").is_file() else None


def _colored(
    data: TokenDataset, document: int, tokenizer: PreTrainedTokenizerBase, max_tokens: int, colors: bool
) -> Text:
    """Return a document's tokens in alternating shades; without colors, trained parts stand in ⟦ ⟧."""
    text, before = Text(), False
    for index, (part, trained) in enumerate(trained_parts(data, document, tokenizer)):
        if index == max_tokens:
            text.append(" …")
            break
        if not colors and trained != before:
            text.append("⟦" if trained else "⟧")
        text.append(part, style=_SHADES[not trained][index % 2])
        before = trained
    return text.append("⟧" if before and not colors else "")


def _bars(bins: list[Bin]) -> list[str]:
    most = max(bar.documents for bar in bins)
    width = len(f"{bins[-1].high:,}")
    rows = ((bar, "█" * -(-bar.documents * _BAR // most)) for bar in bins)
    return [f"{bar.low:>{width},}–{bar.high:>{width},} {line:<{_BAR}} {bar.documents:,}" for bar, line in rows]


def _draw(bins: list[Bin], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.bar([bar.low for bar in bins], [bar.documents for bar in bins], width=bins[0].high, align="edge")
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    figure.savefig(path)
