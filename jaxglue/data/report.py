"""Reports of prepared data: documents, tokens, packing, sources."""

from dataclasses import dataclass

from jaxglue.data.batch import TokenDataset
from jaxglue.data.packing import PackPlan


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Sizes of an epoch of the training or the held-out documents."""

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
class SourceReport:
    """A source's part of the training data."""

    name: str
    format: str
    documents: int
    passes: float
    """Passes over the documents in an epoch."""
    share: float
    """Share of the first epoch's tokens, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.share:.1%} {self.name}: {self.documents:,} {self.format} documents, {self.passes:.3g} × an epoch"


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
    sources: tuple[SourceReport, ...]
    """Reports of the training data's sources."""
    notes: tuple[str, ...] = ()
    """Probable mistakes, such as a file given twice or columns that are not used."""

    def __str__(self) -> str:
        read = f"{self.rows:,} rows of format {self.format}" + " (tokens from the cache)" * self.cached
        lines = [f"{read}, {self.truncated:,} truncated, {self.dropped:,} dropped", f"train: {self.train}"]
        lines += [f"eval: {self.eval}"] * bool(self.eval)
        lines += [f"  {source}" for source in self.sources if len(self.sources) > 1 or source.passes != 1]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def split_report(dataset: TokenDataset, plan: PackPlan, seq_len: int) -> SplitReport:
    """Return the sizes of the documents of a plan."""
    tokens = int(dataset.lengths[plan.documents].sum())
    return SplitReport(
        documents=len(plan.documents),
        tokens=tokens,
        target_tokens=int(dataset.targets[plan.documents].sum()),
        packed_rows=plan.rows,
        efficiency=tokens / (plan.rows * seq_len) if plan.rows else 0.0,
    )
