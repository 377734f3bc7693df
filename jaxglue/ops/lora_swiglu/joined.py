"""SwiGLU of an input whose projections to gate and up are one matmul, adapters' ranks included."""

from functools import partial
from typing import Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.lora.joined import down_gradients, join, project_joined, weight_gradients, with_ranks
from jaxglue.ops.lora_swiglu.vjp import Matrices

Pair = tuple[Array, ...]
"""A matrix of gate and one of up."""


class JoinedSwigluBackend(Protocol):
    """Kernels that read gate, up and the ranks of their adapters side by side in z; hashable."""

    def joined_forward(self, z, matrices: Matrices) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
        """See `lora_swiglu`."""

    def joined_backward(
        self, z, matrices: Matrices, dout, dranks
    ) -> tuple[Float[Array, "M width"], Float[Array, "M ranks"], Matrices]:
        """Return the gradients to z, without the ranks' columns, to the ranks, and to the matrices in float32."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def joined_lora_swiglu(
    backend: JoinedSwigluBackend, x: Float[Array, "M D"], weights: Pair, downs: Pair, matrices: Matrices
) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
    """Return `lora_swiglu` of x·Wᵀ and x·Aᵀ for `weights` W of gate and up, and A in `downs`."""
    return _forward(backend, x, weights, downs, matrices)[0]


def _forward(backend: JoinedSwigluBackend, x, weights, downs, matrices):
    joined = join(weights, downs, x.dtype)
    z = checkpoint_name(project_joined(x, joined), names.GATE)
    return backend.joined_forward(z, matrices), (x, joined, z, weights, downs, matrices)


def _backward(backend: JoinedSwigluBackend, residuals, cotangents):
    x, joined, z, weights, downs, matrices = residuals
    dz, dhidden, dmatrices = backend.joined_backward(z, matrices, *cotangents)
    dz = with_ranks(dz, dhidden, 2 * len(matrices[0]))
    return dz @ joined, weight_gradients(x, dz, weights), down_gradients(x, dhidden, downs), dmatrices


joined_lora_swiglu.defvjp(_forward, _backward)
