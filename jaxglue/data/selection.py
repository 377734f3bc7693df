"""Selection of documents: truncation, dropping and the held-out split."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from jaxglue.data.batch import TokenDataset
from jaxglue.data.config import DataConfig
from jaxglue.data.readers import read_rows
from jaxglue.data.sources import Source
from jaxglue.data.store import TokenStore


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selected documents with truncation and drop counts."""

    dataset: TokenDataset
    truncated: int
    """Documents truncated to `seq_len` tokens."""
    dropped: int
    """Documents omitted as overlong or without target tokens."""


def select_documents(store: TokenStore, config: DataConfig, source: Source) -> Selection:
    """Select the documents with target tokens, fitted into a row.

    Raises:
        ValueError: a document above `seq_len` under `overlong='error'`, or no document left.
    """
    overlong = np.flatnonzero(store.lengths > config.row_tokens)
    if len(overlong) and config.overlong == "error":
        row = int(overlong[0])
        raise overlong_error(config, row_origin(source, row), int(store.lengths[row]))
    lengths = np.minimum(store.lengths, config.row_tokens)
    targets = store.targets_within(store.offsets[:-1] + lengths)
    keep = targets > 0
    if config.overlong == "drop":
        keep[overlong] = False
    if not keep.any():
        raise _nothing_left(store, config, source, len(overlong))
    documents = np.flatnonzero(keep)
    return Selection(
        dataset=TokenDataset(store=store, documents=documents, lengths=lengths[documents], targets=targets[documents]),
        truncated=int(keep[overlong].sum()),
        dropped=len(keep) - len(documents),
    )


def join_selections(selections: Sequence[Selection]) -> Selection:
    """Concatenate the documents of several sources."""
    if len(selections) == 1:
        return selections[0]
    first, *others = (selection.dataset for selection in selections)
    return Selection(
        dataset=replace(first, **first.joined(others)),
        truncated=sum(selection.truncated for selection in selections),
        dropped=sum(selection.dropped for selection in selections),
    )


def hold_out(selection: Selection, config: DataConfig) -> tuple[Selection, Selection]:
    """Hold out a random `eval_fraction` of the documents, preserving their order.

    Raises:
        ValueError: either part would be empty.
    """
    total = len(selection.dataset)
    count = round(total * config.eval_fraction)
    if not 0 < count < total:
        held = "no document would be held out" if count == 0 else "no document would be left to train on"
        raise ValueError(
            f"eval_fraction={config.eval_fraction} of {total} documents: {held}; change it or use eval_data"
        )
    is_eval = np.zeros(total, np.bool_)
    is_eval[np.random.default_rng(config.seed).permutation(total)[:count]] = True
    return _part(selection, ~is_eval), _part(selection, is_eval)


def _part(selection: Selection, chosen: np.ndarray) -> Selection:
    return Selection(dataset=selection.dataset.select(chosen), truncated=0, dropped=0)


def row_origin(source: Source, row: int) -> str:
    """Return the origin of a source's row."""
    return next(islice(read_rows(source), row, None)).origin


def overlong_error(config: DataConfig, origin: str, tokens: int) -> ValueError:
    """Return the error for a row of more tokens than `seq_len`."""
    return ValueError(
        f"{origin}: {tokens} tokens, but seq_len={config.row_tokens}: raise --seq-len, shorten the row, "
        "or choose --overlong truncate or drop"
    )


def _nothing_left(store: TokenStore, config: DataConfig, source: Source, overlong: int) -> ValueError:
    if overlong:
        return ValueError(
            f"{source}: no document has a target token within seq_len={config.row_tokens} tokens "
            f"({overlong} of {len(store.lengths)} are longer): raise --seq-len"
        )
    return ValueError(
        f"{source}: the loss mask leaves no token to train on in any row: check the rows, or use --loss-on all"
    )
