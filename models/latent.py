"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): keys and values from one small vector a token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import AttentionOptions, CacheSizes, DecoderConfig, LayerKind, Mixer, vector_bytes
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Parts
from jaxglue.models.hf_fields import decoder_fields, require_fields
from jaxglue.models.layers import Attention, copied
from jaxglue.models.linear import Linear, layer_linear
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.paged_attention import LatentPages, make_latent_pages
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.projection.dora import magnitude_gain, matrix
from jaxglue.ops.quant.fp8 import rounded_rows
from jaxglue.ops.residual_norm import Normed

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever config.json has for the others."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Mixer):
    """Sizes of latent attention."""

    title = "latent attention"

    query_rank: int | None
    """Size of the queries' latent vector; None where they are projected at once."""
    rank: int
    """Size of the latent vector of keys and values."""
    nope_dim: int
    """Dimensions of each query and key that do not turn."""
    rope_dim: int
    """Dimensions after these that do, those of keys being the same for all heads."""
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Return the values of a token in the cache: the key's part that turns, and the latent vector."""
        return self.rope_dim + self.rank

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "LatentAttention":
        """See `Mixer`."""
        return LatentAttention(config, parts, self, kind, dtype=dtype, rngs=rngs)

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        D, N, H = config.hidden_size, config.num_attention_heads, kind.head_dim
        queries = D * N * H if self.query_rank is None else self.query_rank * (D + N * H)
        keys_values = D * self.cached_dim + self.rank * N * (self.nope_dim + self.value_dim)
        return queries + keys_values + N * self.value_dim * D

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return heads, self.value_dim

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> LatentPages:
        """See `Mixer`."""
        return make_latent_pages(sizes.pages, sizes.page, self.cached_dim, sizes.dtype, sizes.device)

    def token_bytes(self, kind: LayerKind, dtype) -> int:
        """See `Mixer`."""
        return vector_bytes(self.cached_dim, dtype)


class LatentAttention(Attention):
    """Attention whose keys, values and, in larger models, queries are projected from norms of latent vectors.

    The last dimensions of each head's query turn, and those of one key that all heads share. Values, and attention's
    output, have heads of their own size.
    """

    value_names = (*Attention.value_names, names.KEY)

    def __init__(
        self, config: DecoderConfig, parts: Parts, latent: LatentConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs
    ):
        D, N, H, bias = config.hidden_size, config.num_attention_heads, kind.head_dim, config.attention_bias
        linear = partial(layer_linear, config, kind, dtype=dtype, rngs=rngs)
        if latent.query_rank is None:
            self.q_proj = linear("self_attn.q_proj", D, N * H, bias=False)
        else:
            self.q_a_proj = linear("self_attn.q_a_proj", D, latent.query_rank, bias=bias)
            self.q_a_layernorm = Norm(latent.query_rank, _EPS, dtype=dtype)
            self.q_b_proj = linear("self_attn.q_b_proj", latent.query_rank, N * H, bias=False)
        self.kv_a_proj_with_mqa = linear("self_attn.kv_a_proj_with_mqa", D, latent.rank + latent.rope_dim, bias=bias)
        self.kv_a_layernorm = Norm(latent.rank, _EPS, dtype=dtype)
        self.kv_b_proj = linear(
            "self_attn.kv_b_proj", latent.rank, N * (latent.nope_dim + latent.value_dim), bias=False
        )
        self.o_proj = linear("self_attn.o_proj", N * latent.value_dim, D, bias=bias)
        self.gate_name, self.gated = parts.gate, parts.gate is not None
        if parts.gate is not None:  # of a value for each head
            setattr(self, parts.gate, linear(f"self_attn.{parts.gate}", D, N, bias=False))
        self.latent, self.heads = latent, N
        self.fused = self.gated_queries = self.norms_full_width = self.norms_turned = False
        self.sinks = self.q_norm = self.k_norm = None
        self.head_dim, self.window, self.rotary = H, kind.window, kind.rotary
        self.query_factor, self.softcap = config.query_factor(H), None

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array | None]:
        """Return queries and keys [B, T, N, H], and values [B, T, N, value_dim]; the output's gate [B, T, N], if any.

        For a cache they are followed by the latents [B, T, rank] where these are written; where they are read, queries
        are projected to the latents' space, and the only key has the latent in it.
        """
        latent, rope_dim = self.latent, self.latent.rope_dim
        q, joined, *gates = adapted_projection(copied(normed), self.inputs, context)
        gate = checkpoint_name(gates[0], names.OUTPUT_GATE) if gates else None
        if latent.query_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q), context)
        q, joined = checkpoint_name(q, names.QUERY), checkpoint_name(joined, names.KEY)
        latents, k_turning = self.kv_a_layernorm(joined[..., : latent.rank]), joined[..., latent.rank :]
        if context.latents != "none" and context.fp8 and self.kv_b_proj.projection.is_for_fp8:
            latents = rounded_rows(latents)  # as the product with them in FP8
        q = self._heads(q)
        # Scores know no order of dimensions: those that turn come first, as where a part of each head does.
        q = jnp.concatenate([q[..., latent.nope_dim :], q[..., : latent.nope_dim]], axis=-1)
        k_turning = k_turning[:, :, None]
        if context.latents == "read":
            k = jnp.pad(k_turning, ((0, 0),) * 3 + ((0, latent.nope_dim),))
            q, k = context.rotate(q, k, self.rotary, None, self.query_factor)
            q = jnp.concatenate([q[..., :rope_dim], self._keys_and_values(q.dtype).absorb(q[..., rope_dim:])], axis=-1)
            return (q, jnp.concatenate([k[..., :rope_dim], latents[:, :, None]], axis=-1)), gate
        kv = checkpoint_name(self.kv_b_proj(latents, context), names.VALUE)
        kv = kv.reshape(*kv.shape[:2], self.heads, -1)
        k_turning = jnp.broadcast_to(k_turning, (*q.shape[:3], rope_dim))
        k = jnp.concatenate([k_turning, kv[..., : latent.nope_dim]], axis=-1)
        q, k = context.rotate(q, k, self.rotary, None, self.query_factor)
        values = q, k, kv[..., latent.nope_dim :]
        return values if context.latents == "none" else (*values, latents), gate

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T N value_dim"]:
        """Attend within the context, or over its latents."""
        cache: Any = context
        if context.latents == "none":
            return super().attend(values, context)
        if context.latents == "written":
            return cache.attend_and_keep(*values, self.latent.rope_dim)
        attended = cache.attend_latents(*values, self.latent.rank, self.head_dim**-0.5)
        return self._keys_and_values(attended.dtype).expand(attended)

    def output(self, attended: Array, gate: Array | None, context: LayerContext) -> Branch:
        """Project attention's output, times its gate's sigmoid, back."""
        if gate is not None:
            factors = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
            attended = attended.reshape(*gate.shape, -1) * factors[..., None]
        return super().output(attended, None, context)

    def _keys_and_values(self, dtype) -> "LatentMatrices":
        return LatentMatrices.of(self.kv_b_proj.projection, self.heads, self.latent.nope_dim, dtype)

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm: the projections to queries, or their latent vector, and to keys'."""
        first = self.q_proj if self.latent.query_rank is None else self.q_a_proj
        return [linear.projection for linear in (first, self.kv_a_proj_with_mqa, *self.gates)]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return all projections."""
        first = (self.q_proj,) if self.latent.query_rank is None else (self.q_a_proj, self.q_b_proj)
        return *first, self.kv_a_proj_with_mqa, *self.gates, self.kv_b_proj, self.o_proj

    @property
    def gates(self) -> tuple[Linear, ...]:
        """Return the projection to the output's gate, if any."""
        return () if self.gate_name is None else (getattr(self, self.gate_name),)


@dataclass(frozen=True)
class LatentMatrices:
    """The projection from latents to the keys and values of N heads, the other way around."""

    keys: Float[Array, "N nope_dim rank"]
    values: Float[Array, "N value_dim rank"]
    gain: Float[Array, "N rows"] | None
    """Factors of each head's rows, those of keys first (DoRA)."""
    adapter: tuple[Float[Array, "N rows R"], Float[Array, "R rank"]] | None

    @classmethod
    def of(cls, projection: Projection, heads: int, nope_dim: int, dtype) -> "LatentMatrices":
        """Read the matrices of a projection, expanded to `dtype` if they are quantized."""
        weight, adapter = matrix(projection.weight, dtype), projection.adapter
        by_head = weight.reshape(heads, -1, weight.shape[1])
        keys, values, gain, low_rank = by_head[:, :nope_dim], by_head[:, nope_dim:], None, None
        if adapter is not None:
            low_rank = adapter.up.reshape(heads, -1, len(adapter.A)), adapter.A
            if adapter.magnitude is not None:
                gain = magnitude_gain(weight, adapter.A, adapter.up, adapter.magnitude, dtype=weight.dtype)
                gain = gain.reshape(heads, -1)
        return cls(keys, values, gain, low_rank)

    def absorb(self, q: Float[Array, "B T N nope_dim"]) -> Float[Array, "B T N rank"]:
        """Return queries whose products with latents are those of q with keys."""
        size = q.shape[-1]
        if self.gain is not None:
            q = (q * self.gain[:, :size]).astype(q.dtype)
        out = _product("btnd,ndr->btnr", q, self.keys)
        if self.adapter is not None:
            up, A = self.adapter
            out += _product("btnR,Rr->btnr", _product("btnd,ndR->btnR", q, up[:, :size]), A)
        return out.astype(q.dtype)

    def expand(self, latents: Float[Array, "B T N rank"]) -> Float[Array, "B T N value_dim"]:
        """Return the values of each head's latents."""
        size = self.values.shape[1]
        out = _product("btnr,nvr->btnv", latents, self.values)
        if self.adapter is not None:
            up, A = self.adapter
            out += _product("btnR,nvR->btnv", _product("btnr,Rr->btnR", latents, A), up[:, -size:])
        if self.gain is not None:
            out *= self.gain[:, -size:]
        return out.astype(latents.dtype)


def _product(equation: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


def latent_fields(raw: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Read the config.json fields of models with latent attention.

    Args:
        raw: config.json.
        options: of `decoder_fields`.

    Raises:
        ValueError: as `decoder_fields`; sizes that are missing or contradict each other, or values wider than keys.
    """
    require_fields(raw, ("num_attention_heads", "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"))
    require_fields(raw, ("qk_nope_head_dim", "v_head_dim"))
    heads, layers, rope_dim = raw["num_attention_heads"], raw["num_hidden_layers"], raw["qk_rope_head_dim"]
    head_dim, given = raw["qk_nope_head_dim"] + rope_dim, raw.get("num_key_value_heads")
    if given is not None and given != heads:
        raise ValueError(
            f"num_key_value_heads={given} in config.json: latent attention has num_attention_heads={heads}"
        )
    if raw["v_head_dim"] > head_dim:
        raise ValueError(
            f"v_head_dim={raw['v_head_dim']} in config.json is above qk_nope_head_dim + qk_rope_head_dim={head_dim}, "
            "which is not supported"
        )
    interleaved = raw.get("rope_interleave") is not False
    own = {**raw, "head_dim": rope_dim, "num_key_value_heads": heads}
    fields = decoder_fields(own, interleaved=interleaved, **options)
    part = rope_dim / head_dim
    part = part if int(head_dim * part) == rope_dim else math.nextafter(part, 1.0)
    rope, scale = replace(fields["rope"], partial_rotary_factor=part), 1.0
    if rope.rope_type != "default" and rope.mscale_all_dim and (rope.factor or 1.0) > 1:
        scale = (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    latent = LatentConfig(
        query_rank=raw.get("q_lora_rank"),
        rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=rope_dim,
        value_dim=raw["v_head_dim"],
    )
    return fields | {
        "head_dim": head_dim,
        "rope": rope,
        "attention": AttentionOptions(scale=None if scale == 1.0 else scale * head_dim**-0.5),
        "layer_windows": (None,) * layers,
        "mixers": (latent,) * layers,
    }


def check_rotated_size(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for a `head_dim` that transformers would take for the rotated part of the heads."""
    if (given := raw.get("head_dim")) is not None and given != raw.get("qk_rope_head_dim"):
        raise ValueError(
            f"head_dim={given} in config.json contradicts qk_rope_head_dim={raw.get('qk_rope_head_dim')}, for which "
            f"{raw['model_type']} takes it: take it out"
        )
