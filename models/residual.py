"""The residual stream of decoder layers: norms that read it, and outputs that are added to it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.context import LayerContext
from jaxglue.ops.norm_rope import LLAMA_NORM, NormStyle, norm, reference_norm
from jaxglue.ops.residual_norm import Normed, Reader, residual_norm


class Norm(nnx.Module):
    """Norm of a style over the last axis, in float32 internally, times a factor."""

    def __init__(self, size: int, eps: float, *, style: NormStyle = LLAMA_NORM, factor: float = 1.0, dtype):
        self.weight = nnx.Param(jnp.full(size, 1 - style.offset, dtype))
        if style.bias:
            self.bias = nnx.Param(jnp.zeros(size, dtype))
        self.eps, self.style, self.factor = eps, style, factor

    def __call__(self, x: Float[Array, "*B D"], *, exact: bool = False) -> Float[Array, "*B D"]:
        """Normalize x, in x's dtype; of a residual stream with further columns, the first ones.

        An exact norm is by kernels that treat a row by itself, where XLA's sums have an order by the number of rows.
        """
        first, normalize = x[..., : self.weight.shape[0]], norm if exact else reference_norm
        normed = normalize(first, self.weight[...], self.eps, self.style, self.bias_values)
        return normed if self.factor == 1.0 else (normed * self.factor).astype(x.dtype)

    def of(self, x: Float[Array, "*B D"], stream: Float[Array, "*B D"] | None = None) -> Float[Array, "*B D"]:
        """Return the norm of x in one pass, plus a residual stream if there is one."""
        return norm(x, self.weight[...], self.eps, self.style, self.bias_values, stream=stream)

    def fork(self, x: Float[Array, "B T D"], reader: Reader, context: LayerContext) -> tuple[Array, Normed]:
        """Return a residual stream x, and its norm in the form that its reader multiplies."""
        return residual_norm(x, self.weight[...], self.eps, self.style, reader, context, self.bias_values)

    @property
    def bias_values(self) -> Float[Array, " D"] | None:
        """Return the bias; None in styles without."""
        return self.bias[...] if self.style.bias else None


@dataclass(frozen=True)
class Branch:
    """Output of a part of a layer: `x + branch` adds it to the residual stream x, in one rounding where it can."""

    add_to: Callable[[Array], Array]
    """Return a residual stream plus the output."""
    norm: Norm | None = None
    """Norm of the output, before it is added."""
    factor: float = 1.0
    """Factor of the output, before it is added."""
    name: str | None = None
    """Name of the norm's input, for checkpoint policies: its gradient needs that, and so the branch's last product."""

    def __radd__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return x + factor · norm(output)."""
        if self.norm is None and self.factor == 1.0:
            return self.add_to(x)
        y = self.add_to(jnp.zeros_like(x))
        y = y if self.norm is None or self.name is None else checkpoint_name(y, self.name)
        if self.norm is not None and self.factor == 1.0:
            return self.norm.of(y, x)
        y = y if self.norm is None else self.norm(y)
        return x + (y * self.factor).astype(x.dtype)
