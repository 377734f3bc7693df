"""Measures of rankings: nDCG, reciprocal rank and recall of relevant documents, and rank correlation."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

DEPTH = 10
"""Ranks that count."""


def ranking_measures(rankings: Sequence[Float[np.ndarray, "ranks"]], relevant: Sequence[float]) -> dict[str, float]:
    """Return means over queries that have a relevant document.

    ndcg@10 is Σ relevance / log2(rank + 1) over the best possible sum; mrr@10 the reciprocal of the first relevant
    document's rank; recall@1 and @10 shares of the relevance among the first.

    Args:
        rankings: of each query, relevance of its documents in their order, and then of those that it misses.
        relevant: sum of each query's relevance.
    """
    found: dict[str, list[float]] = {name: [] for name in (f"ndcg@{DEPTH}", f"mrr@{DEPTH}", "recall@1", "recall@10")}
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    for relevance, total in zip(rankings, relevant, strict=True):
        if total <= 0:
            continue
        first, ideal = relevance[:DEPTH], np.sort(relevance)[::-1][:DEPTH]
        best = (ideal * discounts[: len(ideal)]).sum()
        found[f"ndcg@{DEPTH}"].append(float((first * discounts[: len(first)]).sum() / best))
        at = np.flatnonzero(first > 0)
        found[f"mrr@{DEPTH}"].append(1 / (int(at[0]) + 1) if len(at) else 0.0)
        found["recall@1"].append(float(relevance[:1].sum() / total))
        found["recall@10"].append(float(first.sum() / total))
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def ranked(scores: Float[np.ndarray, "documents"], relevance: Float[np.ndarray, "documents"]) -> np.ndarray:
    """Return the relevance of documents in the order of their scores, the best first; ties in the order given."""
    return relevance[np.argsort(-scores, kind="stable")]


def rank_correlation(a: Float[np.ndarray, "N"], b: Float[np.ndarray, "N"]) -> float:
    """Return Spearman's correlation, with mean ranks of ties; NaN where either is constant."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends: Int[np.ndarray, " N"] = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
