"""Attention, feed-forward and the decoder layer that the model families share.

Parameters carry Hugging Face's names and shapes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.family import NAMES, ModuleNames, Parts
from jaxglue.models.linear import Linear, layer_linear
from jaxglue.models.moe_layers import SparseMLP
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.collectives import copy_to
from jaxglue.ops.gated_mlp import ACTIVATIONS, GatedParts, gated_mlp
from jaxglue.ops.norm_rope import HeadNorms
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.projection.fp8_adapters import FP8Rows
from jaxglue.ops.residual_norm import GatedInput, Normed, Reader


def copied(normed: Normed) -> Normed:
    """Return the input of the devices that split a layer; its gradient is their sum."""
    return normed if isinstance(normed, FP8Rows) else copy_to(normed)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional q/k norms, sinks and gates of its output."""

    value_names: tuple[str, ...] = (names.QUERY, names.KEY, names.VALUE)
    """Names of `project`'s values, for checkpoint policies."""
    output_name, gate_name, plain_norms = "o_proj", None, None

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        D, H = config.hidden_size, kind.head_dim
        N, K = config.num_attention_heads, kind.shape.kv_heads
        linear = partial(layer_linear, config, kind, dtype=dtype, rngs=rngs)
        bias, options, path = config.attention_bias, config.attention, kind.mixer.module
        output_bias = bias if options.output_bias is None else options.output_bias
        self.fused, self.gated_queries, self.gate_name = parts.fused_qkv, parts.gated_attention, parts.gate
        self.gated = parts.gated_attention or parts.gate is not None
        if self.fused:
            self.qkv_proj = linear(f"{path}.qkv_proj", D, (N + 2 * K) * H, bias=bias)
        else:
            self.q_proj = linear(f"{path}.q_proj", D, N * H * (1 + parts.gated_attention), bias=bias)
            self.k_proj = linear(f"{path}.k_proj", D, K * H, bias=bias)
            self.v_proj = linear(f"{path}.v_proj", D, K * H, bias=bias)
        if parts.gate is not None:
            width = N if parts.gate_per_head else N * H
            setattr(self, parts.gate, linear(f"{path}.{parts.gate}", D, width, bias=False))
        self.output_name = parts.names.output
        setattr(self, self.output_name, linear(f"{path}.{self.output_name}", N * H, D, bias=output_bias))
        norm: dict[str, Any] = {"eps": config.rms_norm_eps, "style": parts.norm, "dtype": dtype}
        widths = {"heads": (H, H), "turned": (H, H), "full": (N * H, K * H)}.get(parts.head_norms)
        widths = widths if options.head_norms else None
        self.plain_norms = (config.rms_norm_eps, dtype) if parts.head_norms == "plain" else None
        self.q_norm = Norm(widths[0], **norm) if widths else None
        self.k_norm = Norm(widths[1], **norm) if widths else None
        self.norms_full_width, self.norms_turned = (parts.head_norms == kind for kind in ("full", "turned"))
        std = config.initializer_range
        self.sinks = nnx.Param(jax.random.normal(rngs.params(), (N,), dtype) * std) if parts.sinks else None
        self.bounds = N * H, (N + K) * H
        """Ends of queries and of keys in a fused projection."""
        self.head_dim, self.window, self.rotary = H, kind.window, kind.rotary
        self.query_factor, self.softcap = config.query_factor(H), options.softcap

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Project, rotate, attend and project back."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array | None]:
        """Return rotated queries and keys, and values [B, T, heads, H]; and the output's gate, if any.

        A gate is [B, T, N, H], or of a projection of its own [B, T, N·H] or [B, T, N].
        """
        projected, gate = adapted_projection(copied(normed), self.inputs, context), None
        if self.gate_name is not None:
            *projected, gate = projected
            gate = checkpoint_name(gate, names.OUTPUT_GATE)
        if len(projected) == 1:
            projected = jnp.split(projected[0], self.bounds, axis=-1)
        names_of = zip(projected, self.value_names, strict=True)
        q, k, v = (checkpoint_name(y, name) for y, name in names_of)
        if self.q_norm is not None and self.k_norm is not None and self.norms_full_width:
            q, k = self.q_norm.of(q), self.k_norm.of(k)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self.gated_queries:  # each head's query, then its gate
            q, gate = q[:, :, ::2], q[:, :, 1::2]
        if self.q_norm is not None and self.k_norm is not None and self.norms_turned:
            q, k = context.rotate(q, k, self.rotary, at_once=True)
            q, k = self.q_norm(q, exact=context.exact), self.k_norm(k, exact=context.exact)
            return ((q * self.query_factor).astype(q.dtype), k, v), gate
        q, k = context.rotate(q, k, self.rotary, self.head_norms, self.query_factor)
        return (q, k, v), gate

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T N H"]:
        """Attend within the context."""
        q, k, v = values
        sinks = None if self.sinks is None else self.sinks[...]
        return context.attend(q, k, v, window=self.window, sinks=sinks, softcap=self.softcap)

    def output(self, attended: Array, gate: Array | None, context: LayerContext) -> Branch:
        """Project attention's output, times its gate's sigmoid, back."""
        if gate is not None:
            heads = attended.reshape(*gate.shape[:2], -1, self.head_dim)
            attended = heads * jax.nn.sigmoid(gate.reshape(*heads.shape[:3], -1))
        flat = attended.reshape(*attended.shape[:2], -1)
        return Branch(lambda x: self.output_proj.add_to(x, flat, context))

    @property
    def output_proj(self) -> Linear:
        """Return the projection of attention's output."""
        return getattr(self, self.output_name)

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm: the projections to queries, keys and values, or one to all."""
        if self.fused:
            return self.qkv_proj.projection.split(*self.bounds)
        return [linear.projection for linear in self.linears[:-1]]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the projections to queries, keys and values, or the one to all, that of gates, and the output's."""
        first = (self.qkv_proj,) if self.fused else (self.q_proj, self.k_proj, self.v_proj)
        gate = () if self.gate_name is None else (getattr(self, self.gate_name),)
        return *first, *gate, self.output_proj

    @property
    def head_norms(self) -> HeadNorms | None:
        """Return the norms of the heads of queries and keys, before they turn; None without."""
        if self.plain_norms is not None:
            eps, dtype = self.plain_norms
            return HeadNorms(jnp.ones(self.head_dim, dtype), jnp.ones(self.head_dim, dtype), eps)
        if self.q_norm is None or self.k_norm is None or self.norms_full_width or self.norms_turned:
            return None
        q, k = self.q_norm, self.k_norm
        biases = None if q.bias_values is None or k.bias_values is None else (q.bias_values, k.bias_values)
        return HeadNorms(q.weight[...], k.weight[...], q.eps, q.style, biases)


class GatedMLP(nnx.Module):
    """Gated feed-forward: down(activation(gate(x)) · up(x)); `path` is within the layer, `size` its width F."""

    def __init__(
        self,
        config: DecoderConfig,
        kind: LayerKind,
        path: str = "mlp",
        size: int | None = None,
        *,
        modules: ModuleNames = NAMES,
        dtype,
        rngs,
    ):
        D, F = config.hidden_size, kind.shape.intermediate_size if size is None else size
        linear = partial(layer_linear, config, kind, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.modules = modules.gate, modules.up, modules.down
        for name, sizes in zip(self.modules, ((D, F), (D, F), (F, D)), strict=True):
            setattr(self, name, linear(f"{path}.{name}", *sizes))
        self.activation = config.activation

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Apply the feed-forward."""
        shared = copied(normed)
        return Branch(lambda x: gated_mlp(shared, self.parts, context, stream=x, activation=self.activation))

    @property
    def inputs(self) -> GatedInput:
        """Return the readers of the layer's norm."""
        return GatedInput(self.parts, self.activation)

    @property
    def parts(self) -> GatedParts:
        """Return the projections' parameters."""
        return GatedParts(*(linear.projection for linear in self.linears))

    @property
    def linears(self) -> tuple[Linear, Linear, Linear]:
        """Return gate, up and down."""
        gate, up, down = (getattr(self, name) for name in self.modules)
        return gate, up, down


class FusedMLP(nnx.Module):
    """Gated feed-forward with one projection for gate and up, in this order; see `GatedMLP`."""

    def __init__(
        self,
        config: DecoderConfig,
        kind: LayerKind,
        path: str = "mlp",
        size: int | None = None,
        *,
        modules: ModuleNames = NAMES,
        dtype,
        rngs: nnx.Rngs,
    ):
        D, F = config.hidden_size, kind.shape.intermediate_size if size is None else size
        linear = partial(layer_linear, config, kind, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.modules = modules.gate_up, modules.down
        for name, sizes in zip(self.modules, ((D, 2 * F), (F, D)), strict=True):
            setattr(self, name, linear(f"{path}.{name}", *sizes))
        self.activation = config.activation

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Apply the feed-forward."""
        shared, parts = copied(normed), self.parts
        if parts is not None:
            return Branch(lambda x: gated_mlp(shared, parts, context, stream=x, activation=self.activation))
        (joined,) = adapted_projection(shared, [self.linears[0].projection], context)
        gate, up = jnp.split(joined, 2, axis=-1)
        gate, up = checkpoint_name(gate, names.GATE), checkpoint_name(up, names.UP)
        product = ACTIVATIONS[self.activation](gate) * up
        return Branch(lambda x: self.linears[1].add_to(x, product, context))

    @property
    def inputs(self) -> Reader:
        """Return the readers of the layer's norm."""
        parts = self.parts
        return [self.linears[0].projection] if parts is None else GatedInput(parts, self.activation)

    @property
    def parts(self) -> GatedParts | None:
        """Return the parameters of gate, up and down; None where gate and up are multiplied as one."""
        projection, down = (linear.projection for linear in self.linears)
        parts = projection.split(projection.weight.shape[0] // 2)
        return None if len(parts) == 1 else GatedParts(parts[0], parts[1], down)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Return gate and up as one, and down."""
        gate_up, down = (getattr(self, name) for name in self.modules)
        return gate_up, down


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), and whatever a family adds at the end.

    A family may lack these norms and have others, of the branches' outputs, and a model may scale these. The stages
    before and after attention treat each token by itself.
    """

    attention: type[Attention] = Attention
    in_stages = True
    """The stages before and after attention treat each token by itself, given the residual stream alone."""

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        mixer = kind.mixer.make(config, parts, kind, **options) or self.attention(config, parts, kind, **options)
        setattr(self, kind.mixer.module, mixer)
        self.mixer_name = kind.mixer.module
        self.mlp_name = parts.names.mlp
        setattr(self, self.mlp_name, _feed_forward(config, parts, kind, **options))
        self.parallel = parts.parallel
        self.norms, self.norm_style, self.factor = parts.norms, parts.norm, config.scales.residual
        self.sees = kind.sees
        if self.sees:  # at the places of images in the whole row
            self.in_stages = False
        for name in filter(None, vars(parts.norms).values()):
            setattr(self, name, Norm(config.hidden_size, config.rms_norm_eps, style=parts.norm, dtype=dtype))

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Apply the layer to the residual stream."""
        if self.parallel:
            values, gate = self.before_attention(x, context)
            return self.after_attention(x, self.token_mixer.attend(values, context), gate, context)
        x, normed = self._fork(x, self.norms.before_attention, self.token_mixer, context)
        x = x + self._branch(self.token_mixer(normed, context), self.norms.after_attention, names.ATTENTION_BRANCH)
        return self._add_mlp(x, context)

    @property
    def token_mixer(self) -> Any:
        """Return the part in which tokens see others: attention, or another with its methods."""
        return getattr(self, self.mixer_name)

    @property
    def ffn(self) -> Any:
        """Return the feed-forward, dense or of experts."""
        return getattr(self, self.mlp_name)

    def before_attention(self, x: Float[Array, "B T D"], context: LayerContext) -> tuple[tuple[Array, ...], Any]:
        """Return the mixer's values of norm(x), such as queries, keys and values, and its output's gate, if any."""
        return self.token_mixer.project(self._normed(x, self.norms.before_attention, context), context)

    def after_attention(self, x: Float[Array, "B T D"], attended: Array, gate: Any, context: LayerContext) -> Array:
        """Return the layer's output from its input, the values that attention gives its heads, and their gate."""
        normed = x if not self.parallel else self._normed(x, self.norms.before_attention, context)
        branch = self.token_mixer.output(attended, gate, context)
        x = x + self._branch(branch, self.norms.after_attention, names.ATTENTION_BRANCH)
        if self.parallel:
            x = x + self._branch(self.ffn(normed, context), self.norms.after_mlp, names.MLP_BRANCH)
            return self._finish(x, context)
        return self._add_mlp(x, context)

    def _add_mlp(self, x, context: LayerContext) -> Float[Array, "B T D"]:
        x = checkpoint_name(x, names.ATTENTION_RESIDUAL)
        x, normed = self._fork(x, self.norms.before_mlp, self.ffn, context)
        branch = self._branch(self.ffn(normed, context), self.norms.after_mlp, names.MLP_BRANCH)
        return self._finish(x + branch, context)

    def _finish(self, x, context: LayerContext) -> Float[Array, "B T D"]:
        """Return the layer's output from the sum with its feed-forward."""
        return x + context.layer_input if self.sees and context.layer_input is not None else x

    def norm_named(self, name: str | None) -> Norm | None:
        """Return the norm of this name; None for none."""
        return None if name is None else getattr(self, name)

    def _normed(self, x: Array, name: str | None, context: LayerContext) -> Array:
        """Return the norm of this name of x; x without one."""
        norm = self.norm_named(name)
        return x if norm is None else norm(x, exact=context.exact)

    def _fork(self, x, name: str | None, reader: Any, context) -> tuple[Array, Normed]:
        """Return x, and norm(x) for this reader."""
        norm = self.norm_named(name)
        return (x, x) if norm is None else norm.fork(x, reader.inputs, context)

    def _branch(self, branch: Branch, norm: str | None, name: str | None = None) -> Branch:
        """Return factor · norm(branch), to be added to x."""
        return replace(branch, norm=self.norm_named(norm), factor=self.factor, name=name)


def _feed_forward(
    config: DecoderConfig, parts: Parts, kind: LayerKind, **options: Any
) -> SparseMLP | FusedMLP | GatedMLP:
    """Make a layer's feed-forward: a dense one, or experts with the one that all tokens share, if any."""
    names = parts.names
    if not kind.sparse and parts.fused_gate_up:
        return FusedMLP(config, kind, names.mlp, modules=names, **options)
    if not kind.sparse:
        return GatedMLP(config, kind, names.mlp, modules=names, **options)
    assert config.moe is not None
    path, size = f"{names.mlp}.{parts.experts.shared}", config.moe.shared_size
    return SparseMLP(config, parts.experts, GatedMLP(config, kind, path, size, **options) if size else None, **options)
