"""Linear attention by the gated delta rule, in place of attention in some layers of a family."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import CacheSizes, DecoderConfig, LayerKind, Mixer
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Parts
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, Capability
from jaxglue.ops.delta_rule import (
    DELTA_RULE,
    DeltaCall,
    DeltaHeads,
    DeltaStates,
    gated_rms_norm,
    gates,
    make_states,
)
from jaxglue.ops.projection import Projection
from jaxglue.ops.residual_norm import Normed


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(Mixer):
    """Sizes of linear attention by the gated delta rule."""

    title = "linear attention"
    module = "linear_attn"
    recurrent = True
    record = "delta"

    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens of the convolution before it."""
    largest_beta: float = 1.0
    """β is at most this: above 1, a state's part along a key may change its sign."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def key_width(self) -> int:
        """Return the width of all queries, or of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the width of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Return the width of queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def heads(self) -> DeltaHeads:
        """Return the heads of queries, keys and values."""
        return DeltaHeads(self.num_key_heads, self.num_value_heads, self.key_dim)

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "DeltaNet":
        """See `Mixer`."""
        return DeltaNet(config, kind, self, dtype=dtype, rngs=rngs)

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        return config.hidden_size * (self.channels + 2 * self.value_width + 2 * self.num_value_heads)

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return self.num_value_heads, self.value_dim

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> DeltaStates:
        """See `Mixer`."""
        return make_states(sizes.slots, self.heads, self.value_dim, self.conv_width, sizes.activations, sizes.device)

    def state_bytes(self, dtype) -> int:
        """See `Mixer`."""
        state = 4 * self.num_value_heads * self.key_dim * self.value_dim
        return state + (self.conv_width - 1) * self.channels * jnp.dtype(dtype).itemsize

    def step_values(self, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the convolution's input, queries, keys and values, the logarithm of the decay, and β."""
        qkv, gate = (
            jax.ShapeDtypeStruct((self.channels,), dtype),
            jax.ShapeDtypeStruct((self.num_value_heads,), jnp.float32),
        )
        return qkv, qkv, gate, gate

    @property
    def prefill_values(self) -> int:
        """Return the convolution's, the rule's, and a state before each chunk of 64 tokens, in float32."""
        states = 2 * self.num_value_heads * self.key_dim * self.value_dim // 64
        return 3 * self.channels + 3 * self.value_width + states

    @property
    def exchanged(self) -> int:
        """See `Mixer`."""
        return self.channels + self.value_width

    def why_not_split(self, devices: int) -> str | None:
        """See `Mixer`."""
        if self.num_key_heads % devices == 0:
            return None
        return (
            f"the {self.num_key_heads} key heads of {self.title} do not divide among {devices} GPUs of context, which "
            "exchange tokens for heads there"
        )

    def initial(self, name: str, key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """See `Mixer`."""
        if name.endswith(f"{self.module}.A_log"):
            return jnp.log(jax.random.uniform(key, spec.shape, minval=0.01, maxval=16.0)).astype(spec.dtype)
        if name.endswith(tuple(f"{self.module}.{part}" for part in ("dt_bias", "norm.weight", "o_norm.weight"))):
            return jnp.ones(spec.shape, spec.dtype)
        return None

    def backends(self, capability: Capability | None, dtype) -> dict[str, BackendChoice]:
        """See `Mixer`."""
        shape = DeltaCall(dtype=dtype, key_dim=self.key_dim, value_dim=self.value_dim)
        return {self.title: DELTA_RULE.choose(capability, shape)}


class Convolution(nnx.Module):
    """Weights of a causal convolution of each channel."""

    def __init__(self, channels: int, width: int, *, std: float, dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (channels, 1, width), dtype) * std)


class DeltaNet(nnx.Module):
    """Convolution of queries, keys and values, the gated delta rule, and a gated norm of each head's output."""

    value_names = (names.DELTA_INPUT, names.DELTA_GATES, names.DELTA_GATES)
    """Names of `project`'s values, for checkpoint policies."""

    gated = True

    def __init__(self, config: DecoderConfig, kind: LayerKind, shape: DeltaConfig, *, dtype, rngs: nnx.Rngs):
        N = shape.num_value_heads
        self.shape = shape
        self.make_inputs(config, kind, dtype=dtype, rngs=rngs)
        # Published in float32, whatever the other weights' dtype: decays multiply over all tokens of a document.
        self.dt_bias = nnx.Param(jnp.ones(N, jnp.float32))
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (N,), minval=0.01, maxval=16.0)))
        self.make_output(config, kind, dtype=dtype, rngs=rngs)

    def make_inputs(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> None:
        """Make the projections that read the layer's norm, and the convolution."""
        D, N, shape = config.hidden_size, self.shape.num_value_heads, self.shape
        linear = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs)
        self.in_proj_qkv = linear("linear_attn.in_proj_qkv", D, shape.channels)
        self.in_proj_z = linear("linear_attn.in_proj_z", D, shape.value_width)
        self.in_proj_b = linear("linear_attn.in_proj_b", D, N)
        self.in_proj_a = linear("linear_attn.in_proj_a", D, N)
        self.make_convolution(config, dtype=dtype, rngs=rngs)

    def make_convolution(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs) -> None:
        """Make the convolution of queries, keys and values."""
        options: dict[str, Any] = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.conv1d = Convolution(self.shape.channels, self.shape.conv_width, **options)

    def make_output(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> None:
        """Make the norm of the output's heads, and the projection back."""
        self.norm = Norm(self.shape.value_dim, config.rms_norm_eps, dtype=jnp.float32)
        sizes = self.shape.value_width, config.hidden_size
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.out_proj = layer_linear(config, kind, "linear_attn.out_proj", *sizes, **options)

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
        heads = self.shape.heads
        mixed = context.convolve(qkv, self.taps, heads)
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        beta = beta if self.shape.largest_beta == 1.0 else beta * self.shape.largest_beta
        return context.delta_rule(mixed, g, beta, heads)

    def output(self, attended: Array, gate: Array, context: LayerContext) -> Branch:
        """Norm the rule's output, gate it and project it back."""
        heads = (*gate.shape[:2], self.shape.num_value_heads, self.shape.value_dim)
        weight, eps = self.output_norm.weight[...], self.output_norm.eps
        gated = gated_rms_norm(attended.reshape(heads), gate.reshape(heads), weight, eps).reshape(gate.shape)
        return Branch(lambda x: self.output_proj.add_to(x, gated, context))

    @property
    def taps(self) -> jax.Array:
        """Return the convolution's weights of queries, keys and values [channels, 1, tokens]."""
        return self.conv1d.weight[...]

    @property
    def output_norm(self) -> Norm:
        """Return the norm of the output's heads."""
        return self.norm

    @property
    def output_proj(self) -> Linear:
        """Return the projection of the output."""
        return self.out_proj

    @property
    def inputs_of_norm(self) -> list[Linear]:
        """Return the linear layers that read the layer's norm."""
        return [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [linear.projection for linear in self.inputs_of_norm]
