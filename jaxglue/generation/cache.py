"""The paged key/value cache: its plan, who holds which page, and how layers write to it and attend over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms
from jaxglue.ops.paged_attention import KVPages, append, make_pages, paged_attention
from jaxglue.ops.rope import RopeTables, Rotary

PAGE = 64
"""Tokens in a page."""
MOST_SLOTS = 256
"""Sequences that decode at once where memory has room for more."""
PREFILL_TOKENS = 4096
"""Prompt tokens that share a forward pass; longer prompts have one of their own."""
_RESERVE = 2**30
_SHARE = 0.9
"""Share of the free memory for the cache."""

Pages = KVPages
"""A layer's rotated keys, and values; page 0 belongs to no sequence."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Size of the cache, and how many sequences share it."""

    slots: int
    """S, sequences that decode at once."""
    pages: int
    """Without page 0."""
    table: int
    """P, the most pages of a sequence."""
    bytes: int
    """Memory of all layers' pages."""

    def __str__(self) -> str:
        return f"{self.slots} at a time, key/value cache {self.bytes / 2**20:,.0f} MiB"


def plan_cache(
    lengths: Sequence[int], config: DecoderConfig, dtype, *, batch_size: int | None = None, free: float | None = None
) -> CachePlan:
    """Plan the cache for sequences of these lengths, prompts and answers together.

    Args:
        lengths: in tokens, at least one.
        config: the model's shape.
        dtype: of the cache.
        batch_size: the most sequences at once; by default as many as memory holds, up to `MOST_SLOTS`.
        free: bytes for cache and activations; by default the device's.

    Raises:
        ValueError: linear attention, or too little memory for the longest sequence.
    """
    if config.delta is not None:
        raise ValueError(
            f"jaxglue does not generate with linear attention yet, and {config.model_type} has it: export the model "
            "(jaxglue export) and generate with transformers"
        )
    needs = [pages_of(length) for length in lengths]
    page_bytes = PAGE * token_bytes(config, dtype)
    free = free_bytes() if free is None else free
    spare = _SHARE * free - activation_bytes(config, dtype, max(max(lengths), min(PREFILL_TOKENS, sum(lengths))))
    room = max(int(spare / page_bytes) - 1, max(needs))  # the estimate of activations refuses no single sequence
    if (room + 1) * page_bytes > free:
        needed, left = room * page_bytes / 2**30, free / 2**30
        raise ValueError(
            f"a sequence of {max(lengths):,} tokens needs {needed:.1f} GiB of cache, but {left:.1f} GiB of memory "
            "are free: lower --max-tokens, shorten the prompt, or hold the weights with --quantize nf4"
        )
    slots = max(1, min(len(needs), batch_size or MOST_SLOTS, room * len(needs) // sum(needs)))
    pages = min(room, _bucket(sum(sorted(needs)[-slots:])))
    return CachePlan(slots=slots, pages=pages, table=_bucket(max(needs)), bytes=(pages + 1) * page_bytes)


def _bucket(pages: int) -> int:
    """Return `pages` rounded up to an eighth of a power of two, so that few programs are compiled."""
    step = max(2, 1 << (pages - 1).bit_length() - 3) if pages > 8 else 1 << (pages - 1).bit_length()
    return max(2, -(-pages // step) * step)


def pages_of(length: int) -> int:
    """Return the pages that hold a sequence of this length."""
    return -(-length // PAGE)


def token_bytes(config: DecoderConfig, dtype) -> int:
    """Return a token's bytes in the cache of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * jnp.dtype(dtype).itemsize


def activation_bytes(config: DecoderConfig, dtype, tokens: int) -> float:
    """Return an upper estimate of a prefill's activations, logits and expanded weights of a layer."""
    D, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    moe = config.moe
    hidden = config.intermediate_size if moe is None else moe.num_experts_per_tok * (moe.intermediate_size + D)
    matrices = 3 * D * (config.intermediate_size if moe is None else moe.num_experts * moe.intermediate_size)
    token = 6 * D + 2 * heads * config.head_dim + 3 * hidden
    elements = tokens * token + 2 * matrices
    return _RESERVE * (jax.default_backend() != "cpu") + elements * jnp.dtype(dtype).itemsize


def free_bytes() -> float:
    """Return the free memory of the first device, on CPUs half of the host's."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available / 2


class PageTable:
    """Pages held by each slot, lent from one stock."""

    def __init__(self, plan: CachePlan):
        self._free = list(range(plan.pages, 0, -1))
        self._held: dict[int, list[int]] = {}

    def lend(self, slot: int, length: int) -> list[int] | None:
        """Return pages for a sequence of this length; None while there are too few."""
        if (count := pages_of(length)) > len(self._free):
            return None
        self._held[slot] = [self._free.pop() for _ in range(count)]
        return self._held[slot]

    def take_back(self, slot: int) -> None:
        """Free a slot's pages."""
        self._free += self._held.pop(slot)


def make_caches(plan: CachePlan, config: DecoderConfig, dtype, device=None) -> list[Pages]:
    """Return the empty caches of all layers, on a device or sharding."""
    shape = plan.pages + 1, config.num_key_value_heads, PAGE, config.head_dim
    return [make_pages(*shape, dtype, device) for _ in range(config.num_hidden_layers)]


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

    def write(self, cache: Pages, k: Float[Array, "T K H"], v: Float[Array, "T K H"]) -> Pages:
        """Return the cache with the tokens' keys and values."""
        return cache.write(k, v, self.pages, self.offsets)


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

    dropout_key = router_losses = token_mask = None
    fp8 = True

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: generation keeps no statistics."""

    def convolve(self, x, weight) -> Array:
        """Refuse linear attention, as `plan_cache` does."""
        raise NotImplementedError("generation keeps no states of linear attention")

    def delta_rule(self, qkv, g, beta, heads) -> Array:
        """Refuse linear attention, as `plan_cache` does."""
        raise NotImplementedError("generation keeps no states of linear attention")


class PrefillContext(_Inference):
    """Context of packed prompts: attention within each, and their keys and values written to the cache."""

    def __init__(self, packed: PackedContext, cache: Pages, places: Places):
        self._packed, self.cache, self._places = packed, cache, places
        self.rotate = packed.rotate

    def attend(self, q, k, v, **options) -> Float[Array, "1 T N H"]:
        """Compute causal attention within each prompt."""
        self.cache = self._places.write(self.cache, k[0], v[0])
        return self._packed.attend(q, k, v, **options)


_NO_ROTATION: tuple[Rotary | None, HeadNorms | None, float] = (None, None, 1.0)


class DecodeContext(_Inference):
    """Context of one token for each slot: appends its key and value to the cache and attends over it."""

    def __init__(self, cache: Pages, cursor: Cursor):
        self.cache, self._cursor, self._rotation = cache, cursor, _NO_ROTATION

    def rotate(
        self, q, k, rotary: Rotary | None, norms: HeadNorms | None = None, factor: float = 1.0
    ) -> tuple[Array, Array]:
        """Remember what `attend` applies as it writes to the cache: norms, rotary embedding and queries' factor."""
        self._rotation = rotary, norms, factor
        return q, k

    def attend(self, q, k, v, **options: Any) -> Float[Array, "1 S N H"]:
        """Compute attention over each slot's cache, including the new token."""
        cursor, places = self._cursor, self._cursor.places
        new = q[0], k[0], v[0]
        rotated, _, self.cache = append(*new, self.cache, places.pages, places.offsets, cursor.rope, *self._rotation)
        return paged_attention(rotated, self.cache, cursor.tables, cursor.positions, **options)[None]
