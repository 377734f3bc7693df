"""SwiGLU between adapters, whose products are formed where the gate and its gradient are: in no pass of their own."""

from functools import partial
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jaxglue.ops.backend import compute_capability, triton_capability, why_not_triton
from jaxglue.ops.lora import expansion_gradients, lora_expand, lora_shrink

__all__ = ["Matrices", "SwigluBackend", "lora_swiglu", "reference_swiglu"]

Matrices = tuple[Float[Array, "F R"], Float[Array, "F R"], Float[Array, "R F"]]
"""float32: the second matrices of gate's and up's adapters, times their scale, and the first one of down's."""

_WIDEST_RANK = 32


class SwigluBackend(Protocol):
    """A forward and backward pass over rows. Hashable."""

    def forward(self, gate, up, hidden, matrices: Matrices) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
        """See `lora_swiglu`."""

    def backward(self, gate, up, hidden, matrices: Matrices, dout, dranks) -> tuple[Array, Array, Array]:
        """Gradients to gate and up in their dtype, and to down in float32."""


def lora_swiglu(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], hidden: Float[Array, "*B ranks"], matrices: Matrices
) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """(y, y·downᵀ) of y = silu(gate + h₁·B₁ᵀ)·(up + h₂·B₂ᵀ), where hidden is h₁ and h₂ side by side.

    On NVIDIA GPUs one kernel each way reads and writes every wide array once. The gradients to matrices are float32.

    Args:
        gate, up: the projections without their adapters.
        hidden: the input projected to the ranks of both.
        matrices: B₁, B₂ and down, of one rank.
    """
    ranks = {*(matrix.shape[1] for matrix in matrices[:2]), matrices[2].shape[0]}
    if len(ranks) != 1 or hidden.shape[-1] != 2 * min(ranks):
        got = f"ranks {', '.join(map(str, sorted(ranks)))} and {hidden.shape[-1]} columns"
        raise ValueError(f"three adapters must have one rank R, and hidden 2R columns, got {got}")
    backend = _backend(gate.dtype, min(ranks))
    if backend is None:
        return reference_swiglu(gate, up, hidden, matrices)
    rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up, hidden))
    out, low = _fused(backend, *rows, matrices)
    return out.reshape(gate.shape), low.reshape(*gate.shape[:-1], -1)


def _backend(dtype, rank: int) -> SwigluBackend | None:
    """Imported here, for only GPU installations have what the kernels need."""
    capability = compute_capability()
    if capability is None or rank > _WIDEST_RANK or why_not_triton(dtype, capability):
        return None
    from jaxglue.ops.lora_swiglu.triton import TritonSwiglu

    return TritonSwiglu(compute_capability=triton_capability(capability))


def reference_swiglu(gate, up, hidden, matrices: Matrices) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """`lora_swiglu` by XLA, which differentiates it."""
    *second, down = matrices
    gate_adapter, up_adapter = lora_expand(hidden, second)
    out = jax.nn.silu(gate + gate_adapter) * (up + up_adapter)
    return out, lora_shrink(out, down)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(backend: SwigluBackend, gate, up, hidden, matrices: Matrices):
    return backend.forward(gate, up, hidden, matrices)


def _forward(backend, *arguments):
    return backend.forward(*arguments), arguments


def _backward(backend, arguments, cotangents):
    _, _, hidden, (*second, _) = arguments
    dgate, dup, ddown = backend.backward(*arguments, *cotangents)
    dhidden, dsecond = expansion_gradients(hidden, second, (dgate, dup))
    return dgate, dup, dhidden, (*dsecond, ddown)


_fused.defvjp(_forward, _backward)
