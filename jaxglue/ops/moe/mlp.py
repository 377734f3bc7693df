"""The experts' feed-forward: rows to experts, two grouped matmuls around a gated activation, and back to tokens."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.moe.activation import Activation, ActivationSpec, activate, fused_activation
from jaxglue.ops.moe.exchange import combine, dispatch, weighted_bias
from jaxglue.ops.moe.fused import Adapter, GroupedSpec, fused_grouped_matmul
from jaxglue.ops.moe.grouped import check_operands, fused_backend, grouped_matmul
from jaxglue.ops.moe.routing import Routing
from jaxglue.ops.quant.mxfp4 import MXFP4

if TYPE_CHECKING:
    from jaxglue.ops.moe.triton import TritonBackend

Pair = tuple[Float[Array, "E R in"], Float[Array, "E out R"]]


@partial(jax.tree_util.register_dataclass, data_fields=["gate_up", "down"], meta_fields=["scale"])
@dataclass(frozen=True, kw_only=True)
class ExpertLora:
    """Low-rank adapters of the experts, of rank R each: y += scale · (x·Aᵀ)·Bᵀ."""

    gate_up: Pair | None = None
    """A [E, R, D] and B [E, 2F, R]."""
    down: Pair | None = None
    """A [E, R, F] and B [E, D, R]."""
    scale: float = 1.0


def moe_mlp(
    x: Float[Array, "M D"],
    routing: Routing,
    gate_up: Float[Array, "E D 2F"] | MXFP4,
    down: Float[Array, "E F D"] | MXFP4,
    *,
    activation: Activation = "swiglu",
    gate_up_bias: Float[Array, "E 2F"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    transpose_rhs: bool = False,
    lora: ExpertLora | None = None,
    backend: str = "auto",
) -> Float[Array, "M D"]:
    """Σ over a token's experts of weight · down(activation(gate_up(x))), in x's dtype.

    The weight multiplies what goes into `down`: its gradient then needs no output of `down` kept or computed again.

    Args:
        x: tokens.
        routing: from `route` for the same M tokens.
        gate_up, down: the experts' matrices; [E, 2F, D] and [E, D, F] with `transpose_rhs`, the layout of Qwen3-MoE
            and of every `MXFP4` checkpoint.
        activation: `swiglu`, silu(gate)·up, the gate in the first half of 2F; or `gpt_oss`, the clamped one, gate and
            up alternating.
        gate_up_bias, down_bias: of each expert.
        transpose_rhs: whether the matrices are stored [out, in].
        lora: adapters of the experts.
        backend: as in `grouped_matmul`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, or a named backend that cannot serve.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}, got {activation!r}")
    if x.shape[0] != routing.expert_ids.shape[0]:
        raise ValueError(f"routing is for {routing.expert_ids.shape[0]} tokens, but x has {x.shape[0]}")
    lora = lora or ExpertLora()
    adapters = _scaled(lora.gate_up, lora.scale), _scaled(lora.down, lora.scale)
    biases, fused = (gate_up_bias, down_bias), fused_backend(x.dtype, backend)
    if fused is None:
        return _reference_mlp(x, routing, (gate_up, down), biases, adapters, activation, transpose_rhs)
    return _fused_mlp(fused, x, routing, (gate_up, down), biases, adapters, activation, transpose_rhs)


def _reference_mlp(x, routing: Routing, matrices, biases, adapters, activation: Activation, transpose_rhs: bool):
    matmul = partial(grouped_matmul, group_sizes=routing.groups, transpose_rhs=transpose_rhs, backend="reference")
    projected = matmul(dispatch(x, routing), matrices[0], bias=biases[0], adapter=adapters[0])
    projected = checkpoint_name(projected, names.EXPERT_GATE_UP)
    hidden = (activate(projected, activation) * routing.row_weights[:, None]).astype(projected.dtype)
    out = combine(matmul(hidden, matrices[1], adapter=adapters[1]), routing)
    if biases[1] is None:
        return out
    return (out + weighted_bias(routing.weights, biases[1], routing.expert_ids)).astype(x.dtype)


def _fused_mlp(
    backend: "TritonBackend",
    x,
    routing: Routing,
    matrices,
    biases,
    adapters,
    activation: Activation,
    transpose_rhs: bool,
):
    """The matmuls gather their rows from the tokens as they load them: a copy of the rows would be k times as large."""
    spec = partial(GroupedSpec, backend=backend, transpose_rhs=transpose_rhs)
    groups, weights = routing.groups, None if biases[1] is None else routing.weights
    check_operands(x, matrices[0], groups, biases[0], adapters[0], transpose_rhs)
    projected = fused_grouped_matmul(
        spec(exchange="dispatch"), x, matrices[0], biases[0], adapters[0], groups, routing, None
    )
    projected = checkpoint_name(projected, names.EXPERT_GATE_UP)
    gated = ActivationSpec(backend=backend, activation=activation)
    hidden = fused_activation(gated, projected, routing.row_weights, groups)
    check_operands(hidden, matrices[1], groups, biases[1], adapters[1], transpose_rhs)
    return fused_grouped_matmul(
        spec(exchange="combine"), hidden, matrices[1], biases[1], adapters[1], groups, routing, weights
    )


def _scaled(pair: Pair | None, scale: float) -> Adapter | None:
    return None if pair is None else Adapter(pair[0], scale * pair[1])
