"""Layer contexts of generation: whole prompts, and one token for each sequence, over a paged cache."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxglue.generation.cache import PAGE, Pages
from jaxglue.models.context import PackedContext
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms, norm_and_rotate
from jaxglue.ops.paged_attention import paged_attention
from jaxglue.ops.rope import RopeTables, Rotary


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slots:
    """State of the sequences that decode together, S slots; P pages each."""

    tokens: Int[Array, " S"]
    """The last token of each sequence, not yet in the cache."""
    positions: Int[Array, " S"]
    """Its position."""
    ends: Int[Array, " S"]
    """Limit of the sequence's length."""
    live: Bool[Array, " S"]
    """True for sequences that go on."""
    tables: Int[Array, "S P"]
    """Its pages; 0, which belongs to no sequence, in idle slots."""
    keys: UInt32[Array, "S words"]
    temperatures: Float[Array, " S"]
    top_ps: Float[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Places:
    """Pages and offsets of tokens in the cache."""

    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]

    def write(self, cache: Pages, *new: Float[Array, "T K H"]) -> Pages:
        """Return the cache with the tokens' keys and values."""
        keys, values = (pages.at[self.pages, :, self.offsets].set(x) for pages, x in zip(cache, new, strict=True))
        return keys, values


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Inputs of a decode step shared by all layers."""

    places: Places
    tables: Int[Array, "S P"]
    positions: Int[Array, " S"]
    rope: RopeTables


def places_of(tables: Int[Array, "S P"], slots: Int[Array, " T"], positions: Int[Array, " T"]) -> Places:
    """Return the places of tokens at these slots and positions, of numpy or jax arrays."""
    return Places(pages=tables[slots, positions // PAGE], offsets=positions % PAGE)


class _Inference:
    """Context fields used only in training."""

    dropout_key = router_losses = token_mask = tile = None
    fp8 = True

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: generation keeps no statistics."""


class PrefillContext(_Inference):
    """Context of packed prompts: attention within each, and their keys and values written to the cache."""

    def __init__(self, packed: PackedContext, cache: Pages, places: Places):
        self._packed, self.cache, self._places = packed, cache, places
        self.rotate = packed.rotate

    def attend(self, q, k, v, **options) -> Float[Array, "1 T N H"]:
        """Compute causal attention within each prompt."""
        self.cache = self._places.write(self.cache, k[0], v[0])
        return self._packed.attend(q, k, v, **options)


class DecodeContext(_Inference):
    """Context of one token for each slot: appends its key and value to the cache and attends over it."""

    def __init__(self, cache: Pages, cursor: Cursor):
        self.cache, self._cursor = cache, cursor

    def rotate(self, q, k, rotary: Rotary | None, norms: HeadNorms | None = None) -> tuple[Array, Array]:
        """Apply the optional q/k norms and the optional rotary embedding at the tokens' positions."""
        return norm_and_rotate(q, k, self._cursor.rope, rotary, norms=norms)

    def attend(self, q, k, v, **options: Any) -> Float[Array, "1 S N H"]:
        """Compute attention over each slot's cache, including the new token."""
        cursor = self._cursor
        self.cache = cursor.places.write(self.cache, k[0], v[0])
        out = paged_attention(q[0], *self.cache, cursor.tables, cursor.positions, **options)
        return out[None]
