"""Inputs of FP8 products: their e4m3 codes, and what adapters read instead."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.lora import shrink, shrink_gradient
from jaxglue.ops.norm_rope import coded_branch_norm


class CodedRows(NamedTuple):
    """Rows as they are, and as e4m3 codes times a float32 scale each; gradients belong to the former."""

    values: Float[Array, "*B n"]
    codes: Float[Array, "*B n"]
    scales: Float[Array, "*B 1"]

    def shrink(self, down: Float[Array, "ranks n"]) -> Float[Array, "*B ranks"]:
        """Compute rows·downᵀ from the values."""
        return shrink(self.values, down)

    def shrink_gradient(self, dhidden: Float[Array, "*B ranks"]) -> Float[Array, "ranks n"]:
        """Compute the gradient of `shrink` to its matrix, in float32."""
        return shrink_gradient(self.values, dhidden)


class NormedRows(NamedTuple):
    """A norm's output as codes alone: adapters read its input, and scale their few ranks.

    The gradient of `values` is by convention that to the norm's output.
    """

    values: Float[Array, "*B n"]
    """The norm's input."""
    codes: Float[Array, "*B n"]
    scales: Float[Array, "*B 1"]
    inverse_rms: Float[Array, "*B 1"]
    weight: Float[Array, " n"]

    def shrink(self, down: Float[Array, "ranks n"]) -> Float[Array, "*B ranks"]:
        """Compute rows·downᵀ."""
        x, matrix = self.values, (down * self.weight).astype(self.values.dtype)
        contract_last = (((x.ndim - 1,), (1,)), ((), ()))
        wide = jax.lax.dot_general(x, matrix, contract_last, preferred_element_type=jnp.float32)
        return (wide * self.inverse_rms).astype(x.dtype)

    def shrink_gradient(self, dhidden: Float[Array, "*B ranks"]) -> Float[Array, "ranks n"]:
        """Compute the gradient of `shrink` to its matrix, in float32."""
        scaled = (dhidden * self.inverse_rms).astype(dhidden.dtype)
        return shrink_gradient(self.values, scaled) * self.weight


Rows = CodedRows | NormedRows


def coded(x: Float[Array, "*B n"] | Rows) -> Rows:
    """Return rows with their codes, in a pass of its own where they have none."""
    return x if isinstance(x, Rows) else CodedRows(x, *encode(jax.lax.stop_gradient(x)))


def branch_norm_fp8(
    x: Float[Array, "*B n"], weight: Float[Array, " n"], eps: float
) -> tuple[Float[Array, "*B n"], NormedRows]:
    """Return a residual stream x and its `rms_norm` for FP8 products; see `branch_norm`."""
    stream, values, codes, scales, inverse_rms = coded_branch_norm(x, weight, eps)
    inverse_rms = checkpoint_name(inverse_rms, names.LORA_HIDDEN)  # kept, the pass is not run again for it
    return stream, NormedRows(values, codes, scales, inverse_rms, jax.lax.stop_gradient(weight).astype(jnp.float32))


def as_matrix(rows: Rows) -> Rows:
    """Return the rows with all leading axes joined."""
    return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array, rows)


def cotangent(rows: Rows, values: Float[Array, "*B n"]) -> Any:
    """Return the gradient of rows from that of their values."""
    none: Any = None
    return type(rows)(values, *(none for _ in rows[1:]))


def without_codes(rows: Rows) -> Any:
    """Return what gradients need of the rows."""
    none: Any = None
    return rows._replace(codes=none, scales=none)
