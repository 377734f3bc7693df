"""Norms, attention, feed-forward and the decoder layer that the model families share.

Parameters carry Hugging Face's names and shapes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import LayerContext, PackedContext
from jaxglue.models.linear import (
    Linear,
    Normed,
    add_projection,
    first_matrices,
    have_fp8_adapters,
    plain_matrices,
    project_base,
    project_together,
)
from jaxglue.models.tiles import map_tiles
from jaxglue.ops import names
from jaxglue.ops.collectives import BATCH_AXES, axis_size, copy_to, reduce_from
from jaxglue.ops.gated_mlp.fp8 import swiglu_fp8
from jaxglue.ops.gated_mlp.swiglu import Matrices, lora_swiglu
from jaxglue.ops.norm_rope import HeadNorms, branch_norm, rms_norm
from jaxglue.ops.projection.fp8_adapters import FP8Rows, residual_norm_fp8
from jaxglue.ops.small_layer import LayerSpec, Weights, small_layer


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

    def branch(self, x: Float[Array, "B T D"], *, coded: bool = False) -> tuple[Float[Array, "B T D"], Normed]:
        """Return (x, norm of x) for a residual block, the latter as e4m3 codes if asked for."""
        return (residual_norm_fp8 if coded else branch_norm)(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional q/k norms and sinks."""

    def __init__(self, config: DecoderConfig, *, qk_norm: bool, sinks: bool, window: int | None, dtype, rngs: nnx.Rngs):
        D, H, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
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
        self.head_dim, self.window = H, window

    def add_to(self, x: Float[Array, "B T D"], normed: Normed, context: LayerContext) -> Array:
        """Project, rotate, attend, project back and add to x."""
        return self.leave(x, self.attend(*self.enter(_copy_to(normed), context), context), context)

    def reads_codes(self, context: LayerContext) -> bool:
        """Return whether the norm's e4m3 codes are multiplied."""
        return have_fp8_adapters((self.q_proj, self.k_proj, self.v_proj), context)

    def enter(self, x: Normed, context: LayerContext) -> tuple[Array, Array, Array]:
        """Return rotated queries and keys, and values [B, T, heads, H]."""
        projected = project_together((self.q_proj, self.k_proj, self.v_proj), x, context)
        q, k, v = (
            self._heads(checkpoint_name(y, name))
            for y, name in zip(projected, (names.QUERY, names.KEY, names.VALUE), strict=True)
        )
        return *context.rotate(q, k, self.head_norms), v

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
    """SwiGLU feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        options = _linear_options(config, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_proj = Linear(D, F, **options)
        self.up_proj = Linear(D, F, **options)
        self.down_proj = Linear(F, D, **options)

    def add_to(self, x: Float[Array, "B T D"], normed: Normed, context: LayerContext) -> Array:
        """Apply the feed-forward and add it to x."""
        normed = _copy_to(normed)
        if (matrices := self._swiglu_matrices(context)) is not None:
            if self.reads_codes(context) and (last := self.down_proj.scaled_b) is not None:
                weights: Any = tuple(linear.weight.get_value() for linear in self.linears)
                return swiglu_fp8(x, normed, weights, first_matrices(self.linears[:2]), matrices, last)
            assert not isinstance(normed, FP8Rows)
            return add_projection(x, self.down_proj, *self._lora_swiglu(normed, matrices, context))
        gate, up = project_together((self.gate_proj, self.up_proj), normed, context)
        gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
        return self.down_proj.add_to(x, jax.nn.silu(gate) * up, context)

    def reads_codes(self, context: LayerContext) -> bool:
        """Return whether the norm's e4m3 codes are multiplied."""
        fused = self.down_proj.bias is None and self._swiglu_matrices(context) is not None
        return fused and have_fp8_adapters(self.linears, context)

    @property
    def linears(self) -> tuple[Linear, Linear, Linear]:
        """Return gate, up and down."""
        return self.gate_proj, self.up_proj, self.down_proj

    def _swiglu_matrices(self, context: LayerContext) -> Matrices | None:
        """Return the matrices for `lora_swiglu`; None if one is missing, ranks differ, or bias or dropout intervene."""
        gate_b, up_b, down_a = self.gate_proj.scaled_b, self.up_proj.scaled_b, self.down_proj.lora_A
        biases = self.gate_proj.bias, self.up_proj.bias, self.gate_proj.lora_magnitude_vector
        drops = context.dropout_key is not None and self.down_proj.lora_dropout > 0.0
        if gate_b is None or up_b is None or down_a is None or drops or any(bias is not None for bias in biases):
            return None
        same_rank = gate_b.shape[1] == up_b.shape[1] == down_a.shape[0]
        return (gate_b, up_b, down_a[...]) if same_rank else None

    def _lora_swiglu(self, x, matrices: Matrices, context: LayerContext) -> tuple[list[Array], Array]:
        """Return down's output and low-rank values as `project_base` does; other products are formed in kernels."""
        (gate, up), hidden = project_base(self.linears[:2], x, context)
        assert hidden is not None
        y, hidden = lora_swiglu(checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP), hidden, matrices)
        return [self.down_proj.base(y, context)], checkpoint_name(hidden, names.LORA_HIDDEN)


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        mlp: Callable[..., nnx.Module] = GatedMLP,
        qk_norm: bool = False,
        sinks: bool = False,
        window: int | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, dtype=dtype)
        self.self_attn = Attention(config, qk_norm=qk_norm, sinks=sinks, window=window, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype=dtype)
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Apply attention and feed-forward to the residual stream."""
        x = checkpoint_name(x, names.LAYER_INPUT)
        if context.tile is not None:
            return self._by_tiles(x, context)
        if (y := self._as_small(x, context)) is not None:
            return y
        x, normed = self.input_layernorm.branch(x, coded=self.self_attn.reads_codes(context))
        x = checkpoint_name(self.self_attn.add_to(x, normed, context), names.ATTENTION_RESIDUAL)
        return self._feed_forward(x, context)

    def _as_small(self, x, context: LayerContext) -> Float[Array, "B T D"] | None:
        """Return the layer's output where kernels of small layers serve, on one device; None elsewhere."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(mlp, GatedMLP) or not isinstance(context, PackedContext) or attention.sinks is not None:
            return None
        linears = *attention.linears, *mlp.linears
        several = axis_size("tensor", *BATCH_AXES) > 1
        if several or context.attention_out is not None or not (parts := plain_matrices(linears, context)):
            return None
        norms = self.input_layernorm, self.post_attention_layernorm
        weights = Weights((norms[0].weight[...], norms[1].weight[...]), attention.head_norms, parts[0])
        ups = (up for linear in linears if (up := linear.scaled_b) is not None)
        spec = LayerSpec(head_dim=attention.head_dim, eps=norms[0].eps, window=attention.window)
        context = replace(context, dropout_key=None, router_losses=None)
        return small_layer(spec, x, weights, list(zip(parts[1], ups, strict=True)), context)

    def _feed_forward(self, x, context: LayerContext) -> Float[Array, "B T D"]:
        if isinstance(self.mlp, GatedMLP):
            x, normed = self.post_attention_layernorm.branch(x, coded=self.mlp.reads_codes(context))
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
