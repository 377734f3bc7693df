"""Norms, attention, feed-forward and the decoder layer that the model families share.

Parameters carry Hugging Face's names and shapes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext, PackedContext
from jaxglue.models.linear import Linear, Normed, project_together
from jaxglue.models.tiles import map_tiles
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, compute_capability
from jaxglue.ops.collectives import copy_to, reduce_from
from jaxglue.ops.gated_mlp import GATED_MLP, Activation, GatedParts, gated_mlp, gated_mlp_reads_fp8
from jaxglue.ops.norm_rope import HeadNorms, branch_norm, rms_norm
from jaxglue.ops.projection import PROJECTION, Conditions, projections_read_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, residual_norm_fp8
from jaxglue.ops.small_layer import SMALL_LAYER, LayerNorms, LayerSpec, small_layer


def _linear_options(config: DecoderConfig, **options: Any) -> dict[str, Any]:
    """Return the `Linear` options shared within a decoder layer."""
    return {"std": config.initializer_range, "quantize": config.quantize, **options}


def _copy_to(normed: Normed) -> Normed:
    return normed if isinstance(normed, FP8Rows) else copy_to(normed)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 internally."""

    def __init__(self, size: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalize x, in x's dtype."""
        return rms_norm(x, self.weight[...], self.eps)

    def branch(self, x: Float[Array, "B T D"], *, fp8: bool = False) -> tuple[Float[Array, "B T D"], Normed]:
        """Return (x, norm of x) for a residual block, the latter as e4m3 values if asked for."""
        return (residual_norm_fp8 if fp8 else branch_norm)(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional q/k norms and sinks."""

    def __init__(self, config: DecoderConfig, *, qk_norm: bool, sinks: bool, kind: LayerKind, dtype, rngs: nnx.Rngs):
        D, H, eps = config.hidden_size, kind.head_dim, config.rms_norm_eps
        N, K = config.num_attention_heads, config.num_key_value_heads
        options = _linear_options(config, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.q_proj = Linear(D, N * H, **options)
        self.k_proj = Linear(D, K * H, **options)
        self.v_proj = Linear(D, K * H, **options)
        self.o_proj = Linear(N * H, D, **options)
        self.q_norm = RMSNorm(H, eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(H, eps, dtype=dtype) if qk_norm else None
        self.sinks = (
            nnx.Param(jax.random.normal(rngs.params(), (N,), dtype) * config.initializer_range) if sinks else None
        )
        self.head_dim, self.window, self.rotary = H, kind.window, kind.rotary

    def add_to(self, x: Float[Array, "B T D"], normed: Normed, context: LayerContext) -> Array:
        """Project, rotate, attend, project back and add to x."""
        return self.leave(x, self.attend(*self.enter(_copy_to(normed), context), context), context)

    def reads_fp8_values(self, context: LayerContext) -> bool:
        """Return whether the norm's e4m3 values are multiplied."""
        return projections_read_fp8([linear.projection for linear in self.linears[:3]], context)

    def enter(self, x: Normed, context: LayerContext) -> tuple[Array, Array, Array]:
        """Return rotated queries and keys, and values [B, T, heads, H]."""
        projected = project_together((self.q_proj, self.k_proj, self.v_proj), x, context)
        q, k, v = (
            self._heads(checkpoint_name(y, name))
            for y, name in zip(projected, (names.QUERY, names.KEY, names.VALUE), strict=True)
        )
        return *context.rotate(q, k, self.rotary, self.head_norms), v

    def attend(self, q: Array, k: Array, v: Array, context: LayerContext) -> Float[Array, "B T N H"]:
        """Attend within the context."""
        sinks = None if self.sinks is None else self.sinks[...]
        return context.attend(q, k, v, window=self.window, sinks=sinks)

    def leave(self, x: Float[Array, "B T D"], out: Float[Array, "B T N H"], context: LayerContext) -> Array:
        """Project attention's output back and add it to x."""
        return self.o_proj.add_to(x, out.reshape(*out.shape[:2], -1), context)

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Return the projections to queries, keys and values, and that of attention's output."""
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    @property
    def head_norms(self) -> HeadNorms | None:
        """Return the norms of queries and keys; None without."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.eps)


class GatedMLP(nnx.Module):
    """Gated feed-forward: down(activation(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, *, activation: Activation = "silu", dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        options = _linear_options(config, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_proj = Linear(D, F, **options)
        self.up_proj = Linear(D, F, **options)
        self.down_proj = Linear(F, D, **options)
        self.activation: Activation = activation

    def add_to(self, x: Float[Array, "B T D"], normed: Normed, context: LayerContext) -> Array:
        """Apply the feed-forward and add it to x."""
        return gated_mlp(_copy_to(normed), self.parts, context, stream=x, activation=self.activation)

    def reads_fp8_values(self, context: LayerContext) -> bool:
        """Return whether the norm's e4m3 values are multiplied."""
        return gated_mlp_reads_fp8(self.parts, context, self.activation)

    @property
    def parts(self) -> GatedParts:
        """Return the projections' parameters."""
        return GatedParts(*(linear.projection for linear in self.linears))

    @property
    def linears(self) -> tuple[Linear, Linear, Linear]:
        """Return gate, up and down."""
        return self.gate_proj, self.up_proj, self.down_proj


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        mlp: Callable[..., nnx.Module] = GatedMLP,
        qk_norm: bool = False,
        sinks: bool = False,
        kind: LayerKind,
        dtype,
        rngs: nnx.Rngs,
    ):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, dtype=dtype)
        self.self_attn = Attention(config, qk_norm=qk_norm, sinks=sinks, kind=kind, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype=dtype)
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Apply attention and feed-forward to the residual stream."""
        x = checkpoint_name(x, names.LAYER_INPUT)
        if context.tile is not None:
            return self._by_tiles(x, context)
        if (y := self._as_small(x, context)) is not None:
            return y
        x, normed = self.input_layernorm.branch(x, fp8=self.self_attn.reads_fp8_values(context))
        x = checkpoint_name(self.self_attn.add_to(x, normed, context), names.ATTENTION_RESIDUAL)
        return self._feed_forward(x, context)

    def forms(self, conditions: Conditions, x: Float[Array, "B T D"] | None = None) -> dict[str, BackendChoice]:
        """Return how the layer's projections are computed, by title, and why; for an input, the whole layer too."""
        capability, shared = compute_capability(), [linear.projection for linear in self.self_attn.linears[:3]]
        forms = {"projections": PROJECTION.choose(capability, shared, conditions, False)}
        if isinstance(self.mlp, GatedMLP):
            call = self.mlp.parts, conditions, self.mlp.activation
            forms["feed-forward"] = GATED_MLP.choose(capability, *call)
            if x is not None and self._has_plain_attention:
                projections = [linear.projection for linear in (*self.self_attn.linears, *self.mlp.linears)]
                forms["layer"] = SMALL_LAYER.choose(capability, x, projections, conditions)
        return forms

    @property
    def _has_plain_attention(self) -> bool:
        """Return whether kernels of small layers know all that attention computes."""
        rotary = self.self_attn.rotary
        return self.self_attn.sinks is None and rotary is not None and rotary.turns_whole_halves

    def _as_small(self, x, context: LayerContext) -> Float[Array, "B T D"] | None:
        """Return the layer's output where kernels of small layers serve, on one device; None elsewhere."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(mlp, GatedMLP) or not isinstance(context, PackedContext) or context.attention_out is not None:
            return None
        if attention.rotary is None or not self._has_plain_attention:
            return None
        before, after = self.input_layernorm, self.post_attention_layernorm
        norms = LayerNorms(before.weight[...], after.weight[...], attention.head_norms)
        projections = [linear.projection for linear in (*attention.linears, *mlp.linears)]
        spec = LayerSpec(rotary=attention.rotary, eps=before.eps, window=attention.window)
        return small_layer(spec, x, norms, projections, context)

    def _feed_forward(self, x, context: LayerContext) -> Float[Array, "B T D"]:
        if isinstance(self.mlp, GatedMLP):
            x, normed = self.post_attention_layernorm.branch(x, fp8=self.mlp.reads_fp8_values(context))
            return self.mlp.add_to(x, normed, context)
        x, normed = self.post_attention_layernorm.branch(x)
        return x + reduce_from(self.mlp(_copy_to(normed), context))

    def _by_tiles(self, x, context: LayerContext) -> Float[Array, "B T D"]:
        """Apply the layer with only attention on whole rows."""
        assert isinstance(context, PackedContext)

        def enter(context, x):
            return self.self_attn.enter(copy_to(self.input_layernorm(x)), context)

        def leave(context, x, out):
            return self._feed_forward(self.self_attn.leave(x, out, context), context)

        values = (names.QUERY, names.KEY, names.VALUE)
        if context.attention_out is not None:
            return map_tiles(leave, context, x, context.attention_out)
        q, k, v = map(checkpoint_name, map_tiles(enter, context, x), values)
        out = self.self_attn.attend(q, k, v, context)
        # In the shape of q XLA would make the gradients' zeros for both loops at once, and hold them from the first on.
        return map_tiles(leave, context, x, out.reshape(*x.shape[:2], -1))
