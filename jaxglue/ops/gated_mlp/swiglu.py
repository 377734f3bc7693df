"""SwiGLU or GeGLU between LoRA adapters, whose products are formed inside its kernels, not in passes of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.projection.lora import lora_expand, lora_expand_gradients, lora_shrink

Matrices = tuple[Float[Array, "F R"], Float[Array, "F R"], Float[Array, "R F"]]
"""float32: the second matrices of gate's and up's adapters, times their scale, and the first one of down's."""
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activations of gates, by name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ScaledProducts:
    """gate and up, e4m3 or wider, without their scales, which are float32. A pytree."""

    gate: Float[Array, "M F"]
    up: Float[Array, "M F"]
    row_scales: Float[Array, "M 1"]
    gate_scales: Float[Array, " F"]
    up_scales: Float[Array, " F"]

    @property
    def scales(self) -> tuple[Array, Array, Array]:
        """Return the scales of rows, of gate's columns and of up's."""
        return self.row_scales, self.gate_scales, self.up_scales


class LoraSwigluBackend(Protocol):
    """Kernels of a forward and backward pass over rows; hashable."""

    def forward(
        self, gate, up, low_rank, matrices: Matrices, activation: Activation
    ) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
        """See `lora_swiglu`."""

    def backward(
        self, gate, up, low_rank, matrices: Matrices, dout, dlow_rank, activation: Activation
    ) -> tuple[Array, Array, Array]:
        """Return the gradients to gate and up in their dtype, and to down in float32."""

    @property
    def part(self) -> int:
        """Return the columns in a part of y·downᵀ, whose parts `forward` adds one after another."""


@dataclass(frozen=True, kw_only=True)
class SwigluCall:
    """Meaning of an activation between adapters."""

    dtype: jnp.dtype
    rank: int
    """Of each adapter."""
    activation: Activation = "silu"
    exact: bool = False
    """A row's sums have one order among however many rows it is."""


def _check(capability: Capability | None, call: SwigluCall) -> None:
    check_triton_rank(capability, call.dtype, call.rank, largest=32)


def _load(capability: Capability, call: SwigluCall) -> LoraSwigluBackend:
    from jaxglue.ops.gated_mlp.triton import TritonLoraSwiglu

    return TritonLoraSwiglu.of(capability, in_order=call.exact)


LORA_SWIGLU = Operation(
    name="SwiGLU between adapters",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="every wide array is read and written once",
            reads={SwigluCall: {"dtype": None, "rank": None, "activation": ("silu", "gelu_tanh"), "exact": None}},
        )
    },
)


def lora_swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    low_rank: Float[Array, "*B ranks"],
    matrices: Matrices,
    *,
    activation: Activation = "silu",
    exact: bool = False,
    backend: str = "auto",
) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """Compute (y, y·downᵀ) of y = activation(gate + h₁·B₁ᵀ)·(up + h₂·B₂ᵀ), where low_rank is h₁ and h₂ side by side.

    Args:
        gate, up: the projections without their adapters.
        low_rank: the input projected to the ranks of both.
        matrices: B₁, B₂ and down, of one rank, in float32 as are their gradients.
        activation: of the gate.
        exact: sum in an order that no number of rows changes.
        backend: `auto`, `reference` or `triton`; see `LORA_SWIGLU.choose`.

    Raises:
        ValueError: ranks that do not fit, or a named backend that cannot serve.
    """
    ranks = {*(matrix.shape[1] for matrix in matrices[:2]), matrices[2].shape[0]}
    if len(ranks) != 1 or low_rank.shape[-1] != 2 * min(ranks):
        got = f"ranks {', '.join(map(str, sorted(ranks)))} and {low_rank.shape[-1]} columns"
        raise ValueError(f"three adapters must have one rank R, and low_rank 2R columns, got {got}")
    call = SwigluCall(dtype=gate.dtype, rank=min(ranks), activation=activation, exact=exact)
    kernels = LORA_SWIGLU.load(call, backend=backend)
    if kernels is None:
        return reference_lora_swiglu(gate, up, low_rank, matrices, activation, exact)
    rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up, low_rank))
    out, down_low_rank = _fused(kernels, activation, *rows, matrices)
    return out.reshape(gate.shape), down_low_rank.reshape(*gate.shape[:-1], -1)


def part_in_order(dtype, rank: int, activation: Activation) -> int | None:
    """Return the columns in a part of y·downᵀ of `lora_swiglu` with `exact`, whose parts are added one after another.

    None without a kernel.
    """
    kernels = LORA_SWIGLU.load(SwigluCall(dtype=dtype, rank=rank, activation=activation, exact=True))
    return None if kernels is None else kernels.part


def reference_lora_swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    low_rank: Float[Array, "*B ranks"],
    matrices: Matrices,
    activation: Activation = "silu",
    exact: bool = False,
) -> tuple[Float[Array, "*B F"], Float[Array, "*B R"]]:
    """Compute `lora_swiglu` by XLA, which differentiates it."""
    *second, down = matrices
    gate_adapter, up_adapter = lora_expand(low_rank, second)
    out = ACTIVATIONS[activation](gate + gate_adapter) * (up + up_adapter)
    return out, lora_shrink(out, down, exact)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    backend: LoraSwigluBackend,
    activation: Activation,
    gate: Float[Array, "M F"],
    up: Float[Array, "M F"],
    low_rank: Float[Array, "M ranks"],
    matrices: Matrices,
) -> tuple[Float[Array, "M F"], Float[Array, "M R"]]:
    return backend.forward(gate, up, low_rank, matrices, activation)


def _forward(backend, activation, *arguments):
    return backend.forward(*arguments, activation), arguments


def _backward(backend, activation, arguments, cotangents):
    _, _, low_rank, (*second, _) = arguments
    dgate, dup, ddown = backend.backward(*arguments, *cotangents, activation)
    dlow_rank, dsecond = lora_expand_gradients(low_rank, second, (dgate, dup))
    return dgate, dup, dlow_rank, (*dsecond, ddown)


_fused.defvjp(_forward, _backward)
