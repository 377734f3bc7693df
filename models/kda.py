"""Kimi Delta Attention (arXiv 2510.26692), linear attention with a decay for each channel, in some layers."""

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
from jaxglue.models.delta_net import Convolution
from jaxglue.models.family import Parts
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.residual import Branch, Norm
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, Capability
from jaxglue.ops.delta_rule import DeltaHeads
from jaxglue.ops.kda import KDA, KDACall, KDAWeights, kda_recurrence
from jaxglue.ops.norm_rope import rms_norm
from jaxglue.ops.projection import Projection
from jaxglue.ops.recurrence import SlotStates
from jaxglue.ops.residual_norm import Normed


@dataclass(frozen=True, kw_only=True)
class KDAConfig(Mixer):
    """Sizes of Kimi Delta Attention."""

    title = "Kimi Delta Attention"
    recurrent = True

    num_heads: int
    head_dim: int
    """Dimensions of a head's queries, keys and values."""
    conv_width: int
    """Tokens of the convolution before it."""
    least: float | None = None
    """The least logarithm of a decay, where gates are safe."""
    low_rank: bool = True
    """Decays and the output's gate have two projections each, from the model to a head's width, and from there."""

    @property
    def width(self) -> int:
        """Return the width of all queries, of all keys, or of all values."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> DeltaHeads:
        """Return the heads of queries, keys and values."""
        return DeltaHeads(self.num_heads, self.num_heads, self.head_dim)

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "KimiDelta":
        """See `Mixer`."""
        return KimiDelta(config, kind, self, dtype=dtype, rngs=rngs)

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        D, W = config.hidden_size, self.width
        of_gates = 2 * (D + W) * self.head_dim if self.low_rank else 2 * D * W
        return 4 * D * W + of_gates + D * self.num_heads

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return self.num_heads, self.head_dim

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> SlotStates:
        """See `Mixer`."""
        inputs = jax.ShapeDtypeStruct((self.conv_width - 1, 3 * self.width), sizes.activations)
        states = jax.ShapeDtypeStruct((self.num_heads, self.head_dim, self.head_dim), jnp.float32)
        return SlotStates.empty({"inputs": inputs, "states": states}, sizes.slots, sizes.device)

    def state_bytes(self, dtype) -> int:
        """See `Mixer`."""
        return 4 * self.width * self.head_dim + (self.conv_width - 1) * 3 * self.width * jnp.dtype(dtype).itemsize

    def step_values(self, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the convolution's input, and those of decays and β."""
        return tuple(jax.ShapeDtypeStruct((width,), dtype) for width in (3 * self.width, self.width, self.num_heads))

    @property
    def prefill_values(self) -> int:
        """Return the convolution's, the rule's with its decays, and a state before each chunk of 64 tokens."""
        return 18 * self.width + 2 * self.width * self.head_dim // 64

    @property
    def exchanged(self) -> int:
        """See `Mixer`."""
        return 5 * self.width

    def why_not_split(self, devices: int) -> str | None:
        """See `Mixer`."""
        if self.num_heads % devices == 0:
            return None
        return f"the {self.num_heads} heads of {self.title} do not divide among {devices} GPUs of context"

    def initial(self, name: str, key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Return decays from slow to fast, and ones, where these are asked for."""
        part = name.rpartition(f".{self.module}.")[2].removeprefix("forget_gate.")
        if part == "A_log":
            return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0)).astype(spec.dtype)
        if part == "dt_bias":
            step = jnp.exp(jax.random.uniform(key, spec.shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
            return jnp.log(jnp.expm1(step)).astype(spec.dtype)
        return jnp.ones(spec.shape, spec.dtype) if part == "o_norm.weight" else None

    def backends(self, capability: Capability | None, dtype) -> dict[str, BackendChoice]:
        """See `Mixer`."""
        call = KDACall(dtype=dtype, key_dim=self.head_dim, value_dim=self.head_dim)
        return {self.title: KDA.choose(capability, call)}


class ForgetGate(nnx.Module):
    """Projections to the inputs of the decays, and their parameters."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, shape: KDAConfig, *, dtype, rngs: nnx.Rngs):
        linear, D, W = (
            partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs),
            config.hidden_size,
            shape.width,
        )
        path = f"{shape.module}.forget_gate"
        if shape.low_rank:
            self.f_a_proj = linear(f"{path}.f_a_proj", D, shape.head_dim)
            self.f_b_proj = linear(f"{path}.f_b_proj", shape.head_dim, W)
        else:
            self.f_proj = linear(f"{path}.f_proj", D, W)
        # In float32, whatever the other weights' dtype: decays multiply over all tokens of a document.
        self.dt_bias = nnx.Param(jnp.ones(W, jnp.float32))
        rates = jax.random.uniform(rngs.params(), (shape.num_heads,), minval=1.0, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rates).reshape((1, 1, -1, 1) if shape.low_rank else -1))


class KimiDelta(nnx.Module):
    """Convolution of queries, keys and values, the delta rule, and a norm of each head's output, times its gate."""

    value_names = (names.DELTA_INPUT, names.DELTA_GATES, names.DELTA_GATES)
    """Names of `project`'s values, for checkpoint policies."""
    gated = True

    def __init__(self, config: DecoderConfig, kind: LayerKind, shape: KDAConfig, *, dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        linear, D = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs), config.hidden_size
        self.shape, path, W = shape, shape.module, shape.width
        self.q_proj, self.k_proj = linear(f"{path}.q_proj", D, W), linear(f"{path}.k_proj", D, W)
        self.v_proj, self.b_proj = linear(f"{path}.v_proj", D, W), linear(f"{path}.b_proj", D, shape.num_heads)
        of_dtype = options if shape.low_rank else options | {"dtype": jnp.float32}  # as published
        convolution = partial(Convolution, W, shape.conv_width, std=config.initializer_range, **of_dtype)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (convolution() for _ in range(3))
        self.forget_gate = ForgetGate(config, kind, shape, **options)
        if shape.low_rank:
            self.g_a_proj = linear(f"{path}.g_a_proj", D, shape.head_dim)
            self.g_b_proj = linear(f"{path}.g_b_proj", shape.head_dim, W)
        else:
            self.g_proj = linear(f"{path}.g_proj", D, W)
        self.o_norm = Norm(shape.head_dim, config.rms_norm_eps, dtype=dtype)
        self.o_proj = linear(f"{path}.o_proj", W, D)

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Project, mix the tokens of each document, and project back."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """Return (queries, keys and values in one array, inputs of the decays, logits of β), and the output's gate."""
        q, k, v, b, f, z = project_together(self.inputs_of_norm, normed, context)
        if self.shape.low_rank:
            f, z = self.forget_gate.f_b_proj(f, context), self.g_b_proj(z, context)
        named = zip((jnp.concatenate([q, k, v], axis=-1), f, b), self.value_names, strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named), checkpoint_name(z, names.OUTPUT_GATE)

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T N H"]:
        """Convolve, and apply the delta rule within the context."""
        gate = self.forget_gate
        weights = KDAWeights(
            convolution=jnp.concatenate([conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]),
            A_log=gate.A_log[...].reshape(-1),
            dt_bias=gate.dt_bias[...],
        )
        return context.recur(kda_recurrence(weights, self.shape.heads, self.shape.least), *values)

    def output(self, attended: Array, gate: Array, context: LayerContext) -> Branch:
        """Norm the rule's output, multiply it with its gate's sigmoid, in float32, and project it back."""
        heads = *gate.shape[:2], self.shape.num_heads, self.shape.head_dim
        y, gate = (x.reshape(heads).astype(jnp.float32) for x in (attended, gate))
        normed = rms_norm(y, self.o_norm.weight[...].astype(jnp.float32), self.o_norm.eps)
        flat = (normed * jax.nn.sigmoid(gate)).astype(attended.dtype).reshape(*heads[:2], -1)
        return Branch(lambda x: self.o_proj.add_to(x, flat, context))

    @property
    def inputs_of_norm(self) -> list[Linear]:
        """Return the linear layers that read the layer's norm."""
        of_gates = (
            (self.forget_gate.f_a_proj, self.g_a_proj)
            if self.shape.low_rank
            else (self.forget_gate.f_proj, self.g_proj)
        )
        return [self.q_proj, self.k_proj, self.v_proj, self.b_proj, *of_gates]

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [linear.projection for linear in self.inputs_of_norm]


_GATES = (
    *(f"forget_gate.{name}" for name in ("f_a_proj", "f_b_proj", "f_proj")),
    "b_proj",
    "g_a_proj",
    "g_b_proj",
    "g_proj",
)
LINEARS = tuple(f"{KDAConfig.module}.{name}" for name in _GATES)
"""Linear layers that attention has not."""
