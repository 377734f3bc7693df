"""The definition in XLA: every expert on every row, of which each row keeps its own. E times the work."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxglue.ops import names
from jaxglue.ops.moe.routing import GroupMetadata, Routing, combine, dispatch, weighted_bias
from jaxglue.ops.projection.served import are_served, merge_experts
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import Quantized

Activation = Literal["swiglu", "geglu", "gpt_oss", "relu2"]
GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0


class ExpertAdapter(NamedTuple):
    """Low-rank change of each group's matrix: y += (x·Aᵀ)·Bᵀ. A scale belongs into B."""

    A: Float[Array, "E R K"]
    B: Float[Array, "E N R"]
    used: Bool[Array, "S R"] | None = None
    """Ranks that each row uses; None where all use all."""

    def keep_used(self, low_rank: Float[Array, "S R"]) -> Float[Array, "S R"]:
        """Return rows at their ranks, or gradients to them, with zeros at ranks that they do not use."""
        return low_rank if self.used is None else jnp.where(self.used, low_rank, 0)


@partial(jax.tree_util.register_dataclass, data_fields=["gate_up", "down", "ranks"], meta_fields=["scales"])
@dataclass(frozen=True, kw_only=True)
class ExpertLora:
    """Adapters of the experts, of rank R each: y += scale · (x·Aᵀ)·Bᵀ."""

    gate_up: ExpertAdapter | None = None
    """A [E, R, D] and B [E, 2F, R]."""
    down: ExpertAdapter | None = None
    """A [E, R, F] and B [E, D, R]."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Scales of both adapters, whose ranks and alphas may differ."""
    ranks: Bool[Array, "M R"] | None = None
    """Ranks that each token uses, or [1, R] for all tokens; None where all use all."""

    def of_rows(self, routing: Routing) -> tuple[ExpertAdapter | None, ExpertAdapter | None]:
        """Return both adapters, without the scales, with the ranks that each row of the routing uses."""
        if self.ranks is None:
            return self.gate_up, self.down
        used = jnp.broadcast_to(self.ranks, (len(routing.expert_ids), self.ranks.shape[-1]))[routing.tokens]
        gate_up, down = (adapter and adapter._replace(used=used) for adapter in (self.gate_up, self.down))
        return gate_up, down


def scaled(adapter: ExpertAdapter | None, scale: float) -> ExpertAdapter | None:
    """Return an adapter with the scale in B."""
    return None if adapter is None else adapter._replace(B=scale * adapter.B)


def activate(projected: Float[Array, "S columns"], activation: Activation) -> Float[Array, "S F"]:
    """Compute the activation, of 2F columns gated, in float32.

    `swiglu` is silu(gate) · up with the gate in the first half, `geglu` gelu(gate) · up, in gelu's tanh form. `gpt_oss`
    alternates gate and up, clamps both, scales the gate's sigmoid by 1.702 and adds one to up (Hugging Face's
    `GptOssExperts`). `relu2` is max(up, 0)², without a gate, of F columns.
    """
    projected = projected.astype(jnp.float32)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(projected))
    if activation != "gpt_oss":
        gate, up = jnp.split(projected, 2, axis=-1)
        return (jax.nn.silu(gate) if activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
    gate = jnp.minimum(projected[:, ::2], GPT_OSS_LIMIT)
    up = jnp.clip(projected[:, 1::2], -GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return gate * jax.nn.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1.0)


def reference_grouped_matmul(
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | Quantized,
    groups: GroupMetadata,
    bias: Float[Array, "E N"] | None,
    adapter: ExpertAdapter | None,
    *,
    transpose_rhs: bool,
) -> Float[Array, "S N"]:
    """Compute `grouped_matmul`."""
    served = False
    if adapter is not None and are_served(rhs):
        served, fixed = True, jax.lax.stop_gradient(adapter)
        matrices = merge_experts(rhs, fixed.A, fixed.B, lhs.dtype, backend="reference")
    else:
        matrices = dequantize(rhs, lhs.dtype, backend="reference") if isinstance(rhs, Quantized) else rhs
    out = _matmul(lhs, matrices.mT if transpose_rhs else matrices, groups, bias)
    if adapter is None:
        return out
    low_rank = adapter.keep_used(_matmul(jax.lax.stop_gradient(lhs) if served else lhs, adapter.A.mT, groups, None))
    beside = _matmul(low_rank, adapter.B.mT, groups, None)
    # Rounding has no slope: the adapter is within the matrices, and has the gradients of a product beside theirs.
    return out + (beside - jax.lax.stop_gradient(beside) if served else beside)


def _matmul(lhs, rhs, groups: GroupMetadata, bias) -> Float[Array, "S N"]:
    group = groups.row_group(lhs.shape[0])[:, None, None]
    every = jnp.einsum("sk,ekn->sen", lhs, rhs.astype(lhs.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        every += bias.astype(jnp.float32)
    return jnp.take_along_axis(every, group, axis=1)[:, 0].astype(lhs.dtype)


def reference_mlp(
    x: Float[Array, "M D"],
    routing: Routing,
    matrices,
    biases,
    adapters,
    *,
    activation: Activation,
    transpose_rhs: bool,
) -> Float[Array, "M D"]:
    """Compute `moe_mlp` from (gate_up, down) of matrices, biases and adapters."""
    matmul = partial(reference_grouped_matmul, groups=routing.groups, transpose_rhs=transpose_rhs)
    projected = matmul(dispatch(x, routing), matrices[0], bias=biases[0], adapter=adapters[0])
    projected = checkpoint_name(projected, names.EXPERT_GATE_UP)
    hidden = (activate(projected, activation) * routing.row_weights[:, None]).astype(projected.dtype)
    out = combine(matmul(hidden, matrices[1], bias=None, adapter=adapters[1]), routing)
    if biases[1] is None:
        return out
    return (out + weighted_bias(routing.weights, biases[1], routing.expert_ids)).astype(x.dtype)
