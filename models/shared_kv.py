"""Attention whose keys and values later layers read, or that reads those of an earlier one (Gemma 4).

They pass from layer to layer in columns of the residual stream after the model's width: a layer stays a function of its
input, and gradients flow back to where they were made. Keys are normed there and not yet rotated.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Parts
from jaxglue.models.layers import Attention, copied
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.residual import Norm
from jaxglue.ops import names
from jaxglue.ops.norm_rope import rms_norm
from jaxglue.ops.residual_norm import Normed

KeysValues = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]


class SharedAttention(Attention):
    """Attention with norms of queries, keys and values, of which the values' has no weight.

    Keys and values may be one projection, or those of an earlier layer.
    """

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        shape, D, N = kind.shape, config.hidden_size, config.num_attention_heads
        H, K = shape.head_dim, shape.kv_heads
        linear = partial(layer_linear, config, kind, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        norm: dict[str, Any] = {"eps": config.rms_norm_eps, "style": parts.norm, "dtype": dtype}
        makes = shape.shares != "takes"
        self.q_proj = linear("self_attn.q_proj", D, N * H)
        k_proj = linear("self_attn.k_proj", D, K * H) if makes else None
        v_proj = linear("self_attn.v_proj", D, K * H) if makes and not shape.keys_as_values else None
        self.k_proj, self.v_proj = k_proj, v_proj  # type: ignore[assignment]
        self.o_proj = linear("self_attn.o_proj", N * H, D)
        self.q_norm = Norm(H, **norm)
        self.k_norm = Norm(H, **norm) if makes else None
        self.fused = self.gated = self.gated_queries = self.norms_full_width = self.norms_turned = False
        self.sinks = None
        self.head_dim, self.window, self.rotary = H, kind.window, kind.rotary
        self.query_factor, self.softcap = config.query_factor(H), config.attention.softcap

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, Array, Array], None]:
        """Return rotated queries and keys, and values [B, T, heads, H], all made here."""
        return self.project_shared(normed, context, None)[0], None

    def project_shared(
        self, normed: Normed, context: LayerContext, taken: KeysValues | None
    ) -> tuple[tuple[Array, Array, Array], KeysValues]:
        """Return `project` with keys and values that are made here or taken, and these for others, keys unrotated."""
        projected = project_together(self.linears[:-1], copied(normed), context)
        named = zip(projected, (names.QUERY, names.KEY, names.VALUE), strict=False)
        q, *rest = (self._heads(checkpoint_name(y, name)) for y, name in named)
        assert self.q_norm is not None
        k, v = taken or self._made(*rest)
        rotated = context.rotate(self.q_norm(q), k, self.rotary, None, self.query_factor)
        return (*rotated, v), (k, v)

    def _made(self, k: Array, v: Array | None = None) -> KeysValues:
        """Norm the projections; without one for values, those are the keys' before their norm."""
        assert self.k_norm is not None
        v = k if v is None else v
        return self.k_norm(k), rms_norm(v, jnp.ones(v.shape[-1], v.dtype), self.k_norm.eps, self.k_norm.style)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the projections that the layer has, attention's output's last."""
        made = [linear for linear in (self.k_proj, self.v_proj) if linear is not None]
        return self.q_proj, *made, self.o_proj

    @property
    def head_norms(self) -> None:
        """Return None: norms are applied before the rotation, as others may read the keys between."""
        return None
