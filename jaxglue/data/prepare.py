"""Preparation of data sets and their report from a `DataConfig`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import TokenDataset
from jaxglue.data.config import DataConfig
from jaxglue.data.packing import plan_epoch
from jaxglue.data.selection import Selection, hold_out, select_documents
from jaxglue.data.store import TokenStore
from jaxglue.data.tokenize import Progress, Tokenized, tokenize


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Sizes of the training or the held-out documents."""

    documents: int
    tokens: int
    target_tokens: int
    """Tokens with loss."""
    packed_rows: int
    """Rows of `seq_len` tokens in the first epoch; other epochs may differ by a few."""
    efficiency: float
    """Fraction of the packed rows holding tokens, 0 to 1."""

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.target_tokens:,} targets) "
            f"in {self.packed_rows:,} packed rows, {self.efficiency:.1%} full"
        )


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Statistics of the data; `rows`, `truncated` and `dropped` include held-out data."""

    format: str
    cached: bool
    """Tokens come from the cache."""
    rows: int
    """Rows read."""
    truncated: int
    """Documents truncated to `seq_len` tokens."""
    dropped: int
    """Documents omitted as overlong or without target tokens."""
    train: SplitReport
    eval: SplitReport | None
    notes: tuple[str, ...] = ()
    """Probable mistakes, such as a file given twice."""

    def __str__(self) -> str:
        read = f"{self.rows:,} rows of format {self.format}" + " (tokens from the cache)" * self.cached
        lines = [f"{read}, {self.truncated:,} truncated, {self.dropped:,} dropped", f"train: {self.train}"]
        lines += [f"eval: {self.eval}"] * bool(self.eval)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Training and optional held-out documents, and their report."""

    train: TokenDataset
    eval: TokenDataset | None
    report: DataReport

    @property
    def fingerprint(self) -> str:
        """Return the training data's fingerprint."""
        return self.train.fingerprint


def prepare_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Read, template, tokenize, mask, truncate and split the data, on the host only.

    Args:
        config: data sources and processing.
        tokenizer: of the model; adopts `config.chat_template`, so that generation and export agree with training.
        vocab_size: exclusive upper bound of token ids, the rows of the model's embedding.
        progress: called with the number of rows tokenized so far.

    Raises:
        ValueError: unusable data, naming file and line where possible.
    """
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    tokenized, parts = [], []
    for sources in filter(None, (config.data, config.eval_data)):
        tokenized.append(tokenize(sources, config, tokenizer, progress))
        _check_vocabulary(tokenized[-1].store, vocab_size)
        parts.append(select_documents(tokenized[-1].store, config, sources))
    splits = hold_out(parts[0], config) if config.eval_fraction else tuple(parts)
    sizes = [_split_report(part, config) for part in splits]
    report = DataReport(
        format=tokenized[0].format,
        cached=all(one.cached for one in tokenized),
        rows=sum(len(one.store.lengths) for one in tokenized),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
        train=sizes[0],
        eval=sizes[1] if len(sizes) > 1 else None,
        notes=tuple(_notes(tokenized)),
    )
    return PreparedData(train=splits[0].dataset, eval=splits[1].dataset if len(splits) > 1 else None, report=report)


def _notes(tokenized: list[Tokenized]) -> Iterator[str]:
    """Yield one line for each file read twice, and for damage found in the cache."""
    seen: dict[str, tuple[str, Tokenized]] = {}
    for one in tokenized:
        for path, digest in one.digests:
            earlier, among = seen.get(digest, ("", None))
            if among is one:
                yield f"{path} is read twice: its bytes are those of {earlier}, so its rows count twice"
            elif among:
                yield f"{path} is held out and trained on: its bytes are those of {earlier}"
            seen.setdefault(digest, (path, one))
        if one.damage:
            yield one.damage


def _check_vocabulary(store: TokenStore, vocab_size: int | None) -> None:
    largest = store.info["max_token"]
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the data hold token id {largest}, but the model's vocabulary has {vocab_size} entries: "
            "use the model's own tokenizer, or enlarge its embedding"
        )


def _split_report(part: Selection, config: DataConfig) -> SplitReport:
    tokens = int(part.dataset.lengths.sum())
    rows = plan_epoch(part.dataset.lengths, seq_len=config.seq_len, seed=config.seed, epoch=0).rows
    return SplitReport(
        documents=len(part.dataset),
        tokens=tokens,
        target_tokens=int(part.dataset.targets.sum()),
        packed_rows=rows,
        efficiency=tokens / (rows * config.seq_len),
    )
