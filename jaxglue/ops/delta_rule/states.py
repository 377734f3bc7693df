"""States that outlast a pass: those behind packed documents, and a token's step from one to the next."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxglue.ops.delta_rule.reference import DeltaHeads, normalize
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.zeros import zeros_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaStates:
    """All that a layer of linear attention remembers of sequences, each in a slot. A pytree."""

    states: Float[Array, "slots N H V"]
    """float32."""
    inputs: Float[Array, "slots W-1 C"]
    """The last inputs of the convolution, the oldest first; zeros before a sequence's first token."""

    def write(self, slots: Int[Array, " S"], **values: Any) -> "DeltaStates":
        """Return the states after these of the slots, of the given fields."""
        stored = {name: getattr(self, name) for name in values}
        written = {name: x.at[slots].set(values[name].astype(x.dtype)) for name, x in stored.items()}
        return replace(self, **written)


def make_states(slots: int, heads: DeltaHeads, value_dim: int, width: int, dtype, device=None) -> DeltaStates:
    """Return the empty states of slots, on a device or sharding.

    Args:
        slots: their number.
        heads: of queries, keys and values.
        value_dim: V.
        width: tokens of the convolution.
        dtype: of activations.
        device: where they are.
    """
    channels = 2 * heads.keys * heads.key_dim + heads.values * value_dim
    return DeltaStates(
        states=zeros_on(device, (slots, heads.values, heads.key_dim, value_dim), jnp.float32),
        inputs=zeros_on(device, (slots, width - 1, channels), dtype),
    )


def last_inputs(x: Float[Array, "B T C"], segments: PackedSegments, count: int) -> Float[Array, "B S count C"]:
    """Return the last `count` tokens of each document, the oldest first, zeros before its first."""

    def of_row(x, bounds):
        places = bounds[1:, None] - count + jnp.arange(count)
        return jnp.where((places >= bounds[:-1, None])[..., None], x[jnp.maximum(places, 0)], 0)

    return jax.vmap(of_row)(x, jnp.asarray(segments.cu_seqlens))


class LastChunks(NamedTuple):
    """Chunks in which documents of a row end."""

    tokens: Int[Array, "S C"]
    weights: Float[Array, "S C *of"]
    """Decays from each token to its document's end; 0 outside of the document."""
    decay: Float[Array, "S *of"]
    """From the chunk's beginning to the document's end."""
    before: Int[Array, " S"]
    """The chunk's number."""
    is_carried: Bool[Array, " S"]
    """The document has begun before it."""


def last_chunks(g: Float[Array, "T *of"], bounds: Int[Array, " S+1"], chunk: int) -> LastChunks:
    """Return the last chunk of each document of a row, with decays of the logarithms g, of heads or of channels."""
    begins, last = bounds[:-1], jnp.maximum(bounds[1:] - 1, 0)
    first = last // chunk * chunk
    tokens = first[:, None] + jnp.arange(chunk)
    inside = (tokens >= begins[:, None]) & (tokens <= last[:, None])
    tokens = jnp.minimum(tokens, len(g) - 1)
    of = tuple(range(2, g.ndim + 1))
    logs = jnp.where(jnp.expand_dims(tokens <= last[:, None], of), g[tokens], 0.0)
    later = jnp.flip(jnp.cumsum(jnp.flip(logs, 1), 1), 1) - logs  # of the tokens behind each
    weights = jnp.where(jnp.expand_dims(inside, of), jnp.exp(later), 0.0)
    return LastChunks(tokens, weights, jnp.exp(logs.sum(1)), first // chunk, begins < first)


def last_states(
    k: Float[Array, "B T K H"],
    g: Float[Array, "B T N"],
    updates: Float[Array, "B T N V"],
    states: Float[Array, "B chunks N H V"],
    segments: PackedSegments,
    chunk: int,
) -> Float[Array, "B S N H V"]:
    """Return the state behind each document in float32, from those at the beginnings of chunks.

    Args:
        k: keys of unit length.
        g: logarithms of decays.
        updates: u of `chunks.py`.
        states: before each chunk of so many tokens; anything where no document crosses its beginning.
        segments: the rows' documents.
        chunk: tokens.
    """

    def of_row(k, g, updates, states, bounds):
        tokens, weights, decay, before, is_carried = last_chunks(g, bounds, chunk)
        K, N = k.shape[1], updates.shape[1]
        added = (weights[..., None] * updates[tokens].astype(jnp.float32)).reshape(*tokens.shape, K, N // K, -1)
        total = jnp.einsum("sckh,sckgv->skghv", k[tokens], added, precision=lax.Precision.HIGHEST)
        total = total.reshape(len(tokens), N, *total.shape[3:])
        decayed = decay[..., None, None] * states[before].astype(jnp.float32)
        return total + jnp.where(is_carried[:, None, None, None], decayed, 0.0)

    return jax.vmap(of_row)(k, g, updates, states, jnp.asarray(segments.cu_seqlens))


def convolution_step(
    x: Float[Array, "S C"],
    inputs: Float[Array, "S W-1 C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None = None,
) -> tuple[Float[Array, "S C"], Float[Array, "S W-1 C"]]:
    """Return `causal_convolution` of a token behind each of the inputs, and the inputs with it."""
    seen = [*jnp.unstack(inputs, axis=1), x.astype(inputs.dtype)]
    taps = jnp.unstack(weight[:, 0].astype(jnp.float32), axis=1)
    # A product of matrices would transpose the inputs.
    total = sum(token.astype(jnp.float32) * tap for token, tap in zip(seen, taps, strict=True))
    total = total if bias is None else total + bias.astype(jnp.float32)
    return jax.nn.silu(total).astype(x.dtype), jnp.stack(seen[1:], axis=1)


def convolve_each(
    x: Float[Array, "S R C"],
    inputs: Float[Array, "S W-1 C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
) -> tuple[Float[Array, "S R C"], Float[Array, "S W-1 C"]]:
    """Return `convolution_step` of tokens one after another, and the inputs with them."""
    outputs = list[Array]()
    for token in jnp.unstack(x, axis=1):
        out, inputs = convolution_step(token, inputs, weight, bias)
        outputs.append(out)
    return jnp.stack(outputs, axis=1) if outputs else x, inputs


def following(
    inputs: Float[Array, "S W-1 C"], tokens: Float[Array, "S K C"], counts: Int[Array, " S"]
) -> Float[Array, "S W-1 C"]:
    """Return the last inputs with the first tokens of each sequence behind them, so many as count."""
    seen = [*jnp.unstack(inputs, axis=1), *jnp.unstack(tokens.astype(inputs.dtype), axis=1)]
    last = seen[: inputs.shape[1]]
    for count in range(1, tokens.shape[1] + 1):  # selects, since a gather would be a pass of its own
        later = seen[count : count + len(last)]
        last = [jnp.where(counts[:, None] == count, new, old) for new, old in zip(later, last, strict=True)]
    return jnp.stack(last, axis=1)


def delta_step(
    qkv: Float[Array, "S W"],
    g: Float[Array, "S N"],
    beta: Float[Array, "S N"],
    states: Float[Array, "S N H V"],
    heads: DeltaHeads,
) -> tuple[Float[Array, "S N V"], Float[Array, "S N H V"]]:
    """Return `gated_delta_rule`'s output of a token, and the states behind it."""
    (q, k, v), (S, N, H, V) = (x[:, 0] for x in heads.split(qkv[:, None])), states.shape
    q, k = normalize(q, k)
    grouped = states.reshape(S, heads.keys, N // heads.keys, H, V)
    decay, beta = (x.astype(jnp.float32).reshape(*grouped.shape[:3], 1) for x in (jnp.exp(g), beta))
    read = jnp.einsum("skghv,skch->skgcv", grouped, jnp.stack([k, q], 2), precision=lax.Precision.HIGHEST)
    update = beta * (v.astype(jnp.float32).reshape(*grouped.shape[:3], V) - decay * read[..., 0, :])
    out = decay * read[..., 1, :] + jnp.sum(q * k, -1)[:, :, None, None] * update
    after = decay[..., None] * grouped + k[:, :, None, :, None] * update[..., None, :]
    return out.reshape(S, N, V).astype(v.dtype), after.reshape(states.shape)
