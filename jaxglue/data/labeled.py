"""Data sets of whole documents with labels, which are read at their last tokens."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxglue.data.batch import Batch
from jaxglue.data.config import Columns, DataConfig, LabelTask, Source
from jaxglue.data.dataset import Selection, TokenDataset, overlong_error, read_columns, row_origin, within_row
from jaxglue.data.images import ImageReader, ImageRules
from jaxglue.data.packing import PackPlan
from jaxglue.data.store import TokenStore


@dataclass(frozen=True, kw_only=True)
class LabeledDataset(TokenDataset):
    """Documents of which the last token counts, with the labels in `columns`."""

    def build_batch(self, plan: PackPlan, rows: Int[np.ndarray, "B"], step: Any, **shape: Any) -> Batch:
        """Build the batch of these rows of the plan; see `TokenDataset.build_batch`."""
        batch = super().build_batch(plan, rows, step, **shape)
        segments, positions = batch.segments, np.arange(batch.tokens.shape[1])
        lasts = (np.asarray(segments.ends) - 1 == positions) & (np.asarray(segments.segment_ids) > 0)
        return replace(batch, targets=batch.tokens, loss_weights=lasts.astype(np.float32))


def last_tokens(store: TokenStore, unread: tuple[int | None, ...]) -> Int[np.ndarray, "documents"]:
    """Return the lengths of documents without certain tokens at their ends."""
    others = np.flatnonzero(~np.isin(np.asarray(store.tokens[:]), [token for token in unread if token is not None]))
    before = np.searchsorted(others, store.offsets[1:])
    lasts = np.append(others, -1)[before - 1]
    return np.maximum(lasts + 1 - store.offsets[:-1], 0)


def select_labeled(
    store: TokenStore,
    config: DataConfig,
    source: Source,
    task: LabelTask,
    columns: Columns,
    images: ImageRules | None = None,
) -> Selection:
    """Select the documents that rows do not leave out (`weight`) with a token to read, fitted into a row.

    Raises:
        ValueError: a document above `seq_len` under `overlong='error'`, none left, or a label that is missing or none
            of the task's.
    """
    whole = last_tokens(store, (task.padding, None if task.is_chat else task.end))
    overlong = np.flatnonzero(whole > config.row_tokens)
    if len(overlong) and config.overlong == "error":
        raise overlong_error(config, row_origin(source, int(overlong[0])), int(whole[overlong[0]]))
    ends = np.searchsorted(np.flatnonzero(store.mask), store.offsets)
    keep = (whole > 0) & (ends[1:] > ends[:-1])
    if config.overlong == "drop":
        keep[overlong] = False
    documents = np.flatnonzero(keep)
    if not len(documents):
        raise ValueError(
            f"{source}: no document has a token within seq_len={config.row_tokens} tokens: raise --seq-len"
        )
    found = read_columns(store, documents, columns, source)
    for name, values in found.items():
        if len(bad := np.flatnonzero((values != np.round(values)) | (values < 0) | (values >= task.values))):
            origin = row_origin(source, int(documents[bad[0]]))
            remedy = "mend it" if "." in name else "mend it, or raise --num-labels"
            wanted = f"a whole number from 0 to {task.values - 1}"
            raise ValueError(f"{origin}: {name!r} is {values[bad[0]]:g}, expected {wanted}: {remedy}")
    lengths = within_row(store, whole, config.row_tokens, images)
    dataset = LabeledDataset(
        store=store,
        documents=documents,
        lengths=lengths[documents],
        reader=ImageReader(rules=images, store=store) if images and store.images else None,
        targets=np.ones(len(documents), np.int64),
        columns=found,
    )
    return Selection(dataset=dataset, truncated=int(keep[overlong].sum()), dropped=len(keep) - len(documents))
