"""Linear attention by the gated delta rule, in place of attention in some layers of a family."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.delta_rule import DeltaHeads, gated_rms_norm, gates
from jaxglue.ops.projection import Projection
from jaxglue.ops.residual_norm import Normed


class Convolution(nnx.Module):
    """Weights of a causal convolution of each channel."""

    def __init__(self, channels: int, width: int, *, std: float, dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (channels, 1, width), dtype) * std)


class DeltaNet(nnx.Module):
    """Convolution of queries, keys and values, the gated delta rule, and a gated norm of each head's output."""

    value_names = (names.DELTA_INPUT, names.DELTA_GATES, names.DELTA_GATES)
    """Names of `project`'s values, for checkpoint policies."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        shape = config.delta
        assert shape is not None
        D, std, N = config.hidden_size, config.initializer_range, shape.num_value_heads
        linear = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs)
        self.in_proj_qkv = linear("linear_attn.in_proj_qkv", D, shape.channels)
        self.in_proj_z = linear("linear_attn.in_proj_z", D, shape.value_width)
        self.in_proj_b = linear("linear_attn.in_proj_b", D, N)
        self.in_proj_a = linear("linear_attn.in_proj_a", D, N)
        self.conv1d = Convolution(shape.channels, shape.conv_width, std=std, dtype=dtype, rngs=rngs)
        # Published in float32, whatever the other weights' dtype: decays multiply over all tokens of a document.
        self.dt_bias = nnx.Param(jnp.ones(N, jnp.float32))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (N,), minval=0.01, maxval=16.0)))
        self.norm = Norm(shape.value_dim, config.rms_norm_eps, dtype=jnp.float32)
        self.out_proj = linear("linear_attn.out_proj", shape.value_width, D)
        self.shape = shape

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Project, mix the tokens of each document, and project back."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """Return (queries, keys and values in one array, logits of β, inputs of the decays), and the output's gate."""
        qkv, z, b, a = project_together(self.inputs_of_norm, normed, context)
        named = zip((qkv, b, a), self.value_names, strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named), checkpoint_name(z, names.OUTPUT_GATE)

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T N V"]:
        """Convolve, and apply the delta rule within the context."""
        qkv, b, a = values
        heads = DeltaHeads(self.shape.num_key_heads, self.shape.num_value_heads, self.shape.key_dim)
        mixed = context.convolve(qkv, self.conv1d.weight[...], heads)
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        return context.delta_rule(mixed, g, beta, heads)

    def output(self, attended: Array, gate: Array, context: LayerContext) -> Branch:
        """Norm the rule's output, gate it and project it back."""
        heads = (*gate.shape[:2], self.shape.num_value_heads, self.shape.value_dim)
        weight, eps = self.norm.weight[...], self.norm.eps
        gated = gated_rms_norm(attended.reshape(heads), gate.reshape(heads), weight, eps).reshape(gate.shape)
        return Branch(lambda x: self.out_proj.add_to(x, gated, context))

    @property
    def inputs_of_norm(self) -> list[Linear]:
        """Return the linear layers that read the layer's norm."""
        return [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [linear.projection for linear in self.inputs_of_norm]
