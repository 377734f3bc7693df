"""Contexts of layers in generation: packed prompts write keys, values and states to the cache, decoding reads them."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxglue.models.context import LatentCache, PackedContext
from jaxglue.ops.delta_rule import (
    DeltaHeads,
    DeltaStates,
    advance_rows,
    advance_states,
    convolve_rows,
    delta_rule_and_states,
    last_inputs,
)
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms, norm_and_rotate
from jaxglue.ops.paged_attention import (
    KVPages,
    LatentPages,
    append,
    append_and_attend,
    append_in_order,
    latent_attention,
    paged_attention,
)
from jaxglue.ops.recurrence import KeysAndStates, Recurrence, Replayed, SlotStates
from jaxglue.ops.rope import RopeTables, Rotary

Cache = KVPages | LatentPages | DeltaStates | SlotStates | KeysAndStates | Replayed
"""Cache of a layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Places:
    """Pages and offsets of tokens in the cache."""

    pages: tuple[Int[Array, " T"], ...]
    """For each of the `windows`."""
    offsets: Int[Array, " T"]
    slots: Int[Array, " S"]
    """The slot of each document; nobody's for those that are none."""
    windows: tuple[int | None, ...] = field(metadata={"static": True})
    """Kinds of layers, which have page numbers of their own."""
    ranks: Bool[Array, "T R"] | None = None
    """Ranks of the adapters that each token uses; None for all. One row serves all tokens."""

    def of(self, window: int | None) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Return pages and offsets in layers with this window."""
        return self.pages[self.windows.index(window)], self.offsets


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Inputs of a decode step shared by all layers."""

    places: Places
    tables: tuple[Int[Array, "S P"], ...]
    """For each of the places' windows."""
    slots: Int[Array, " S"]
    positions: Int[Array, " S"]
    rope: RopeTables
    layer_input: Float[Array, "1 S P"] | None = None
    """The layer's own embeddings of the tokens, where a model has such."""
    kept: Int[Array, " S"] | None = None
    """Tokens of the step before that count and that recurrent layers have not applied, in steps that verify drafts."""
    forks: Int[Array, " S"] | None = None
    """Tokens of each slot's prompt before its last, from which on tiles of keys begin anew; None for sums in any
    order."""


class _Inference:
    """Context fields used only in training."""

    dropout_key = router_losses = token_mask = None
    latents: LatentCache = "none"
    fp8 = inference = True
    """`fp8`: weights for FP8 products are multiplied so."""
    exact = False
    cache: Any

    @property
    def keys(self) -> Any:
        """Return the pages of attention."""
        return self.cache.keys if isinstance(self.cache, KeysAndStates) else self.cache

    @keys.setter
    def keys(self, pages: Any) -> None:
        self.cache = replace(self.cache, keys=pages) if isinstance(self.cache, KeysAndStates) else pages

    @property
    def states(self) -> SlotStates:
        """Return the states of a recurrence."""
        return self.cache.states if isinstance(self.cache, KeysAndStates) else self.cache

    @states.setter
    def states(self, states: SlotStates) -> None:
        self.cache = replace(self.cache, states=states) if isinstance(self.cache, KeysAndStates) else states

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: generation keeps no statistics."""


_NO_ROTATION: tuple[Rotary | None, HeadNorms | None, float] = (None, None, 1.0)


class _Appending(_Inference):
    """Context that norms, rotates and writes tokens to the cache in one pass, when it attends."""

    _rotation = _NO_ROTATION
    _rotates_first = False
    """Keys are rotated before they are written."""
    _rope: RopeTables

    def rotate(
        self, q, k, rotary: Rotary | None, norms: HeadNorms | None = None, factor: float = 1.0, *, at_once: bool = False
    ) -> tuple[Array, Array]:
        """Remember what `attend` applies as it writes to the cache: norms, rotary embedding and queries' factor.

        Latent attention, whose writes are others, rotates at once, and so do prompts with training's bits.
        """
        if at_once or self._rotates_first or self.latents != "none":
            return norm_and_rotate(q, k, self._rope, rotary, norms=norms, factor=factor)
        self._rotation = rotary, norms, factor
        return q, k


class PrefillContext(_Appending):
    """Context of packed prompts: attention within each, and their keys and values, or states, written to the cache."""

    cache: Any
    """`KVPages`, in a layer of linear attention `DeltaStates`, of latent attention `LatentPages`."""

    def __init__(self, packed: PackedContext, cache: Cache, places: Places, *, fp8: bool = True):
        self._packed, self.cache, self._places, self.fp8 = packed, cache, places, fp8
        self.layer_input, self.latents, self._rope = packed.layer_input, packed.latents, packed.rope
        self.ranks, self.exact = packed.ranks, packed.exact
        self._rotates_first = packed.exact

    def attend(self, q, k, v, *, window: int | None = None, **options) -> Float[Array, "1 T N H"]:
        """Compute causal attention within each prompt."""
        new, (pages, offsets) = (q[0], k[0], v[0]), self._places.of(window)
        q, k, self.keys = append(*new, self.keys, pages, offsets, self._packed.rope, *self._rotation)
        return self._packed.attend(q[None], k[None], v, window=window, **options)

    def attend_and_keep(self, q, k, v, latents, rope_dim: int) -> Float[Array, "1 T N values"]:
        """Compute causal attention within each prompt; its first so many columns of keys are all heads'."""
        tokens = jnp.concatenate([k[0, :, 0, :rope_dim], latents[0]], axis=-1)
        self.cache = self.cache.write(tokens, *self._places.of(None))
        return self._packed.attend(q, k, v)

    def convolve(self, x, weight, heads: DeltaHeads) -> Float[Array, "1 T C"]:
        """Convolve each prompt, and keep its last inputs."""
        inputs = last_inputs(x, self._packed.segments, weight.shape[2] - 1)
        self.cache = self.cache.write(self._places.slots, inputs=inputs[0])
        return self._packed.convolve(x, weight, heads)

    def delta_rule(self, qkv, g, beta, heads: DeltaHeads) -> Float[Array, "1 T N V"]:
        """Compute linear attention within each prompt, and keep its last state."""
        out, states = delta_rule_and_states(qkv, g, beta, self._packed.segments, heads)
        self.cache = self.cache.write(self._places.slots, states=states[0])
        return out

    def recur(self, recurrence: Recurrence, *values) -> Float[Array, "1 T *O"]:
        """Compute the layer's own recurrence within each prompt, and keep its last state."""
        states = recurrence.last(self._packed.segments, *values)
        self.states = self.states.write(self._places.slots, jax.tree.map(lambda state: state[0], states))
        return self._packed.recur(recurrence, *values)


class DecodeContext(_Appending):
    """Context of one token for each slot: writes to the cache and attends over it, or updates states."""

    cache: Any
    """See `PrefillContext`."""

    def __init__(self, cache: Cache, cursor: Cursor, *, fp8: bool = True):
        self.cache, self._cursor, self.fp8 = cache, cursor, fp8
        self.layer_input, self._rope, self.ranks = cursor.layer_input, cursor.rope, cursor.places.ranks
        self.latents, self.exact = "read" if isinstance(cache, LatentPages) else "none", cursor.forks is not None

    def attend(self, q, k, v, *, window: int | None = None, **options: Any) -> Float[Array, "1 S N H"]:
        """Compute attention over each slot's cache, including the new token."""
        if self.exact:
            return self._write_and_attend(q, k, v, window=window, **options)
        cursor, (pages, offsets) = self._cursor, self._cursor.places.of(window)
        tables = cursor.tables[cursor.places.windows.index(window)]
        out, self.keys = append_and_attend(
            *(q[0], k[0], v[0], self.keys),
            *(pages, offsets, cursor.rope),
            *self._rotation,
            *(tables, cursor.positions),
            window=window,
            **options,
        )
        return out[None]

    def _write_and_attend(
        self, q, k, v, *, window: int | None = None, rows: int = 1, **options: Any
    ) -> Float[Array, "1 S N H"]:
        """Write all tokens to the cache, so many of each sequence, and then compute attention of each."""
        cursor, (pages, offsets) = self._cursor, self._cursor.places.of(window)
        new = q[0], k[0], v[0], self.keys, pages, offsets, cursor.rope, *self._rotation
        if self.exact:
            rotated, self.keys = append_in_order(*new)
        else:
            rotated, _, self.keys = append(*new)
        at = cursor.tables[cursor.places.windows.index(window)][::rows], cursor.positions[::rows]
        return paged_attention(rotated, self.keys, *at, window=window, forks=cursor.forks, rows=rows, **options)[None]

    def attend_latents(self, q, token, rank: int, scale: float) -> Float[Array, "1 S N rank"]:
        """Compute the weighted latents over each slot's cache, including the new token [1, S, 1, W]."""
        cursor, (pages, offsets) = self._cursor, self._cursor.places.of(None)
        self.cache = self.cache.write(token[0, :, 0], pages, offsets)
        tables = cursor.tables[cursor.places.windows.index(None)]
        return latent_attention(q[0], self.cache, tables, cursor.positions, rank=rank, scale=scale)[None]

    def convolve(self, x, weight, heads: DeltaHeads) -> Float[Array, "1 S C"]:
        """Convolve each slot's token with those before it."""
        slots, begun = self._cursor.slots, self._cursor.positions > 0
        y, inputs = convolve_rows(self.cache.inputs, slots, begun, x[0, :, None], weight)
        self.cache = replace(self.cache, inputs=inputs)
        return y[None, :, 0]

    def delta_rule(self, qkv, g, beta, heads: DeltaHeads) -> Float[Array, "1 S N V"]:
        """Compute each slot's output, and the state behind its token."""
        slots, begun = self._cursor.slots, self._cursor.positions > 0
        out, states = advance_states(self.cache.states, slots, begun, qkv[0], g[0], beta[0], heads)
        self.cache = replace(self.cache, states=states)
        return out[None]

    def recur(self, recurrence: Recurrence, *values) -> Float[Array, "1 S *O"]:
        """Compute each slot's output by the layer's own recurrence, and the state behind its token."""
        slots, begun, tokens = self._cursor.slots, self._cursor.positions > 0, [x[0] for x in values]
        if recurrence.advance is not None:
            out, states = recurrence.advance(self.states.states, slots, begun, *tokens)
            self.states = SlotStates(states)
            return out[None]
        out, states = recurrence.step(self.states.read(slots, begun), *tokens)
        self.states = self.states.write(slots, states)
        return out[None]


class ExtendContext(DecodeContext):
    """Context of several tokens of each slot, which attend over the cache and those before them."""

    def attend(self, q, k, v, *, window: int | None = None, **options: Any) -> Float[Array, "1 S N H"]:
        """Write all tokens to the cache, and then compute attention of each."""
        return self._write_and_attend(q, k, v, window=window, **options)


class VerifyContext(ExtendContext):
    """Context of R tokens of each sequence, side by side, of which the first ones may count alone.

    Keys and values of those that do not count are overwritten. A recurrent layer has the states before a step, and what
    the step's tokens gave to them: the next step begins with those that count.
    """

    def attend(self, q, k, v, *, window: int | None = None, **options: Any) -> Float[Array, "1 S*R N H"]:
        """Write all tokens to the cache, and then compute attention of each."""
        rows = q.shape[1] // len(self._cursor.slots)
        return self._write_and_attend(q, k, v, window=window, rows=rows, **options)

    def convolve(self, x, weight, heads: DeltaHeads) -> Float[Array, "1 S*R C"]:
        """Convolve each sequence's tokens with those before them."""
        rows = self._rows(x)
        y = self._convolve(rows, weight)
        self.cache = self.cache.keep(0, rows)
        return y.reshape(x.shape)

    def _convolve(self, rows: Float[Array, "S R C"], weight) -> Float[Array, "S R C"]:
        """Return the outputs of tokens, and write the last inputs, of which kept tokens that count are the newest."""
        stored, kept = self.cache.states, self.cache.kept[0]
        at = stored.inputs, self._cursor.slots, self._begun
        y, inputs = convolve_rows(*at, rows, weight, kept=kept, counts=self._counts)
        self.cache = replace(self.cache, states=replace(stored, inputs=inputs))
        return y

    def delta_rule(self, qkv, g, beta, heads: DeltaHeads) -> Float[Array, "1 S*R N V"]:
        """Compute each sequence's outputs, and the states behind the tokens of the last step that count."""
        tokens = self._rows(qkv), self._rows(g), self._rows(beta)
        out = self._advance(tokens, heads)
        for index, values in enumerate(tokens, 1):
            self.cache = self.cache.keep(index, values)
        return out.reshape(1, -1, *out.shape[2:])

    def _advance(self, tokens: tuple[Array, Array, Array], heads: DeltaHeads) -> Float[Array, "S R N V"]:
        """Return the outputs of tokens, and write the states behind the kept ones that count."""
        stored, (_, *kept) = self.cache.states, self.cache.kept
        at = stored.states, self._cursor.slots, self._begun
        out, states = advance_rows(*at, (kept[0], kept[1], kept[2]), self._counts, tokens, heads)
        self.cache = replace(self.cache, states=replace(stored, states=states))
        return out

    def recur(self, recurrence: Recurrence, *values) -> Float[Array, "1 S*R *O"]:
        """Compute each sequence's outputs by the layer's own recurrence, and the states behind tokens that count."""
        states, outputs = self._recurred(recurrence, values), list[Array]()
        parts = [self._rows(x) for x in values]
        for index, part in enumerate(parts):
            self.cache = self.cache.keep(index, part)
        for row in range(parts[0].shape[1]):
            out, states = recurrence.step(states, *(part[:, row] for part in parts))
            outputs.append(out)
        return jnp.stack(outputs, axis=1).reshape(1, -1, *outputs[0].shape[1:])

    def _recurred(self, recurrence: Recurrence, values: tuple[Array, ...]) -> Any:
        """Return the states behind the kept tokens that count, after writing them."""
        states, kept = self.cache.states.read(self._cursor.slots, self._begun), self.cache.kept
        for row in range(kept[0].shape[1]):
            tokens = [stored[:, row].astype(x.dtype) for stored, x in zip(kept, values, strict=True)]
            _, after = recurrence.step(states, *tokens)
            states = jax.tree.map(partial(_where, row < self._counts), after, states)
        self.cache = replace(self.cache, states=self.cache.states.write(self._cursor.slots, states))
        return states

    def _rows(self, x: Float[Array, "1 S*R *V"]) -> Float[Array, "S R *V"]:
        return x.reshape(len(self._cursor.slots), -1, *x.shape[2:])

    @property
    def _counts(self) -> Int[Array, " S"]:
        assert self._cursor.kept is not None
        return self._cursor.kept

    @property
    def _begun(self) -> Bool[Array, " S"]:
        """Return where there are tokens before the kept ones that count."""
        return self._cursor.positions.reshape(len(self._cursor.slots), -1)[:, 0] > self._counts


class SettleContext(VerifyContext):
    """Context that applies the kept tokens that count to the states of a recurrent layer; outputs are not computed."""

    def convolve(self, x, weight, heads: DeltaHeads) -> Float[Array, "1 S C"]:
        """Keep the last inputs."""
        self._convolve(self._rows(x)[:, :0], weight)
        return jnp.zeros_like(x)

    def delta_rule(self, qkv, g, beta, heads: DeltaHeads) -> Float[Array, "1 S N V"]:
        """Advance the states."""
        none = self._rows(qkv)[:, :0], self._rows(g)[:, :0], self._rows(beta)[:, :0]
        out = self._advance(none, heads)
        return jnp.zeros((1, len(out), *out.shape[2:]), out.dtype)

    def recur(self, recurrence: Recurrence, *values) -> Float[Array, "1 S *O"]:
        """Advance the states."""
        states = self._recurred(recurrence, values)
        out = jax.eval_shape(recurrence.step, states, *(x[0] for x in values))[0]
        return jnp.zeros((1, *out.shape), out.dtype)

    def attend(self, q, k, v, **options: Any) -> Float[Array, "1 S N H"]:
        """Leave keys and values as they are."""
        return q


class WriteContext(ExtendContext):
    """Context that writes keys and values to the cache, as a layer's that nothing is read of but these."""

    def attend(self, q, k, v, *, window: int | None = None, **options: Any) -> Float[Array, "1 S N H"]:
        """Write all tokens to the cache; their queries, which nothing reads, are not computed."""
        cursor, (pages, offsets) = self._cursor, self._cursor.places.of(window)
        *_, self.keys = append(k[0], k[0], v[0], self.keys, pages, offsets, cursor.rope, *self._rotation)
        return jnp.zeros_like(q)

    def attend_latents(self, q, token, rank: int, scale: float) -> Float[Array, "1 S N rank"]:
        """Write all tokens to the cache."""
        self.cache = self.cache.write(token[0, :, 0], *self._cursor.places.of(None))
        return jnp.zeros((*q.shape[:3], rank), q.dtype)


def _where(condition: Bool[Array, " S"], x: Float[Array, "S *V"], y: Float[Array, "S *V"]) -> Float[Array, "S *V"]:
    return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
