"""Expands quantized weights on the way into a matmul, several into one array where they share an input."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import compute_capability, triton_capability
from jaxglue.ops.quant.formats import Quantized, dequantize_matrix
from jaxglue.ops.quant.nf4 import NF4

if TYPE_CHECKING:
    from jaxglue.ops.quant.triton import TritonExpander


def expand(*weights: Quantized, dtype=jnp.bfloat16) -> Float[Array, "out in"]:
    """The values of weights of one width, one below the other, in `dtype`; the same bits from every backend.

    On NVIDIA GPUs our kernel writes each NF4 to its rows of the result; XLA's own takes several times as long.

    Raises:
        ValueError: weights of different widths.
    """
    if len({weight.shape[1] for weight in weights}) != 1:
        raise ValueError(f"weights to expand together must be [out, in] with one in, got {[w.shape for w in weights]}")
    expander = _expander()
    stored = [weight for weight in weights if isinstance(weight, NF4)]
    if expander is not None and len(stored) == len(weights):
        return expander.expand(stored, dtype)
    expanded = [dequantize_matrix(weight, dtype) for weight in weights]
    return expanded[0] if len(weights) == 1 else jnp.concatenate(expanded)


def _expander() -> "TritonExpander | None":
    """None for XLA; imported here, for only GPU installations have what it needs."""
    capability = compute_capability()
    if capability is None or capability < (8, 0) or find_spec("jax_triton") is None:
        return None
    from jaxglue.ops.quant.triton import TritonExpander

    return TritonExpander(compute_capability=triton_capability(capability))


@jax.custom_vjp
def project_quantized(x: Float[Array, "*B in"], weight: Quantized) -> Float[Array, "*B out"]:
    """x·Wᵀ in x's dtype. The gradient to x expands the weight again; the weight has none."""
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, expand(weight, dtype=x.dtype), contract_last, preferred_element_type=x.dtype)


project_quantized.defvjp(
    lambda x, weight: (project_quantized(x, weight), weight),
    lambda weight, dy: (dy @ expand(weight, dtype=dy.dtype), None),
)
