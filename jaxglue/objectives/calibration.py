"""Measures of probabilities against gold ones: accuracy, likelihood, Brier score, calibration error, temperature."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

Probabilities = Float64[np.ndarray, "N C"]
BINS = 15
"""Bins of equal width in which confidence and accuracy are compared."""
LEAST_ITEMS = 10
"""Answers below which no temperature is fitted."""
BOUNDS = (0.05, 20.0)
"""Least and largest temperature."""
_STEPS = 60


class Bin(NamedTuple):
    """Answers of like confidence."""

    answers: int
    confidence: float
    accuracy: float


def log_softmax(logits: Float[np.ndarray, "N C"], temperature: Float[np.ndarray, "N"] | float = 1.0) -> Probabilities:
    """Return log-probabilities, −∞ where logits are."""
    scaled = np.asarray(logits, np.float64) / np.reshape(temperature, (-1, 1))
    top = scaled.max(-1, keepdims=True)
    return scaled - top - np.log(np.exp(scaled - top).sum(-1, keepdims=True))


def hits(probabilities: Probabilities, gold: Probabilities) -> Bool[np.ndarray, "N"]:
    """Tell where the likeliest option is a likeliest one of the gold."""
    chosen = probabilities.argmax(-1)
    return np.take_along_axis(gold, chosen[:, None], -1)[:, 0] >= gold.max(-1) - 1e-9


def measures(log_p: Probabilities, gold: Probabilities) -> dict[str, float]:
    """Return means over answers.

    nll is −Σ gold · log p in nats; kl takes the gold's entropy from it; brier is Σ (p − gold)², not divided by the
    options; ece is the mean, weighted by answers, of |accuracy − confidence| in `BINS` bins of the largest probability.
    """
    p, weighted = np.exp(log_p), np.where(gold > 0, gold * np.where(gold > 0, log_p, 0), 0)
    entropy = -np.where(gold > 0, gold * np.log(np.where(gold > 0, gold, 1)), 0).sum(-1)
    nll = -weighted.sum(-1)
    return {
        "accuracy": float(hits(p, gold).mean()),
        "nll": float(nll.mean()),
        "kl": float((nll - entropy).mean()),
        "brier": float(((p - gold) ** 2).sum(-1).mean()),
        "ece": calibration_error(reliability(p, gold)),
    }


def reliability(p: Probabilities, gold: Probabilities, bins: int = BINS) -> list[Bin]:
    """Return the bins of equal width of the largest probability; empty ones have zeros."""
    confidence, right = p.max(-1), hits(p, gold)
    numbers = np.minimum((confidence * bins).astype(int), bins - 1)
    found = []
    for number in range(bins):
        own = numbers == number
        values = (confidence[own].mean(), right[own].mean()) if own.any() else (0.0, 0.0)
        found.append(Bin(int(own.sum()), *map(float, values)))
    return found


def calibration_error(bins: list[Bin]) -> float:
    """Return Σ share · |accuracy − confidence|."""
    total = sum(each.answers for each in bins)
    return sum(each.answers * abs(each.accuracy - each.confidence) for each in bins) / max(total, 1)


def fit_temperature(logits: Float[np.ndarray, "N C"], gold: Probabilities) -> float:
    """Return the divisor of logits with the least negative log-likelihood of the gold, within `BOUNDS`.

    Gold is mixed with 1 / (answers + 2) of equal probabilities (Platt 1999): answers that are all right would ask for
    infinite logits. The likelihood is concave in 1 / temperature, so its slope is bisected.
    """
    if len(logits) < LEAST_ITEMS:
        return 1.0
    exists, share = np.isfinite(logits), 1 / (len(logits) + 2)
    finite = np.where(exists, logits, 0).astype(np.float64)
    mixed = (1 - share) * gold + share * exists / exists.sum(-1, keepdims=True)
    wanted = (mixed * finite).sum(-1).mean()

    def slope(beta: float) -> float:
        return float((np.exp(log_softmax(logits, 1 / beta)) * finite).sum(-1).mean() - wanted)

    low, high = 1 / BOUNDS[1], 1 / BOUNDS[0]
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return 1 / (low * high) ** 0.5


def fit_by_kind(
    logits: Float[np.ndarray, "N C"], gold: Probabilities, kinds: Int[np.ndarray, "N"], count: int
) -> Float[np.ndarray, "count"]:
    """Return the temperature of each kind of question."""
    return np.array([fit_temperature(logits[kinds == kind], gold[kinds == kind]) for kind in range(count)])


def cross_fitted(
    logits: Float[np.ndarray, "N C"],
    gold: Probabilities,
    kinds: Int[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    count: int,
) -> Probabilities:
    """Return log-probabilities at temperatures that were fitted on the other half of the groups."""
    found = np.zeros(logits.shape)
    for own, others in _halves(groups):
        temperatures = fit_by_kind(logits[others], gold[others], kinds[others], count)
        found[own] = log_softmax(logits[own], temperatures[kinds[own]])
    return found


def _halves(groups: Int[np.ndarray, "N"]) -> Iterator[tuple[Bool[np.ndarray, "N"], Bool[np.ndarray, "N"]]]:
    """Yield the two halves of groups, by the parity of their ranks, each with the other."""
    _, ranks = np.unique(groups, return_inverse=True)
    even = ranks % 2 == 0
    yield even, ~even
    yield ~even, even
