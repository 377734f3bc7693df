"""Batches of packed rows, with the units of answers that objectives compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxglue.ops.collectives import psum, reduce_from
from jaxglue.ops.row_split import CONTEXT, split_segments, split_tokens
from jaxglue.ops.segments import PackedSegments, pack_segments

_ROOMS, _TILE, _LARGEST = 16, 128, 7 / 8
"""Sizes of rows by their targets, at most, as each is compiled; tokens of a kernel's tile; the share of a row beyond
which the head computes all tokens."""
CHOSEN, REJECTED, PROMPT, PARTS = 0, 1, 2, 3
"""Owners of counted tokens in a unit: the first answer, the second, their prompt; and their number."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Answers:
    """Units of packed rows, each of two answers; U unit slots in a row."""

    owners: Int32[Array, "B T"]
    """PARTS · unit + part for counted tokens; PARTS · U for others."""
    used: Float32[Array, "B U"]
    """1 for a unit, 0 for an unused slot."""
    desirable: Float32[Array, "B U"]
    """1 where the first answer is a good one; 0 for a bad one of labeled data."""
    token_weight: Float32[Array, "B U"]
    """Units over tokens of first answers, of the whole step: turns sums of their log-probabilities into means."""
    reference: Float32[Array, "B U 2"] | None = None
    """The reference's log-probabilities of the answers; None until they are known."""


def sum_parts(values: Float[Array, "B T"], answers: Answers) -> Float[Array, "B U PARTS"]:
    """Sum values of tokens, on all devices that share a row, over the parts of every unit.

    Without a scatter, whose atomics add in any order.
    """
    rows, units = answers.used.shape
    is_own = answers.owners[:, :, None] == jnp.arange(units * PARTS, dtype=jnp.int32)
    sums = jnp.where(is_own, values[:, :, None], 0).sum(1).reshape(rows, units, PARTS)
    return reduce_from(sums, CONTEXT)


def sum_labels(values: Float[Array, "B T C"], answers: Answers) -> Float[Array, "B U C"]:
    """Sum values of tokens, one for each label, over the first answer of every unit, on all devices of its row."""
    firsts = jnp.arange(answers.used.shape[1], dtype=jnp.int32) * PARTS + CHOSEN
    is_own = (answers.owners[:, :, None] == firsts).astype(values.dtype)
    return reduce_from(jnp.einsum("btu,btc->buc", is_own, values, precision="highest"), CONTEXT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Answers in packed rows that the model wrote; A answer slots in a row. Log-probabilities are of the targets."""

    owners: Int32[Array, "B T"]
    """Answer slot of an answer's targets; A for others."""
    advantages: Float32[Array, "B A"]
    """0 for unused slots."""
    old: Float32[Array, "B T"] | None = None
    """Log-probabilities under the weights that wrote the answers; None where these are the present ones."""
    sampler: Float32[Array, "B T"] | None = None
    """The same as sampling computed them; NaN where it did not. None without any."""
    reference: Float32[Array, "B T"] | None = None
    """Log-probabilities under the reference; None for objectives without one."""
    credits: Float32[Array, "B T"] | None = None
    """Advantages of tokens, where they have some of their own."""
    mean_weight: Float32[Array, "B 1"] | None = None
    """Weight of a token in the sum of losses with which it has its share of a mean over all tokens of the step; None
    for objectives without such a mean."""
    teacher: Float[Array, "B T E"] | None = None
    """A teacher's hidden states after its final norm; None without one."""
    teacher_matrix: Float[Array, "V E"] | None = None
    """Its output projection."""

    def sums(self, values: Float[Array, "B T"]) -> Float[Array, "B A"]:
        """Sum values of tokens, on all devices that share a row, over each answer; gradients are summed alike.

        Without a scatter, whose atomics add in any order.
        """
        return psum(jnp.where(self._owned, values[:, :, None], 0).sum(1), CONTEXT)

    def spread(self, values: Float[Array, "B A"]) -> Float[Array, "B T"]:
        """Return each token's value of its answer, 0 for other tokens."""
        return jnp.where(self._owned, values[:, None, :], 0).sum(2)

    def split(self, order: Int32[np.ndarray, "B T"]) -> "Rollouts":
        """Return the answers, of numpy arrays, with tokens in the devices' order."""
        names = "owners", "old", "sampler", "reference", "credits", "teacher"
        return replace(self, **{name: split_tokens(getattr(self, name), order) for name in names})

    @property
    def _owned(self) -> Bool[Array, "B T A"]:
        slots = jnp.arange(self.advantages.shape[1], dtype=jnp.int32)
        return self.owners[:, :, None] == slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Reads:
    """Parts of packed rows that are read by themselves; A slots in a row."""

    owners: Int32[Array, "B T"]
    """Slot of the part whose token is read; A for others."""
    counts: Float32[Array, "B A"]
    """Tokens that are read of each part; 0 for unused slots."""
    units: Int32[Array, "B A"]
    """Number of its unit in the data set; −1 for unused slots."""
    parts: Int32[Array, "B A"]
    """Its number in the unit; −1 for unused slots."""
    values: dict[str, Array] = field(default_factory=dict)
    """Arrays that an objective reads, by name: of parts [B, A, …], of rows [B, …]."""

    @property
    def used(self) -> Float[Array, "B A"]:
        """Return 1 for a part, 0 for an unused slot."""
        return (self.counts > 0).astype(jnp.float32)

    def means(self, values: Float[Array, "B T D"]) -> Float32[Array, "B A D"]:
        """Return the float32 means over the tokens of each part, of rows that are whole on their device.

        Without a scatter, whose atomics add in any order. Products with 0 and 1 are exact.
        """
        slots = jnp.arange(self.counts.shape[1], dtype=jnp.int32)
        is_own = (self.owners[:, :, None] == slots).astype(values.dtype)
        options: dict[str, Any] = {"precision": "highest", "preferred_element_type": jnp.float32}
        sums = jnp.einsum("bta,btd->bad", is_own, values, **options)
        return sums / jnp.maximum(self.counts, 1)[..., None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """B packed rows of T tokens."""

    tokens: Int32[Array, "B T"]
    targets: Int32[Array, "B T"]
    """Next token of the same document; 0 at a document's end and in padding."""
    loss_weights: Float32[Array, "B T"]
    """1 for trained targets, 0 elsewhere; sums to the number of target tokens."""
    segments: PackedSegments
    answers: Answers | None = None
    """Units of answers that an objective compares; None in supervised training."""
    rollouts: Rollouts | None = None
    """Answers of the model and their advantages, where an objective needs them."""
    reads: Reads | None = None
    """Parts that an objective reads: questions, documents, texts."""
    columns: dict[str, Float32[Array, "B ..."]] = field(default_factory=dict)
    """Columns of rows that an objective reads: for each token of texts and chats [B, T], for each unit of answers
    [B, U]."""
    ranks: Bool[Array, "B T R"] | None = None
    """Ranks of the adapters that each token uses, where rows hold documents of several models; None for all."""
    sources: Int32[Array, "B T"] | None = None
    """Source of each token, in evaluation on several sources only."""
    images: Any = None
    """`Images` of the rows, or on the host `RowImages`; None for text alone."""
    room: int | None = field(default=None, metadata={"static": True})
    """Targets with a loss weight in a row, at most, to which the head leaves the others out; None for no bound."""

    def split(self, devices: int) -> "Batch":
        """Return the batch, of numpy arrays, with its rows split over so many devices (`split_segments`)."""
        segments = split_segments(self.segments, devices)
        assert segments.split is not None
        own = partial(split_tokens, order=np.asarray(segments.split.order))
        names = "tokens", "targets", "loss_weights", "ranks", "sources"
        fields = {name: own(getattr(self, name)) for name in names}
        answers = self.answers and replace(self.answers, owners=own(self.answers.owners))
        rollouts = self.rollouts and self.rollouts.split(np.asarray(segments.split.order))
        columns = jax.tree.map(own, self.columns) if answers is None else self.columns
        images = self.images and self.images.split(segments.split)
        batch = replace(self, segments=segments, answers=answers, rollouts=rollouts, columns=columns, images=images)
        return replace(batch, **fields)

    def without_lengths(self) -> "Batch":
        """Drop the fields of the segments that differ between attention's kernels, so that batches share programs."""
        unused: Any = None
        return replace(self, segments=replace(self.segments, cu_seqlens=unused, long=False, split=None))


def target_room(most: int, seq_len: int) -> int | None:
    """Return the `Batch.room` of rows with so many targets at most; None where most tokens have one."""
    step = -(-seq_len // (_ROOMS * _TILE)) * _TILE
    room = max(1, -(-most // step)) * step
    return room if room <= _LARGEST * seq_len else None


def row_of_documents(
    documents: Sequence[tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]], *, seq_len: int, max_segments: int
) -> Batch:
    """Return one row of documents, on the host.

    Args:
        documents: tokens, and which of them are predicted.
        seq_len, max_segments: of `pack_segments`.
    """
    lengths = [len(tokens) for tokens, _ in documents]
    padding = seq_len - sum(lengths)
    tokens, counted = (np.pad(np.concatenate(parts), (0, padding))[None] for parts in zip(*documents, strict=True))
    segments = pack_segments([lengths], seq_len=seq_len, max_segments=max_segments)
    followed = segments.ends - 1 > np.arange(seq_len)
    fields: dict[str, Any] = {"tokens": tokens, "targets": np.where(followed, np.roll(tokens, -1, axis=1), 0)}
    fields["loss_weights"] = (followed & np.roll(counted, -1, axis=1)).astype(np.float32)
    return Batch(**fields, segments=segments)
