"""Linear layers and their adapters: several on one input, sums onto the residual stream, quantized and FP8 weights."""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.context import LayerContext
from jaxglue.models.dora import rescale, row_norms
from jaxglue.ops import names
from jaxglue.ops.choices import Storage
from jaxglue.ops.collectives import axis_size, reduce_from
from jaxglue.ops.projection.fp8 import project_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, add_adapted_fp8, project_adapted_fp8
from jaxglue.ops.projection.lora import lora_add, lora_expand, lora_shrink
from jaxglue.ops.quant import project_quantized
from jaxglue.ops.quant.formats import Quantized, quantize_matrix
from jaxglue.ops.quant.fp8 import is_multiplied_in_fp8

Normed = Float[Array, "B T D"] | FP8Rows
"""A norm's output, as e4m3 codes where FP8 products read it."""


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
        if self.bias is None and (up := self.scaled_b) is not None and have_fp8_adapters((self,), context):
            return add_adapted_fp8(x, inputs, self.weight.get_value(), first_matrices((self,)), up)
        return add_projection(x, self, *project_base((self,), inputs, context))

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
    if len(linears) > 1 and have_fp8_adapters(linears, context):
        weights = [linear.weight.get_value() for linear in linears]
        ups = [up for linear in linears if (up := linear.scaled_b) is not None]
        return _add_adapters(linears, project_adapted_fp8(x, weights, first_matrices(linears), ups), None)
    assert not isinstance(x, FP8Rows)
    return _add_adapters(linears, *project_base(linears, x, context))


def have_fp8_adapters(linears: Sequence[Linear], context: LayerContext) -> bool:
    """Return whether all are frozen FP8 weights with adapters and nothing intervenes between the two."""
    return all(
        _is_in_fp8(linear, context)
        and not linear.trains_in_fp8
        and linear.lora_A is not None
        and linear.lora_magnitude_vector is None
        and (context.dropout_key is None or linear.lora_dropout == 0.0)
        for linear in linears
    )


def first_matrices(linears: Sequence[Linear]) -> Float[Array, "ranks in"]:
    """Return the adapters' first matrices, one below the other."""
    return jnp.concatenate([linear.lora_A[...] for linear in linears if linear.lora_A is not None])


def _add_adapters(linears: Sequence[Linear], outputs: list[Array], hidden: Array | None) -> list[Array]:
    """Add adapters' products and biases to the outputs of `project_base`."""
    adapters = {index: linear.scaled_b for index, linear in enumerate(linears) if linear.scaled_b is not None}
    if hidden is not None:
        for index, product in zip(adapters, lora_expand(hidden, list(adapters.values())), strict=True):
            outputs[index] = rescale(linears[index], outputs[index] + product)
    biases = [linear.bias for linear in linears]
    return [y if bias is None else y + bias[...].astype(y.dtype) for y, bias in zip(outputs, biases, strict=True)]


def add_projection(x, linear: Linear, outputs: list[Array], hidden: Array | None) -> Float[Array, "B T out"]:
    """Return x plus an output of `project_base` with its adapter and bias."""
    matrix, intervening = linear.scaled_b, (linear.bias, linear.lora_magnitude_vector)
    alone = all(value is None for value in intervening) and axis_size("tensor") == 1 and not _may_be_in_fp8(linear)
    if hidden is None or matrix is None or not alone:
        return x + reduce_from(_add_adapters((linear,), outputs, hidden)[0])
    return lora_add(x, outputs[0], hidden, matrix)


def project_base(linears: Sequence[Linear], x, context: LayerContext) -> tuple[list[Array], Array | None]:
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


def plain_matrices(
    linears: Sequence[Linear], context: LayerContext
) -> tuple[tuple[Array, ...], tuple[Array, ...]] | None:
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
