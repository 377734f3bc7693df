"""Routing: the experts and weights of each token, the permutation that groups assignments by expert, and its use.

Rows are the assignments of tokens to experts in the order of the experts; `dispatch` and `combine` move between tokens
and rows, each the transpose of the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxglue.ops import names

Order = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]


class Groups(NamedTuple):
    """Consecutive experts of which a token may choose some groups alone (DeepSeek-V2, arXiv 2405.04434, 2.2.2)."""

    total: int = 1
    kept: int = 1
    """Groups that a token's experts may come from."""


ONE_GROUP = Groups()
TopK = Callable[[Float[Array, "M E"], int], Sequence[Array]]
"""Returns the k largest scores of each row, and their places, of equal ones the first."""

ROW_TILES = (16, 192)
"""Fewest and most rows in a tile of the kernels."""
_LARGEST_GATHERED = 128
"""Most rows in a tile of gathered rows."""


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["rows"])
@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """A partition of the rows into tiles of one group each; a group's last tile may be partly empty."""

    table: Int[Array, "4 tiles"]
    """Group of each tile, the group's first row, its end, and its first tile; the group of an unused tile is E."""
    rows: int
    """Rows in a tile."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], offsets: Int[Array, " E+1"], total: int, rows: int) -> "RowTiles":
        """Tabulate the tiles: ⌈n / rows⌉ for a group of n rows, so at most total // rows + E for any sizes."""
        tile = jnp.arange(total // rows + min(sizes.shape[0], total), dtype=jnp.int32)
        ends = jnp.cumsum((sizes + rows - 1) // rows)
        group = (tile[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
        table = jnp.stack([group, offsets[group], offsets[group + 1], jnp.pad(ends, (1, 0))[group]])
        return cls(table=table.astype(jnp.int32), rows=rows)


@partial(jax.tree_util.register_dataclass, data_fields=["sizes", "offsets", "tiles", "gathered_tiles"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class GroupMetadata:
    """Consecutive rows in E groups. A pytree on the device, computed once and shared by every matmul."""

    sizes: Int[Array, " E"]
    """Rows of each group, which may be zero."""
    offsets: Int[Array, " E+1"]
    """First row of each group, then the number of rows."""
    tiles: RowTiles
    gathered_tiles: RowTiles
    """Tiles for kernels that gather rows as they load them."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], rows: int, *, row_tile: int | None = None) -> "GroupMetadata":
        """Compute the metadata of `rows` rows.

        Args:
            sizes: rows of each group.
            rows: sum of the sizes.
            row_tile: rows in a tile, a power of two or 192; by default the size of the mean group, within `ROW_TILES`.

        Raises:
            ValueError: sizes on the host (a NumPy array or a sequence) that do not sum to `rows`. Sizes on the device
                are not checked; results for rows beyond their sum are unspecified.
        """
        if not isinstance(sizes, jax.Array):
            _check_sizes(np.asarray(sizes), rows)
        sizes = jnp.asarray(sizes, jnp.int32)
        row_tile = row_tile or fitting_row_tile(rows // sizes.shape[0])
        offsets = jnp.pad(jnp.cumsum(sizes), (1, 0)).astype(jnp.int32)
        tiles = RowTiles.of(sizes, offsets, rows, row_tile)
        gathered = tiles if row_tile <= _LARGEST_GATHERED else RowTiles.of(sizes, offsets, rows, _LARGEST_GATHERED)
        return cls(sizes=sizes, offsets=offsets, tiles=tiles, gathered_tiles=gathered)

    def row_group(self, rows: int) -> Int[Array, " rows"]:
        """Return the group of each row."""
        return jnp.repeat(jnp.arange(self.sizes.shape[0]), self.sizes, total_repeat_length=rows)


def fitting_row_tile(mean: int) -> int:
    """Return the rows of a tile for groups of this mean size."""
    smallest, largest = ROW_TILES
    return largest if mean >= largest else max(smallest, 1 << mean.bit_length() >> 1)


def few_rows_tile(mean: int) -> int:
    """Return the rows of a tile for groups of this small mean size: twice as many, since each tile reads a matrix.

    They are at most 64, as many as kernels hold beside the values that they decode.
    """
    return min(max(ROW_TILES[0], 1 << (2 * mean - 1).bit_length()), 64)


def _check_sizes(sizes: np.ndarray, rows: int) -> None:
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ValueError(f"group_sizes must be a vector of sizes of at least 0, got {sizes.tolist()}")
    if sizes.sum() != rows:
        raise ValueError(f"group_sizes must sum to the {rows} rows of lhs, got a sum of {sizes.sum()}")


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


def sorted_route(
    router_logits: Float[Array, "M E"],
    k: int,
    *,
    order: Order,
    normalize: bool,
    correction: Float[Array, " E"] | None,
    groups: Groups,
    scale: float,
    exact: bool = False,
    row_tile: int | None = None,
    top_k: TopK = jax.lax.top_k,
) -> Routing:
    """Choose the experts with the best scores; see `jaxglue.ops.moe.route`, and `GroupMetadata.of` for the tile."""
    E = router_logits.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k must be between 1 and the {E} experts, got {k}")
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
    if E % groups.total or not 1 <= groups.kept <= groups.total or k > groups.kept * (E // groups.total):
        raise ValueError(f"{groups.kept} of {groups.total} groups must divide {E} experts and leave {k} of them")
    sums = _IN_ONE_ORDER if exact else _BY_XLA
    logits = router_logits.astype(jnp.float32)
    weights, expert_ids = _choose(logits, k, order, normalize, correction, groups, top_k, sums)
    return make_routing(expert_ids, weights if scale == 1.0 else weights * scale, E, row_tile=row_tile)


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


def _sum_by_halves(values: Float[Array, "M n"]) -> Float[Array, "M 1"]:
    """Sum each row in one order, where XLA's reductions of few rows and many have orders of their own."""
    n = values.shape[-1]
    values = jnp.pad(values, ((0, 0), (0, (1 << (n - 1).bit_length()) - n)))
    while (half := values.shape[-1] // 2) > 0:
        values = values[:, :half] + values[:, half:]
    return values


def _softmax_by_halves(logits: Float[Array, "M n"]) -> Float[Array, "M n"]:
    exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return exponentials / _sum_by_halves(exponentials)


class _Sums(NamedTuple):
    """Sums over a token's scores, in some order."""

    total: Callable[[Float[Array, "M n"]], Float[Array, "M 1"]]
    softmax: Callable[[Float[Array, "M n"]], Float[Array, "M n"]]


_BY_XLA = _Sums(partial(jnp.sum, axis=-1, keepdims=True), partial(jax.nn.softmax, axis=-1))
_IN_ONE_ORDER = _Sums(_sum_by_halves, _softmax_by_halves)


def _choose(
    logits, k: int, order: Order, normalize: bool, correction, groups: Groups, top_k: TopK, sums: _Sums
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    if order == "topk_softmax":
        assert groups.kept == groups.total, "its scores are known after the choice"
        chosen, expert_ids = top_k(logits, k)
        return sums.softmax(chosen), expert_ids
    sigmoid = order == "sigmoid_topk"
    scores = jax.nn.sigmoid(logits) if sigmoid else sums.softmax(logits)
    if not sigmoid and groups.kept == groups.total and correction is None:
        chosen, expert_ids = top_k(scores, k)
    else:
        preferred = jax.lax.stop_gradient(scores if correction is None else scores + correction)
        if groups.kept < groups.total:
            preferred = _within_groups(preferred, groups, best=2 if sigmoid else 1)
        expert_ids = top_k(preferred, k)[1]
        chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
    if normalize:
        chosen = chosen / (sums.total(chosen) + (_SMALLEST_SUM if sigmoid else 0.0))
    return chosen, expert_ids


_SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoids, which may all be zero."""


def _within_groups(scores: Float[Array, "M E"], groups: Groups, *, best: int) -> Float[Array, "M E"]:
    """Return the scores of the groups with the largest sums of their `best` scores, and -inf for the others."""
    grouped = scores.reshape(len(scores), groups.total, -1)
    sums = jax.lax.top_k(grouped, best)[0].sum(-1)
    chosen = jax.lax.top_k(sums, groups.kept)[1]
    allowed = (chosen[:, :, None] == jnp.arange(groups.total)).any(1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


@jax.custom_vjp
def _to_rows(values: Float[Array, "M k"], permutation, inverse) -> Float[Array, " M*k"]:
    """Return the value of each row's assignment. JAX's own transpose would be a scatter with atomics."""
    return values.reshape(-1)[permutation]


_to_rows.defvjp(lambda values, p, inverse: (_to_rows(values, p, inverse), inverse), lambda inv, d: (d[inv], None, None))


@jax.custom_vjp
def dispatch(x: Float[Array, "M D"], routing: Routing) -> Float[Array, "M*k D"]:
    """Copy each token to its rows. JAX's own transpose would be a scatter with atomics."""
    return x.at[routing.tokens].get(mode="promise_in_bounds")


@jax.custom_vjp
def combine(rows: Float[Array, "M*k D"], routing: Routing) -> Float[Array, "M D"]:
    """Sum each token's rows in float32; an index past the last row adds zero."""
    return rows.at[routing.inverse].get(mode="fill", fill_value=0).astype(jnp.float32).sum(1).astype(rows.dtype)


dispatch.defvjp(lambda x, routing: (dispatch(x, routing), routing), lambda routing, d: (combine(d, routing), None))
combine.defvjp(lambda rows, routing: (combine(rows, routing), routing), lambda routing, d: (dispatch(d, routing), None))


def weighted_bias(weights: Float[Array, "M k"], bias: Float[Array, "E D"], expert_ids) -> Float[Array, "M D"]:
    """Return Σ weights · bias[expert_ids] over k, in float32."""
    return (weights[:, :, None] * bias.astype(jnp.float32)[expert_ids]).sum(1)


def weighted_bias_gradients(
    dout: Float[Array, "M D"], bias: Float[Array, "E D"], routing: Routing
) -> tuple[Float[Array, "E D"], Float[Array, "M k"]]:
    """Compute the gradients of `weighted_bias` to bias and weights, as matmuls."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    by_expert = product("md,ed->me", dout, bias.astype(dout.dtype))
    dbias = product("me,md->ed", routing.dense_weights.astype(dout.dtype), dout)
    return dbias.astype(bias.dtype), jnp.take_along_axis(by_expert, routing.expert_ids, axis=1)
