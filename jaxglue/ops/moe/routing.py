"""Routing: the experts and weights of each token, and the permutation that groups assignments by expert."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxglue.ops import names
from jaxglue.ops.moe.grouped import GroupMetadata

Order = Literal["softmax_topk", "topk_softmax"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert_ids", "weights", "permutation", "inverse", "groups"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class Routing:
    """k experts for each of M tokens. A pytree of static shapes; no assignment is dropped.

    Assignment a is choice a % k of token a // k; rows are the assignments in the order of their experts.
    """

    expert_ids: Int[Array, "M k"]
    """Experts of each token, the best first."""
    weights: Float[Array, "M k"]
    """Weight of each expert's output, float32, differentiable with respect to the router's logits."""
    permutation: Int[Array, " M*k"]
    """Assignment of each row."""
    inverse: Int[Array, "M k"]
    """Row of each assignment."""
    groups: GroupMetadata
    """The rows of each expert."""

    @property
    def group_sizes(self) -> Int[Array, " E"]:
        """Return the number of assignments of each expert."""
        return self.groups.sizes

    @property
    def tokens(self) -> Int[Array, " M*k"]:
        """Return the token of each row."""
        return self.permutation // self.expert_ids.shape[1]

    @property
    def row_weights(self) -> Float[Array, " M*k"]:
        """Return the weight of each row."""
        return _to_rows(self.weights, self.permutation, self.inverse)

    @property
    def dense_weights(self) -> Float[Array, "M E"]:
        """Return the weight of every expert for each token, zero for those not chosen."""
        served = jax.nn.one_hot(self.expert_ids, self.group_sizes.shape[0], dtype=jnp.float32)
        return (self.weights[:, :, None] * served).sum(1)


def route(
    router_logits: Float[Array, "M E"], k: int, *, order: Order = "softmax_topk", normalize: bool = False
) -> Routing:
    """Choose k of E experts for each of M tokens.

    Args:
        router_logits: any float dtype; computed in float32.
        k: experts for each token.
        order: `softmax_topk`, a softmax over all experts (Qwen3), or `topk_softmax`, one over the chosen (GPT-OSS).
        normalize: divide the chosen weights by their sum (Qwen3's `norm_topk_prob`); `topk_softmax` always sums to 1.

    Raises:
        ValueError: k is not between 1 and E, or the order is unknown.
    """
    E = router_logits.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k must be between 1 and the {E} experts, got {k}")
    weights, expert_ids = _choose(router_logits.astype(jnp.float32), k, order, normalize)
    return make_routing(expert_ids, weights, E)


def make_routing(
    expert_ids: Int[Array, "M k"], weights: Float[Array, "M k"], experts: int, *, row_tile: int | None = None
) -> Routing:
    """Compute the routing for chosen experts and weights by one stable sort.

    Args:
        expert_ids: experts of each token; `experts` for an assignment to leave out of every group.
        weights: their weights.
        experts: E.
        row_tile: see `GroupMetadata.of`.
    """
    assigned = expert_ids.reshape(-1)
    keys = assigned.astype(jnp.uint8 if experts < 256 else jnp.int32)  # the radix sort takes one pass per byte
    permutation = checkpoint_name(jnp.argsort(keys, stable=True).astype(jnp.int32), names.ROUTING)
    rows = jnp.arange(permutation.size, dtype=jnp.int32)
    inverse = jnp.zeros_like(rows).at[permutation].set(rows, unique_indices=True, mode="promise_in_bounds")
    bounds = jnp.searchsorted(assigned[permutation], jnp.arange(experts + 1), method="scan_unrolled")
    return Routing(
        expert_ids=expert_ids,
        weights=weights,
        permutation=permutation,
        inverse=inverse.reshape(expert_ids.shape),
        groups=GroupMetadata.of(jnp.diff(bounds), rows.size, row_tile=row_tile),
    )


def _choose(logits, k: int, order: Order, normalize: bool):
    if order == "topk_softmax":
        chosen, expert_ids = jax.lax.top_k(logits, k)
        return jax.nn.softmax(chosen, axis=-1), expert_ids
    if order == "softmax_topk":
        chosen, expert_ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
        return chosen / chosen.sum(-1, keepdims=True) if normalize else chosen, expert_ids
    raise ValueError(f"order must be softmax_topk or topk_softmax, got {order!r}")


@jax.custom_vjp
def _to_rows(values: Float[Array, "M k"], permutation, inverse) -> Float[Array, " M*k"]:
    """Return the value of each row's assignment. JAX's own transpose would be a scatter with atomics."""
    return values.reshape(-1)[permutation]


_to_rows.defvjp(lambda values, p, inverse: (_to_rows(values, p, inverse), inverse), lambda inv, d: (d[inv], None, None))
