"""How layers see the pages of keys and values: packed prompts write to them, and decoding reads them."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxglue.generation.pages import Pages
from jaxglue.models.context import PackedContext
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms, norm_and_rotate
from jaxglue.ops.paged_attention import paged_attention
from jaxglue.ops.rope import RopeTables, Rotary


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Places:
    """Pages and offsets of tokens in the cache."""

    pages: tuple[Int[Array, " T"], ...]
    """For each of the `windows`."""
    offsets: Int[Array, " T"]
    windows: tuple[int | None, ...] = field(metadata={"static": True})
    """Kinds of layers, which have page numbers of their own."""

    def write(self, window: int | None, cache: Pages, *new: Float[Array, "T K H"]) -> Pages:
        """Return the cache of a layer with this window, with the tokens' keys and values."""
        pages = self.pages[self.windows.index(window)]
        keys, values = (stored.at[pages, :, self.offsets].set(x) for stored, x in zip(cache, new, strict=True))
        return keys, values


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Inputs of a decode step shared by all layers."""

    places: Places
    tables: tuple[Int[Array, "S P"], ...]
    """For each of the places' windows."""
    positions: Int[Array, " S"]
    rope: RopeTables


class _Inference:
    """Context fields used only in training."""

    dropout_key = router_losses = token_mask = None
    fp8 = True

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: generation keeps no statistics."""

    def convolve(self, x, weight) -> Array:
        """Refuse linear attention, as `plan_cache` does."""
        raise NotImplementedError("generation keeps no states of linear attention")

    def delta_rule(self, q, k, v, g, beta) -> Array:
        """Refuse linear attention, as `plan_cache` does."""
        raise NotImplementedError("generation keeps no states of linear attention")


class PrefillContext(_Inference):
    """Context of packed prompts: attention within each, and their keys and values written to the cache."""

    def __init__(self, packed: PackedContext, cache: Pages, places: Places):
        self._packed, self.cache, self._places = packed, cache, places
        self.rotate = packed.rotate

    def attend(self, q, k, v, *, window: int | None = None, **options) -> Float[Array, "1 T N H"]:
        """Compute causal attention within each prompt."""
        self.cache = self._places.write(window, self.cache, k[0], v[0])
        return self._packed.attend(q, k, v, window=window, **options)


class DecodeContext(_Inference):
    """Context of one token for each slot: appends its key and value to the cache and attends over it."""

    def __init__(self, cache: Pages, cursor: Cursor):
        self.cache, self._cursor = cache, cursor

    def rotate(self, q, k, rotary: Rotary | None, norms: HeadNorms | None = None) -> tuple[Array, Array]:
        """Apply the optional q/k norms and the optional rotary embedding at the tokens' positions."""
        return norm_and_rotate(q, k, self._cursor.rope, rotary, norms=norms)

    def attend(self, q, k, v, *, window: int | None = None, **options: Any) -> Float[Array, "1 S N H"]:
        """Compute attention over each slot's cache, including the new token."""
        cursor = self._cursor
        self.cache = cursor.places.write(window, self.cache, k[0], v[0])
        tables = cursor.tables[cursor.places.windows.index(window)]
        return paged_attention(q[0], *self.cache, tables, cursor.positions, window=window, **options)[None]
