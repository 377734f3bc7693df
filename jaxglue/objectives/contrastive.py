"""Losses of the texts of a whole step from their embeddings: InfoNCE by blocks of anchors, and CoSENT."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float, Int

ANCHOR, POSITIVE, NEGATIVE, UNUSED = 0, 1, 2, -1
"""Kinds of texts."""
_BLOCK = 2**26
"""Similarities that are in memory at a time."""
_NOTHING = -1e30
"""Logit of what is no candidate."""
_LEAST = 1e-24


class Texts(NamedTuple):
    """The texts of a step, in slots; positives are in the order of their anchors."""

    kinds: Int[Array, "N"]
    ids: Int[Array, "N"]
    """Equal for equal texts."""
    gold: Float[Array, "N"]
    """Similarity of a pair, where rows have one."""


class Sizes(NamedTuple):
    """Static sizes of a step."""

    pairs: int
    """P, slots of pairs: a power of two."""
    negatives: int
    """H, the most hard negatives of a pair."""


class Contrast(NamedTuple):
    """A loss of texts."""

    scale: float = 20.0
    """Factor on cosines."""
    symmetric: bool = False
    """Positives are anchors, too."""
    dims: tuple[int | None, ...] = (None,)
    """Leading dimensions of embeddings whose losses are added; None for all."""
    by_score: bool = False
    """CoSENT of pairs with a similarity."""


class TextLosses(NamedTuple):
    """Values of anchors in their slots; 0 in other slots."""

    losses: Float[Array, "N"]
    hits: Float[Array, "N"]
    """1 where the positive is the most similar candidate."""


def text_losses(
    loss: Contrast,
    sizes: Sizes,
    embeddings: Float[Array, "N D"],
    texts: Texts,
    spread: Callable[[Array], Array] = lambda blocks: blocks,
) -> tuple[Float[Array, ""], TextLosses]:
    """Return Σ loss over the pairs of a step, and each anchor's.

    A pair's candidates are the positives and negatives of all pairs, but for those that are its positive, too: equal
    texts, and positives of equal anchors. CoSENT, one number for all pairs, is each anchor's.

    Args:
        loss: to compute.
        sizes: of the step.
        embeddings: of the slots, float32, not normalized.
        texts: in the slots.
        spread: places [blocks, anchors, D] on a mesh.
    """
    anchors, positives = (_find(texts.kinds == kind, sizes.pairs) for kind in (ANCHOR, POSITIVE))
    negatives = _find(texts.kinds == NEGATIVE, sizes.pairs * sizes.negatives)
    used = anchors < len(embeddings)
    total, hits = jnp.zeros(sizes.pairs), jnp.zeros(sizes.pairs)
    for number, dim in enumerate(loss.dims):
        own, others, hard = (_unit(_rows(embeddings, at)[:, :dim]) for at in (anchors, positives, negatives))
        if loss.by_score:
            gold = _rows(texts.gold[:, None], anchors)[:, 0]
            total += cosent(loss.scale * (own * others).sum(-1), gold, used)
            continue
        ids = [_rows(texts.ids[:, None] + 1, at)[:, 0] for at in (anchors, positives, negatives)]
        candidates = jnp.concatenate([others, hard])
        known = _Known(ids[0], ids[1])
        of_candidates = _Known(jnp.pad(ids[0], (0, len(hard)), constant_values=-1), jnp.concatenate(ids[1:]))
        rows = partial(_info_nce, loss.scale, spread=spread)
        forward, right = rows(own, candidates, known, of_candidates)
        if loss.symmetric:
            backward, _ = rows(others, own, known, known)
            forward = (forward + backward) / 2
        total += forward
        hits = right if number == 0 else hits
    total, hits = jnp.where(used, total, 0), jnp.where(used, hits, 0)
    empty = jnp.zeros(len(embeddings))
    slots = [empty.at[anchors].set(each, mode="drop", unique_indices=True) for each in (total, hits)]
    return total.sum(), TextLosses(*map(jax.lax.stop_gradient, slots))


class _Known(NamedTuple):
    """Texts of anchors and of their positives, which tell a pair's further positives; 0 for none, −1 for no anchor."""

    anchors: Int[Array, "C"]
    texts: Int[Array, "C"]


def _info_nce(
    scale: float,
    anchors: Float[Array, "P D"],
    candidates: Float[Array, "C D"],
    known: _Known,
    of_candidates: _Known,
    *,
    spread: Callable[[Array], Array],
) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
    """Return each anchor's cross-entropy of the candidate of its own number, and 1 where that is the likeliest.

    The similarities of a block of anchors are computed again for the gradient.
    """
    P, C = len(anchors), len(candidates)
    size = min(P, 1 << max(_BLOCK // C, 8).bit_length() - 1)
    numbers = jnp.arange(C)

    @jax.checkpoint
    def block(inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        rows, own, anchor, text = inputs
        logits = scale * jnp.matmul(rows, candidates.T, precision="highest")
        is_own = numbers == own[:, None]
        logits = jnp.where(_is_candidate(anchor, text, of_candidates) | is_own, logits, _NOTHING)
        chosen = jnp.where(is_own, logits, 0).sum(-1)
        return logsumexp(logits, axis=-1) - chosen, (chosen >= logits.max(-1)) * 1.0

    inputs = (
        spread(anchors.reshape(-1, size, anchors.shape[1])),
        *(x.reshape(-1, size) for x in (jnp.arange(P), known.anchors, known.texts)),
    )
    losses, hits = jax.lax.map(block, inputs)
    return losses.reshape(P), hits.reshape(P)


def _is_candidate(anchor: Int[Array, "b"], text: Int[Array, "b"], known: _Known) -> Bool[Array, "b C"]:
    """Tell which candidates are there and no positives of a block's anchors."""
    return (known.texts > 0) & (known.texts != text[:, None]) & (known.anchors != anchor[:, None])


def cosent(scores: Float[Array, "P"], gold: Float[Array, "P"], used: Bool[Array, "P"]) -> Float[Array, ""]:
    """Return log(1 + Σ exp(s_i − s_j)) over pairs whose gold similarities are in the order i < j."""
    gold, scores = jnp.where(used, gold, -jnp.inf), jnp.where(used, scores, _NOTHING)
    order = jnp.argsort(gold)
    gold, scores = gold[order], scores[order]
    higher = jnp.searchsorted(gold, gold, side="right")
    above = jax.lax.cumlogsumexp(-scores, reverse=True)
    above = jnp.pad(above, (0, 1), constant_values=_NOTHING)
    terms = jnp.maximum(scores + above[higher], _NOTHING)
    return logsumexp(jnp.pad(terms, (1, 0)))


def _find(mask: Bool[Array, "N"], size: int) -> Int[Array, "size"]:
    """Return the slots of a mask, N where there are no more."""
    return jnp.nonzero(mask, size=size, fill_value=len(mask))[0]


def _rows(values: Array, at: Int[Array, "n"]) -> Array:
    """Return values of slots; zeros for N."""
    return values.at[at].get(mode="fill", fill_value=0)


def _unit(x: Float[Array, "n D"]) -> Float[Array, "n D"]:
    return x * jax.lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), _LEAST))
