"""Several drafts in a row behind every token of packed rows at once, as a server makes them (EAGLE-3's training-time
test, arXiv 2503.01840, 3.2).

The k-th draft behind token t attends to what the head read of the document's tokens up to t, and to its own drafts
before, at the positions after t.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.decoder import packed_context
from jaxglue.models.eagle import EagleHead
from jaxglue.ops.segments import PackedSegments

BLOCK = 256
"""Tokens whose attention's weights exist at a time; rows are multiples of it, or shorter."""


@dataclass(frozen=True, kw_only=True)
class _DraftsContext(PackedContext):
    """Context of the next draft behind each token, after those of which keys and values are seen."""

    seen: list[tuple[Array, Array]]

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None) -> Float[Array, "B T N H"]:
        """Compute attention of each token's draft, and note its keys and values for the following ones."""
        self.seen.append((k, v))
        (keys, values), *own = self.seen
        if own:
            return attend_with_drafts(q, keys, values, own, self.segments.starts)
        return PackedContext.attend(self, q, k, v, window=window, sinks=sinks, softcap=softcap)


def draft_states(
    head: EagleHead,
    hidden: Float[Array, "B T D"],
    embedded: Sequence[Float[Array, "B T D"]],
    config: DecoderConfig,
    segments: PackedSegments,
) -> list[Float[Array, "B T D"]]:
    """Return the states of each draft, of which the head's projection gives the logits.

    Args:
        head: that drafts.
        hidden: what it reads of the model.
        embedded: tokens after each, those after these, …: one for each draft.
        config: of the head's layer.
        segments: of the rows.
    """
    context, states = _DraftsContext(**vars(packed_context(config, segments)), seen=[]), list[Array]()
    for step, each in enumerate(embedded):
        if step:
            context = replace(context, rope=config.rope_tables(segments.positions + step))
        hidden = head(each, hidden, context)
        states.append(head.output(hidden))
    return states


def attend_with_drafts(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    own: Sequence[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]],
    starts: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Compute attention of each token over its document's up to it, and over keys and values that are its own.

    Args:
        q: rotated queries.
        keys, values: rotated, of the tokens.
        own: of each token alone.
        starts: first token of each one's document.
    """
    B, T, N, H = q.shape
    K, size = keys.shape[2], min(T, BLOCK)
    assert T % size == 0
    own_keys, own_values = (jnp.stack(each, axis=2) for each in zip(*own, strict=True))

    @jax.checkpoint
    def attend(block):
        q, own_keys, own_values, starts, index = block
        grouped = q.reshape(B, size, K, N // K, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        places = jnp.arange(T)
        visible = (places <= index[:, :, None]) & (places >= starts[:, :, None])
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        more = jnp.einsum("btkgh,btskh->bkgts", grouped, own_keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.concatenate([scores, more], axis=-1) * H**-0.5, axis=-1).astype(q.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :T], values, preferred_element_type=jnp.float32)
        out += jnp.einsum("bkgts,btskh->btkgh", weights[..., T:], own_values, preferred_element_type=jnp.float32)
        return out.reshape(B, size, N, H).astype(q.dtype)

    index = jnp.broadcast_to(jnp.arange(T), (B, T))
    blocks = (
        jnp.moveaxis(x.reshape(B, -1, size, *x.shape[2:]), 1, 0) for x in (q, own_keys, own_values, starts, index)
    )
    return jnp.moveaxis(jax.lax.map(attend, tuple(blocks)), 0, 1).reshape(q.shape)
