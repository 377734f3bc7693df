"""Gated short convolutions (LFM2, arXiv 2511.23404, 2.2), in place of attention in some layers of a family."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import CacheSizes, DecoderConfig, LayerKind, Mixer
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Parts
from jaxglue.models.linear import layer_linear
from jaxglue.models.residual import Branch
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, Capability
from jaxglue.ops.projection import Projection
from jaxglue.ops.recurrence import SlotStates
from jaxglue.ops.residual_norm import Normed
from jaxglue.ops.short_convolution import SHORT_CONVOLUTION, ShortConvolutionCall, short_convolution


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(Mixer):
    """Sizes of short convolutions."""

    title = "short convolutions"
    module = "conv"
    recurrent = True

    channels: int
    """The model's width D."""
    width: int
    """Tokens of a convolution."""
    bias: bool = False
    """The convolution and its projections have biases."""

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "ShortConv":
        """See `Mixer`."""
        return ShortConv(config, kind, self, dtype=dtype, rngs=rngs)

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        return 4 * self.channels**2

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return 1, self.channels

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> SlotStates:
        """See `Mixer`."""
        inputs = jax.ShapeDtypeStruct((self.width - 1, self.channels), sizes.activations)
        return SlotStates.empty(inputs, sizes.slots, sizes.device)

    def state_bytes(self, dtype) -> int:
        """See `Mixer`."""
        return (self.width - 1) * self.channels * jnp.dtype(dtype).itemsize

    def step_values(self, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See `Mixer`."""
        return (jax.ShapeDtypeStruct((3 * self.channels,), dtype),)

    @property
    def prefill_values(self) -> int:
        """See `Mixer`."""
        return 6 * self.channels

    def initial(self, name: str, key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Return values of a size that keeps that of the inputs, where a convolution's are asked for."""
        if not name.endswith(f"{self.module}.conv.weight"):
            return None
        return (jax.random.normal(key, spec.shape) * self.width**-0.5).astype(spec.dtype)

    def backends(self, capability: Capability | None, dtype) -> dict[str, BackendChoice]:
        """See `Mixer`."""
        call = ShortConvolutionCall(dtype=dtype, taps=self.width, bias=self.bias)
        return {self.title: SHORT_CONVOLUTION.choose(capability, call)}


class ChannelConvolution(nnx.Module):
    """Weights of a causal convolution of each channel, and biases."""

    def __init__(self, shape: ShortConvConfig, *, dtype, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (shape.channels, 1, shape.width), dtype)
        self.weight = nnx.Param(weight * shape.width**-0.5)
        self.bias = nnx.Param(jnp.zeros(shape.channels, dtype)) if shape.bias else None


class ShortConv(nnx.Module):
    """out(C · conv(B · x)) of three projections B, C and x of the input."""

    value_names = (names.DELTA_INPUT,)
    """Names of `project`'s values, for checkpoint policies."""
    gated = False  # its gate is one of these

    def __init__(self, config: DecoderConfig, kind: LayerKind, shape: ShortConvConfig, *, dtype, rngs: nnx.Rngs):
        linear, D = partial(layer_linear, config, kind, bias=shape.bias, dtype=dtype, rngs=rngs), shape.channels
        self.in_proj = linear("conv.in_proj", D, 3 * D)
        self.conv = ChannelConvolution(shape, dtype=dtype, rngs=rngs)
        self.out_proj = linear("conv.out_proj", D, D)

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Project, convolve within each document, and project back."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array], None]:
        """Return B, C and x, side by side [B, T, 3·D]."""
        return (checkpoint_name(self.in_proj(normed, context), names.DELTA_INPUT),), None

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T D"]:
        """Multiply, convolve and gate within the context."""
        bias = None if self.conv.bias is None else self.conv.bias[...]
        return context.recur(short_convolution(self.conv.weight[...], bias), *values)

    def output(self, attended: Array, gate: None, context: LayerContext) -> Branch:
        """Project the convolution's output back."""
        flat = attended.reshape(*attended.shape[:2], -1)
        return Branch(lambda x: self.out_proj.add_to(x, flat, context))

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [self.in_proj.projection]
