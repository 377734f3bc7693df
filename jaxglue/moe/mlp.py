"""The experts' feed-forward: rows to experts, two grouped matmuls around a gated activation, and back to tokens."""

from dataclasses import dataclass
from functools import partial
from typing import get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.memory import names
from jaxglue.moe.activation import Activation, ActivationBackend, ActivationSpec, activate, fused_activation
from jaxglue.moe.exchange import combine, dispatch
from jaxglue.moe.fused import Adapter
from jaxglue.moe.grouped import fused_backend, grouped_matmul
from jaxglue.moe.routing import Routing
from jaxglue.quant.mxfp4 import MXFP4

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
    matmul = partial(grouped_matmul, group_sizes=routing.groups, transpose_rhs=transpose_rhs, backend=backend)
    fused = fused_backend(x.dtype, backend)
    rows = dispatch(fused, x, routing)
    projected = matmul(rows, gate_up, bias=gate_up_bias, adapter=_scaled(lora.gate_up, lora.scale))
    projected = checkpoint_name(projected, names.EXPERT_GATE_UP)
    hidden = _weighted_activation(fused, projected, routing.row_weights, activation)
    out = matmul(hidden, down, adapter=_scaled(lora.down, lora.scale))
    return combine(fused, out, None if down_bias is None else routing.weights, down_bias, routing)


def _weighted_activation(backend: ActivationBackend | None, projected, weights, activation: Activation):
    """activation(projected[s]) · weights[s] in projected's dtype."""
    if backend is not None:
        return fused_activation(ActivationSpec(backend=backend, activation=activation), projected, weights)
    return (activate(projected, activation) * weights[:, None]).astype(projected.dtype)


def _scaled(pair: Pair | None, scale: float) -> Adapter | None:
    return None if pair is None else Adapter(pair[0], scale * pair[1])
