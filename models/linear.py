"""Linear layers and their adapters."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.file_param import on_device
from jaxglue.ops.choices import Storage
from jaxglue.ops.projection import LowRankAdapter, Projection, adapted_projection
from jaxglue.ops.projection.dora import row_norms
from jaxglue.ops.quant.formats import FORMATS, quantize_matrix
from jaxglue.ops.residual_norm import Normed


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
        self.storage = quantize
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
            self.lora_magnitude_vector = nnx.LoRAParam(row_norms(on_device(self.weight.get_value())))
        self.lora_scale, self.lora_dropout = scale, dropout
        self.dropout_salt = zlib.crc32(name.encode())

    @property
    def trains_in_fp8(self) -> bool:
        """Return whether the weight trains, rounded to e4m3 for each product."""
        return FORMATS[self.storage].fp8 and FORMATS[self.storage].trains

    @property
    def projection(self) -> Projection:
        """Return the parameters for `adapted_projection`."""
        bias = None if self.bias is None else self.bias[...]
        weight = self.weight.get_value()
        return Projection(weight=weight, bias=bias, adapter=self.adapter, trains_in_fp8=self.trains_in_fp8)

    @property
    def adapter(self) -> LowRankAdapter | None:
        """Return the adapter; None without."""
        if self.lora_A is None or self.lora_B is None:
            return None
        magnitude = None if self.lora_magnitude_vector is None else self.lora_magnitude_vector[...]
        return LowRankAdapter(
            A=self.lora_A[...],
            B=self.lora_B[...],
            magnitude=magnitude,
            scale=self.lora_scale,
            dropout=self.lora_dropout,
            salt=self.dropout_salt,
        )

    def __call__(self, x: Normed, context: LayerContext) -> Float[Array, "B T out"]:
        """Apply the projection and its adapter."""
        return adapted_projection(x, [self.projection], context)[0]

    def add_to(self, stream: Float[Array, "B T out"], x: Float[Array, "B T in"], context: LayerContext) -> Array:
        """Return the stream plus the projection of x, summed over the devices that split it."""
        return adapted_projection(x, [self.projection], context, stream=stream)[0]


def layer_linear(config: DecoderConfig, kind: LayerKind, name: str, *sizes: int, **options: Any) -> Linear:
    """Make a linear layer of a decoder layer in its storage; `name` is within the layer, `sizes` inputs and outputs."""
    quantize = "none" if name in kind.unquantized else config.quantize
    return Linear(*sizes, std=config.initializer_range, quantize=quantize, **options)


def project_together(linears: Sequence[Linear], x: Normed, context: LayerContext) -> list[Array]:
    """Apply several linear layers to one input."""
    return adapted_projection(x, [linear.projection for linear in linears], context)
