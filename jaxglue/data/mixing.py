"""Mixing of sources: the documents of an epoch, by passes over each source."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from jaxglue.data.config import Source
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.packing import PackPlan, plan_epoch
from jaxglue.data.progress import Advance, ignore

_MOST_DOCUMENTS = 2**31
"""Largest number of documents in an epoch."""


def passes_per_epoch(sources: Sequence[Source], tokens: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Return the passes over each source in an epoch.

    Weights are passes. With shares, an epoch has as many tokens as all sources together. With a temperature, the
    largest source is read once and smaller ones more often.

    Raises:
        ValueError: a source without tokens has a share.
    """
    if any(source.share for source in sources):
        if not all(tokens):
            raise ValueError(f"{sources[tokens.index(0)]} has a share, but eval_fraction holds out all its documents")
        return tuple(source.share * sum(tokens) / own for source, own in zip(sources, tokens, strict=True))
    largest = max(tokens)
    spread = 1 - 1 / temperature
    return tuple(source.weight * (largest / max(own, 1)) ** spread for source, own in zip(sources, tokens, strict=True))


def check_epoch(documents: Sequence[int], passes: Sequence[float]) -> None:
    """Raise ValueError for sources' passes that leave an epoch without documents, or with too many to list."""
    sizes = [count * times for count, times in zip(documents, passes, strict=True)]
    if max(sizes) < 1:
        raise ValueError(f"data: an epoch would have {sum(sizes):.3g} documents: raise the sources' weights")
    if sum(sizes) > _MOST_DOCUMENTS:
        raise ValueError(f"data: an epoch would have {sum(sizes):.3g} documents: lower the sources' weights")


def plan_dataset_epoch(
    dataset: TokenDataset,
    *,
    seq_len: int,
    seed: int,
    epoch: int,
    max_segments: int | None = None,
    documents_per_step: int | None = None,
    advance: Advance = ignore,
) -> PackPlan:
    """Pack the documents of an epoch as a function of these arguments alone."""
    mixed = dataset.sources is not None and set(dataset.passes) != {1.0}
    chosen = epoch_documents(dataset, seed, epoch) if mixed else None
    plan = plan_epoch(
        dataset.lengths if chosen is None else dataset.lengths[chosen],
        seq_len=seq_len,
        seed=seed,
        epoch=epoch,
        max_segments=max_segments,
        documents_per_step=documents_per_step,
        advance=advance,
    )
    return plan if chosen is None else replace(plan, documents=chosen[plan.documents])


def epoch_documents(dataset: TokenDataset, seed: int, epoch: int) -> Int[np.ndarray, "documents"]:
    """Return the documents of an epoch: a source is read in one shuffled circle, on from where the last epoch ended."""
    assert dataset.sources is not None
    return np.concatenate(
        [
            _next_documents(
                np.flatnonzero(dataset.sources == source), passes, epoch, np.random.default_rng([seed, source])
            )
            for source, passes in enumerate(dataset.passes)
        ]
    )


def _next_documents(
    documents: Int[np.ndarray, "documents"], passes: float, epoch: int, rng: np.random.Generator
) -> Int[np.ndarray, "chosen"]:
    first, last = (round(passes * len(documents) * count) for count in (epoch, epoch + 1))
    return rng.permutation(documents)[np.arange(first, last) % len(documents)] if len(documents) else documents
