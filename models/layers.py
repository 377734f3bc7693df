"""Blocks shared by the model families; parameters carry Hugging Face's names and shapes."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import LayerContext, PackedContext
from jaxglue.models.dora import rescale, row_norms
from jaxglue.models.tiles import map_tiles
from jaxglue.ops import names
from jaxglue.ops.choices import Storage
from jaxglue.ops.collectives import BATCH_AXES, axis_size, copy_to, reduce_from
from jaxglue.ops.fp8 import Rows, add_adapted_fp8, branch_norm_fp8, project_adapted_fp8, project_fp8, swiglu_fp8
from jaxglue.ops.lora import lora_add, lora_expand, lora_shrink
from jaxglue.ops.lora_swiglu import Matrices, lora_swiglu
from jaxglue.ops.norm_rope import HeadNorms, branch_norm, rms_norm
from jaxglue.ops.quant import project_quantized
from jaxglue.ops.quant.formats import Quantized, quantize_matrix
from jaxglue.ops.quant.fp8 import is_multiplied_in_fp8
from jaxglue.ops.small_layer import LayerSpec, Weights, small_layer

Normed = Float[Array, "B T D"] | Rows
"""A norm's output, as e4m3 codes where FP8 products read it."""


def _copy_to(normed: Normed) -> Normed:
    return normed if isinstance(normed, Rows) else copy_to(normed)


def project(x: Float[Array, "*B in"], weight: Float[Array, "out in"], dtype=None) -> Float[Array, "*B out"]:
    """Compute x·Wᵀ in `dtype` (default: x's), without saving a transposed copy of the weight for the backward pass."""
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), contract_last, preferred_element_type=dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Float[Array, "*B in"], count: int) -> tuple[Float[Array, "*B in"], ...]:
    """Alias x `count` times; sum cotangents serially so that XLA fuses each add into a GEMM."""
    return (x,) * count


def _sum_partials(count: int, _, gradients):
    total, *others = gradients
    for gradient in others:
        total = gradient + total
    return (total,)


fan_out.defvjp(lambda x, count: (fan_out(x, count), None), _sum_partials)


class Linear(nnx.Module):
    """Linear layer y = x·Wᵀ (+ bias) (+ scale · dropout(x)·Aᵀ·Bᵀ) in x's dtype; weight [out, in], quantized or not."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        quantize: Storage = "none",
        dtype,
        rngs: nnx.Rngs,
    ):
        weight = jax.random.normal(rngs.params(), (out_features, in_features), dtype) * std
        self.weight = nnx.Param(quantize_matrix(weight, quantize))
        self.trains_in_fp8 = quantize == "fp8_trained"
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None
        self.lora_A: nnx.LoRAParam | None = nnx.data(None)
        self.lora_B: nnx.LoRAParam | None = nnx.data(None)
        self.lora_magnitude_vector: nnx.LoRAParam | None = nnx.data(None)
        self.lora_scale = 0.0
        self.lora_dropout = 0.0
        self.dropout_salt = 0

    def add_lora(
        self, *, rank: int, scale: float, dropout: float, name: str, rngs: nnx.Rngs, dora: bool = False
    ) -> None:
        """Add a float32 adapter with zero initial output, as PEFT does: A uniform within ±1/√in, B zero.

        With `dora`, also the norms of the weight's rows as magnitudes (arXiv 2402.09353).
        """
        out_features, in_features = self.weight.shape
        bound = in_features**-0.5
        self.lora_A = nnx.LoRAParam(jax.random.uniform(rngs.params(), (rank, in_features), minval=-bound, maxval=bound))
        self.lora_B = nnx.LoRAParam(jnp.zeros((out_features, rank)))
        if dora:
            self.lora_magnitude_vector = nnx.LoRAParam(row_norms(self.weight.get_value()))
        self.lora_scale, self.lora_dropout = scale, dropout
        self.dropout_salt = zlib.crc32(name.encode())

    def __call__(self, x: Float[Array, "B T in"], context: LayerContext) -> Float[Array, "B T out"]:
        """Apply the projection and its adapter."""
        return project_together((self,), x, context)[0]

    def base(self, x: Float[Array, "B T in"], context: LayerContext) -> Float[Array, "B T out"]:
        """Compute x·Wᵀ, without bias and adapter."""
        return _multiply(x, (self,), context)[0]

    def add_to(self, x: Float[Array, "B T out"], inputs: Float[Array, "B T in"], context: LayerContext) -> Array:
        """Return x plus the projection of `inputs`, summed over the devices that split it."""
        if self.bias is None and (up := self.scaled_b) is not None and _have_fp8_adapters((self,), context):
            return add_adapted_fp8(x, inputs, self.weight.get_value(), _first_matrices((self,)), up)
        return _add_projection(x, self, *_project_base((self,), inputs, context))

    @property
    def scaled_b(self) -> Float[Array, "out R"] | None:
        """Return scale · B of the adapter; None without an adapter."""
        if self.lora_B is None:
            return None
        return self.lora_B[...] if self.lora_scale == 1.0 else self.lora_scale * self.lora_B[...]

    def drop(self, x: Float[Array, "B T in"], context: LayerContext) -> Float[Array, "B T in"]:
        """Apply the adapter's own dropout to x; the identity outside training."""
        if self.lora_dropout == 0.0 or context.dropout_key is None:
            return x
        key = jax.random.fold_in(context.dropout_key, self.dropout_salt)
        keep = jax.random.bernoulli(key, 1.0 - self.lora_dropout, x.shape)
        return jnp.where(keep, x / (1.0 - self.lora_dropout), 0).astype(x.dtype)


def project_together(linears: Sequence[Linear], x: Normed, context: LayerContext) -> list[Array]:
    """Apply several linear layers to one input, shrinking it to all adapters' ranks in a single matmul.

    Each base matmul accumulates onto its adapter's product.
    """
    if len(linears) > 1 and _have_fp8_adapters(linears, context):
        weights = [linear.weight.get_value() for linear in linears]
        ups = [up for linear in linears if (up := linear.scaled_b) is not None]
        return _add_adapters(linears, project_adapted_fp8(x, weights, _first_matrices(linears), ups), None)
    assert not isinstance(x, Rows)
    return _add_adapters(linears, *_project_base(linears, x, context))


def _have_fp8_adapters(linears: Sequence[Linear], context: LayerContext) -> bool:
    """Return whether all are frozen FP8 weights with adapters and nothing intervenes between the two."""
    return all(
        _is_in_fp8(linear, context)
        and not linear.trains_in_fp8
        and linear.lora_A is not None
        and linear.lora_magnitude_vector is None
        and (context.dropout_key is None or linear.lora_dropout == 0.0)
        for linear in linears
    )


def _first_matrices(linears: Sequence[Linear]) -> Float[Array, "ranks in"]:
    """Return the adapters' first matrices, one below the other."""
    return jnp.concatenate([linear.lora_A[...] for linear in linears if linear.lora_A is not None])


def _add_adapters(linears: Sequence[Linear], outputs: list[Array], hidden: Array | None) -> list[Array]:
    """Add adapters' products and biases to the outputs of `_project_base`."""
    adapters = {index: linear.scaled_b for index, linear in enumerate(linears) if linear.scaled_b is not None}
    if hidden is not None:
        for index, product in zip(adapters, lora_expand(hidden, list(adapters.values())), strict=True):
            outputs[index] = rescale(linears[index], outputs[index] + product)
    biases = [linear.bias for linear in linears]
    return [y if bias is None else y + bias[...].astype(y.dtype) for y, bias in zip(outputs, biases, strict=True)]


def _add_projection(x, linear: Linear, outputs: list[Array], hidden: Array | None) -> Float[Array, "B T out"]:
    """Return x plus an output of `_project_base` with its adapter and bias."""
    matrix, intervening = linear.scaled_b, (linear.bias, linear.lora_magnitude_vector)
    alone = all(value is None for value in intervening) and axis_size("tensor") == 1 and not _may_be_in_fp8(linear)
    if hidden is None or matrix is None or not alone:
        return x + reduce_from(_add_adapters((linear,), outputs, hidden)[0])
    return lora_add(x, outputs[0], hidden, matrix)


def _project_base(linears: Sequence[Linear], x, context: LayerContext) -> tuple[list[Array], Array | None]:
    """Return (base outputs without adapters and biases, low-rank values of the adapters or None)."""
    in_fp8 = all(_is_in_fp8(linear, context) for linear in linears)
    groups = [linears] if in_fp8 else [[linear] for linear in linears]  # FP8 weights share a quantized x
    x, *copies = fan_out(x, 1 + len(groups))
    outputs = [y for group, copy in zip(groups, copies, strict=True) for y in _multiply(copy, group, context)]
    return outputs, _shrink_to_ranks(linears, x, context)


def _is_in_fp8(linear: Linear, context: LayerContext) -> bool:
    return context.fp8 and _may_be_in_fp8(linear)


def _may_be_in_fp8(linear: Linear) -> bool:
    return linear.trains_in_fp8 or is_multiplied_in_fp8(linear.weight.get_value())


def _multiply(x, linears: Sequence[Linear], context: LayerContext) -> list[Array]:
    """Compute x·Wᵀ of linear layers in FP8, or of a single one in another format."""
    weights: list[Any] = [linear.weight.get_value() for linear in linears]
    if _is_in_fp8(linears[0], context):
        return project_fp8(x, weights)
    return [project_quantized(x, weight) if isinstance(weight, Quantized) else project(x, weight) for weight in weights]


def _joinable(linears: Sequence[Linear], context: LayerContext) -> tuple[tuple[Array, ...], tuple[Array, ...]] | None:
    """Return weights and first matrices of adapted linear layers; None if one lacks them or does more."""
    if context.tile is not None or any(_does_more(linear, context) for linear in linears):
        return None
    downs = tuple(linear.lora_A[...] for linear in linears if linear.lora_A is not None)
    return tuple(linear.weight[...] for linear in linears), downs


def _does_more(linear: Linear, context: LayerContext) -> bool:
    """Return whether a layer is not just a plain weight with an adapter."""
    drops = context.dropout_key is not None and linear.lora_dropout > 0.0
    others = linear.bias is not None or linear.lora_magnitude_vector is not None or linear.trains_in_fp8
    return drops or others or linear.lora_A is None or not isinstance(linear.weight.get_value(), jax.Array)


def _shrink_to_ranks(linears: Sequence[Linear], x, context: LayerContext) -> Float[Array, "B T R"] | None:
    """Compute dropout(x)·Aᵀ of every adapter, concatenated along the last axis."""
    adapters = [(linear, linear.lora_A[...]) for linear in linears if linear.lora_A is not None]
    if not adapters:
        return None
    if context.dropout_key is None or not any(linear.lora_dropout for linear, _ in adapters):
        hidden = lora_shrink(x, jnp.concatenate([A for _, A in adapters]))
    else:
        hidden = jnp.concatenate([lora_shrink(linear.drop(x, context), A) for linear, A in adapters], axis=-1)
    return checkpoint_name(hidden, names.LORA_HIDDEN)


def _linear_options(config: DecoderConfig, **options: Any) -> dict[str, Any]:
    """Return the `Linear` options shared within a decoder layer."""
    return {"std": config.initializer_range, "quantize": config.quantize, **options}


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
        return (branch_norm_fp8 if coded else branch_norm)(x, self.weight[...], self.eps)


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
        return _have_fp8_adapters((self.q_proj, self.k_proj, self.v_proj), context)

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
                return swiglu_fp8(x, normed, weights, _first_matrices(self.linears[:2]), matrices, last)
            assert not isinstance(normed, Rows)
            return _add_projection(x, self.down_proj, *self._lora_swiglu(normed, matrices, context))
        gate, up = project_together((self.gate_proj, self.up_proj), normed, context)
        gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
        return self.down_proj.add_to(x, jax.nn.silu(gate) * up, context)

    def reads_codes(self, context: LayerContext) -> bool:
        """Return whether the norm's e4m3 codes are multiplied."""
        fused = self.down_proj.bias is None and self._swiglu_matrices(context) is not None
        return fused and _have_fp8_adapters(self.linears, context)

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
        """Return down's output and low-rank values as `_project_base` does; other products are formed in kernels."""
        (gate, up), hidden = _project_base(self.linears[:2], x, context)
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
        if several or context.attention_out is not None or not (parts := _joinable(linears, context)):
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
