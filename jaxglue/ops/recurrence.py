"""Recurrences over the tokens of documents: in packed rows, and from token to token with states in slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxglue.ops.delta_rule.forks import with_copies
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.zeros import zeros_on


class Recurrence(NamedTuple):
    """A recurrence in three forms that compute the same; states are trees of arrays, zeros before a first token."""

    whole: Callable[..., Float[Array, "B T *O"]]
    """Return the outputs of packed rows, from their segments and values [B, T, …] of their tokens."""
    last: Callable[..., Any]
    """Return the states [B, documents, …] behind the documents, from the same."""
    step: Callable[..., tuple[Float[Array, "S *O"], Any]]
    """Return the outputs of one token of each sequence, and the states behind it, from states and values [S, …]."""
    advance: Callable[..., tuple[Float[Array, "S *O"], Any]] | None = None
    """Return the outputs and the states of all slots, from (these, slots, begun, *values); None: by `step`."""
    name: str = ATTENTION_OUT
    """Of the outputs, for checkpoint policies."""


def recur(recurrence: Recurrence, segments: PackedSegments, *values: Float[Array, "B T *V"]) -> Float[Array, "B T *O"]:
    """Return a recurrence's outputs; continuations of forked segments run behind copies of their beginnings.

    Under `jax.checkpoint`, a policy that saves the recurrence's name computes them once.

    Raises:
        ValueError: forked segments without copies.
    """
    if segments.gap_starts is not None and segments.copies is None:
        raise ValueError("segments fork, and a state follows one continuation: add copies of their beginnings")
    out = (
        recurrence.whole(segments, *values)
        if segments.copies is None
        else with_copies(recurrence.whole, segments, *values)
    )
    return checkpoint_name(out, recurrence.name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotStates:
    """All that a layer remembers of sequences by a recurrence, each in a slot. A pytree."""

    states: Any
    """A tree of arrays [slots, …]."""

    @classmethod
    def empty(cls, specs: Any, slots: int, device=None) -> "SlotStates":
        """Return the empty states of slots, from a tree of shapes and dtypes of one, on a device or sharding."""
        return cls(jax.tree.map(lambda spec: zeros_on(device, (slots, *spec.shape), spec.dtype), specs))

    def read(self, slots: Int[Array, " S"], begun: Bool[Array, " S"]) -> Any:
        """Return the states of these slots, zeros for sequences that have not begun."""

        def of(states):
            own = states[slots]
            return jnp.where(begun.reshape(-1, *(1,) * (own.ndim - 1)), own, jnp.zeros_like(own))

        return jax.tree.map(of, self.states)

    def write(self, slots: Int[Array, " S"], states: Any) -> "SlotStates":
        """Return the states after these of the slots."""
        return SlotStates(jax.tree.map(lambda x, new: x.at[slots].set(new.astype(x.dtype)), self.states, states))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replayed:
    """States before the tokens of a step, some of which count: the next step applies these. A pytree."""

    states: Any
    """Of all slots."""
    kept: tuple[Float[Array, "S R *V"], ...]
    """What each of the tokens gave to the states: of all slots or, within a window, of its sequences."""

    @classmethod
    def empty(cls, states: Any, values: tuple[jax.ShapeDtypeStruct, ...], slots: int, rows: int, device=None):
        """Return states with room for so many tokens of each slot, which give such values."""
        return cls(states, tuple(zeros_on(device, (slots, rows, *spec.shape), spec.dtype) for spec in values))

    def of(self, slots: Int[Array, " S"], rows: int) -> "Replayed":
        """Return the same with the first tokens of these slots, so many, alone."""
        return Replayed(self.states, tuple(stored[slots, :rows] for stored in self.kept))

    def put(self, slots: Int[Array, " S"], within: "Replayed") -> "Replayed":
        """Invert `of`, after steps within a window."""
        pairs = zip(self.kept, within.kept, strict=True)
        return Replayed(within.states, tuple(old.at[slots, : new.shape[1]].set(new) for old, new in pairs))

    def keep(self, index: int, values: Float[Array, "S R *V"]) -> "Replayed":
        """Return the same with what the tokens gave, the `index`-th of their values."""
        values = values.astype(self.kept[index].dtype)
        return Replayed(self.states, (*self.kept[:index], values, *self.kept[index + 1 :]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysAndStates:
    """All that a layer remembers of sequences by attention and by a recurrence beside it. A pytree."""

    keys: Any
    """Pages of keys and values."""
    states: SlotStates
