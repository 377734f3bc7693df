"""SwiGLU between LoRA adapters, whose products are formed inside its kernels and not in passes of their own."""

from functools import partial

from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.lora_swiglu.reference import reference_lora_swiglu
from jaxglue.ops.lora_swiglu.vjp import LoraSwigluBackend, Matrices, fused_lora_swiglu

__all__ = ["LORA_SWIGLU", "Matrices", "lora_swiglu"]

_check = partial(check_triton_rank, largest=32)


def _load(capability: Capability, dtype, rank: int) -> LoraSwigluBackend:
    from jaxglue.ops.lora_swiglu.triton import TritonLoraSwiglu

    return TritonLoraSwiglu.of(capability)


LORA_SWIGLU = Operation(
    name="SwiGLU between adapters",
    backends={"triton": Backend(check=_check, load=_load, advantage="every wide array is read and written once")},
)


def lora_swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    hidden: Float[Array, "*B ranks"],
    matrices: Matrices,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """Compute (y, y·downᵀ) of y = silu(gate + h₁·B₁ᵀ)·(up + h₂·B₂ᵀ), where hidden is h₁ and h₂ side by side.

    Args:
        gate, up: the projections without their adapters.
        hidden: the input projected to the ranks of both.
        matrices: B₁, B₂ and down, of one rank, in float32 as are their gradients.
        backend: `auto`, `reference` or `triton`; see `LORA_SWIGLU.choose`.

    Raises:
        ValueError: ranks that do not fit, or a named backend that cannot serve.
    """
    ranks = {*(matrix.shape[1] for matrix in matrices[:2]), matrices[2].shape[0]}
    if len(ranks) != 1 or hidden.shape[-1] != 2 * min(ranks):
        got = f"ranks {', '.join(map(str, sorted(ranks)))} and {hidden.shape[-1]} columns"
        raise ValueError(f"three adapters must have one rank R, and hidden 2R columns, got {got}")
    kernels = LORA_SWIGLU.load(gate.dtype, min(ranks), backend=backend)
    if kernels is None:
        return reference_lora_swiglu(gate, up, hidden, matrices)
    rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up, hidden))
    out, low = fused_lora_swiglu(kernels, *rows, matrices)
    return out.reshape(gate.shape), low.reshape(*gate.shape[:-1], -1)
