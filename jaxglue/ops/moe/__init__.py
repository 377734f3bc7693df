"""Mixture of experts: routing by one sort, grouped matmuls over its rows, and the experts' feed-forward."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxglue.ops import names
from jaxglue.ops.backend import (
    Backend,
    Capability,
    Operation,
    check_hopper,
    check_one_device,
    check_tried,
    check_triton,
)
from jaxglue.ops.moe.expert_parallel import expert_parallel
from jaxglue.ops.moe.losses import auxiliary_loss, routing_statistics, z_loss
from jaxglue.ops.moe.reference import (
    GPT_OSS_LIMIT,
    Activation,
    ExpertAdapter,
    ExpertLora,
    reference_grouped_matmul,
    reference_mlp,
    scaled,
)
from jaxglue.ops.moe.routing import (
    ONE_GROUP,
    GroupMetadata,
    Groups,
    Order,
    Routing,
    few_rows_tile,
    make_routing,
    sorted_route,
)
from jaxglue.ops.moe.vjp import GroupedSpec, MoeBackend, fused_grouped_matmul, fused_mlp
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import FP8Weight
from jaxglue.ops.quant.int8 import Int8Weight
from jaxglue.ops.quant.mxfp4 import MXFP4
from jaxglue.ops.quant.nf4 import NF4
from jaxglue.ops.quant.stack import Stack

if TYPE_CHECKING:
    from jaxglue.ops.moe.few_rows import TritonFewRowsExperts

__all__ = [
    "CHOOSE",
    "FEW_ROWS_EXPERTS",
    "GPT_OSS_LIMIT",
    "GROUPED_MATMUL",
    "ONE_GROUP",
    "ROUTE",
    "Activation",
    "ChooseCall",
    "ExpertAdapter",
    "ExpertLora",
    "ExpertProjection",
    "FewRowsExpertsCall",
    "GroupMetadata",
    "GroupedCall",
    "Groups",
    "Order",
    "RouteCall",
    "Routing",
    "auxiliary_loss",
    "experts",
    "grouped_matmul",
    "make_routing",
    "moe_mlp",
    "route",
    "routing_statistics",
    "z_loss",
]


@dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """Meaning of grouped matmuls, alone or with the experts' activation between them."""

    dtype: jnp.dtype
    """Of the rows."""
    activation: Activation = "swiglu"


def _check_grouped(capability: Capability | None, call: GroupedCall) -> None:
    check_triton(capability, call.dtype)


def _load(capability: Capability, call: GroupedCall) -> MoeBackend:
    from jaxglue.ops.moe.tiles import grouped_tiles
    from jaxglue.ops.moe.triton import TritonMoe

    return TritonMoe.of(capability, tiles=grouped_tiles(capability))


GROUPED_MATMUL = Operation(
    name="grouped matmul",
    backends={
        "triton": Backend(
            check=_check_grouped,
            load=_load,
            advantage="work grows with the rows, not with rows times groups",
            reads={GroupedCall: {"dtype": None, "activation": ("swiglu", "geglu", "gpt_oss", "relu2")}},
        )
    },
)
"""Backends of `grouped_matmul` and `moe_mlp`."""


MOST_ROWS = 32
"""Mean rows of an expert up to which reading its matrices takes longer than multiplying by them."""
MOST_STORED_ROWS = 64
"""The same of matrices that grouped matmuls would expand, write and read again."""
LARGEST_RANK = 64
"""Rank of adapters up to which programs of few rows hold their second matrices beside sums."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FewRowsExpertsCall:
    """Meaning of the experts' feed-forward without gradients."""

    dtype: jnp.dtype
    rows: int
    """Of all experts, one for each assignment of a token."""
    experts: int
    matrices: tuple[Float[Array, "E a b"] | Quantized, ...]
    """Gate and up as one, and down."""
    adapters: tuple[ExpertAdapter | None, ...] = (None, None)
    activation: Activation = "swiglu"
    transpose_rhs: bool = False
    exact: bool = False
    """A row's bits are those of training."""


def _check_few(capability: Capability | None, call: FewRowsExpertsCall) -> None:
    check_triton(capability, call.dtype)
    check_hopper(capability)
    check_one_device()
    expanded = all(isinstance(matrix, Quantized) for matrix in call.matrices)
    if call.rows > (most := MOST_STORED_ROWS if expanded else MOST_ROWS) * call.experts:
        raise NotImplementedError(f"experts have more than {most} rows each")
    if call.rows > MOST_ROWS * call.experts:
        check_tried("few rows of experts, more than 32 each")
    ranks = [adapter.A.shape[1] for adapter in call.adapters if adapter is not None]
    if any(rank > LARGEST_RANK for rank in ranks):
        raise NotImplementedError(f"rank must be at most {LARGEST_RANK}, got {max(ranks)}")
    if ranks:
        check_tried("adapters of experts with few rows")
    if call.exact:
        if any(isinstance(matrix, Quantized) for matrix in call.matrices):
            raise NotImplementedError("stored values are multiplied in another order of columns than training's")
        check_tried("experts with few rows in training's order")
    for matrix in call.matrices:
        if isinstance(matrix, Stack):
            _check_few_stacked(matrix)
        elif isinstance(matrix, Quantized) and not isinstance(matrix, MXFP4):
            raise NotImplementedError(f"{type(matrix).__name__} has no kernel for few rows")
        if not isinstance(matrix, Quantized) and matrix.dtype != call.dtype:
            raise NotImplementedError("matrices are stored in another dtype")
    if not call.transpose_rhs and call.activation != "gpt_oss":
        raise NotImplementedError("gate and up are not in rows")


def _check_few_stacked(matrix: Stack) -> None:
    rows = matrix.rows
    if not isinstance(rows, NF4 | FP8Weight | Int8Weight):
        raise NotImplementedError(f"{type(rows).__name__} has no kernel for few rows")
    if isinstance(rows, FP8Weight) and rows.scales.ndim != 1:
        raise NotImplementedError("rows have several scales")
    if matrix.shape[2] % 32:
        raise NotImplementedError("rows are no multiple of 32 values long")


def _load_few(capability: Capability, call: Any) -> "TritonFewRowsExperts":
    from jaxglue.ops.moe.few_rows import TritonFewRowsExperts

    return TritonFewRowsExperts.of(capability)


FEW_ROWS_EXPERTS = Operation(
    name="experts with few rows",
    backends={
        "triton": Backend(
            check=_check_few,
            load=_load_few,
            advantage="matrices are read once, as stored",
            reads={
                FewRowsExpertsCall: {
                    **dict.fromkeys(("dtype", "rows", "experts", "matrices", "adapters", "transpose_rhs", "exact")),
                    "activation": ("swiglu", "geglu", "gpt_oss", "relu2"),
                },
                ExpertAdapter: ("A", "B", "used"),
                MXFP4: ("blocks", "scales"),
                Stack: ("rows", "out"),
                Int8Weight: ("codes", "absmax", "dtype"),
                NF4: ("codes", "scales", "scale_absmax", "scale_offset", "dtype"),
                FP8Weight: ("values", "scales", "dtype", "expand"),
            },
        )
    },
)
"""Backends of `moe_mlp` without gradients."""


@dataclass(frozen=True, kw_only=True)
class RouteCall:
    """Meaning of a routing without gradients."""

    assignments: int
    """Of tokens to experts."""
    experts: int
    order: Order = "softmax_topk"
    normalize: bool = False
    groups: Groups = ONE_GROUP
    scale: float = 1.0
    corrected: bool = False
    """The choice is not by scores alone."""
    exact: bool = False
    """A token's bits are those of training."""


def _check_route(capability: Capability | None, call: RouteCall) -> None:
    check_triton(capability)
    check_one_device()
    if call.order == "sigmoid_topk" or call.groups.kept != call.groups.total or call.scale != 1.0:
        raise NotImplementedError("experts are chosen by sigmoids or in groups, or their weights are scaled")
    if call.assignments > MOST_STORED_ROWS * call.experts or call.assignments > _MOST_ASSIGNMENTS:
        raise NotImplementedError("a sort is as fast")


_MOST_ASSIGNMENTS = 4096
ROUTE = Operation(
    name="routing of few rows",
    backends={
        "triton": Backend(
            check=_check_route,
            load=_load_few,
            advantage="two launches in place of ten",
            reads={
                RouteCall: {
                    **dict.fromkeys(("assignments", "experts", "normalize", "groups")),
                    "order": ("softmax_topk", "topk_softmax"),
                },
                Groups: ("total", "kept"),  # equal: one group
            },
        )
    },
)
"""Backends of `route` without gradients."""


@dataclass(frozen=True, kw_only=True)
class ChooseCall:
    """Meaning of a choice of the experts with the largest scores."""

    experts: int


def _check_choose(capability: Capability | None, call: ChooseCall) -> None:
    check_triton(capability)
    if call.experts > MOST_EXPERTS:
        raise NotImplementedError(f"there are more than {MOST_EXPERTS} experts")


MOST_EXPERTS = 1024
CHOOSE = Operation(
    name="choice of experts",
    backends={
        "triton": Backend(
            check=_check_choose,
            load=_load_few,
            advantage="XLA sorts all scores",
            reads={ChooseCall: ("experts",)},
        )
    },
)
"""Backends of the choice in `route`."""


def _top_k(scores: Float[Array, "M E"], k: int) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Return the k largest scores of each token, and their experts."""
    if (kernels := CHOOSE.load(ChooseCall(experts=scores.shape[1]))) is None:
        chosen, expert_ids = jax.lax.top_k(scores, k)
        return chosen, expert_ids
    expert_ids = checkpoint_name(kernels.choose(jax.lax.stop_gradient(scores), k), names.ROUTING)
    return jnp.take_along_axis(scores, expert_ids, axis=-1), expert_ids


def route(
    router_logits: Float[Array, "M E"],
    k: int,
    *,
    order: Order = "softmax_topk",
    normalize: bool = False,
    correction: Float[Array, " E"] | None = None,
    groups: Groups = ONE_GROUP,
    scale: float = 1.0,
    inference: bool = False,
    exact: bool = False,
) -> Routing:
    """Choose k of E experts for each of M tokens.

    Args:
        router_logits: any float dtype; computed in float32.
        k: experts for each token.
        order: `softmax_topk`, a softmax over all experts (Qwen3), `topk_softmax`, one over the chosen (GPT-OSS), or
            `sigmoid_topk`, a sigmoid of each (DeepSeek-V3).
        normalize: divide the chosen weights by their sum (Qwen3's `norm_topk_prob`); `topk_softmax` always sums to 1.
        correction: added to probabilities or sigmoids for the choice alone, without a gradient.
        groups: of experts; those kept have the largest sum of their two best sigmoids, or the largest probability.
        scale: of the weights.
        inference: no gradients are taken: few tokens have kernels of their own.
        exact: sum a token's weights in one order, whatever tokens are routed with it.

    Raises:
        ValueError: k is not between 1 and E, the order is unknown, or groups do not fit.
    """
    M, E = router_logits.shape
    call = RouteCall(
        assignments=M * k,
        experts=E,
        order=order,
        normalize=normalize,
        groups=groups,
        scale=scale,
        corrected=correction is not None,
        exact=exact,
    )
    if inference and (kernels := ROUTE.load(call)) is not None:
        return kernels.route(router_logits, k, order=order, normalize=normalize)
    few = inference and M * k <= MOST_STORED_ROWS * E
    return sorted_route(
        router_logits,
        k,
        order=order,
        normalize=normalize,
        correction=correction,
        groups=groups,
        scale=scale,
        exact=exact,
        row_tile=few_rows_tile(M * k // E) if few else None,
        top_k=_top_k,
    )


def grouped_matmul(
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | Quantized,
    group_sizes: Int[Array, " E"] | GroupMetadata,
    *,
    bias: Float[Array, "E N"] | None = None,
    adapter: ExpertAdapter | None = None,
    transpose_rhs: bool = False,
    backend: str = "auto",
) -> Float[Array, "S N"]:
    """Multiply consecutive groups of rows by a matrix each: out[s] = lhs[s] · rhs[group of s] (+ bias[group of s]).

    Sums in float32. Differentiable with respect to lhs, rhs, bias and adapter; except for lhs's, a gradient and its
    residuals exist only where it is taken.

    Args:
        lhs: rows in the order of their groups.
        rhs: a matrix for each group, cast to lhs's dtype; [E, N, K] with `transpose_rhs`. Quantized ones are
            dequantized in both passes and get no gradient.
        group_sizes: rows of each group, which sum to S; or `GroupMetadata`, to share it between calls.
        bias: added to the rows of each group.
        adapter: added as (lhs[s] · Aᵀ) · Bᵀ with the matrices of the row's group.
        transpose_rhs: rhs holds its matrices transposed, as Hugging Face stores most of them.
        backend: one of `GROUPED_MATMUL.names`; `auto` chooses by the dtype and the default device.

    Raises:
        ValueError: shapes that do not fit, sizes that `GroupMetadata.of` refuses, or a named backend that cannot serve.
    """
    groups = group_sizes if isinstance(group_sizes, GroupMetadata) else GroupMetadata.of(group_sizes, lhs.shape[0])
    if lhs.ndim != 2:
        raise ValueError(f"lhs must be [S, K], got {tuple(lhs.shape)}")
    _check_operands("rhs", rhs, (groups.sizes.shape[0], lhs.shape[1]), bias, adapter, transpose_rhs)
    kernels = GROUPED_MATMUL.load(GroupedCall(dtype=lhs.dtype), backend=backend)
    if kernels is None:
        return reference_grouped_matmul(lhs, rhs, groups, bias, adapter, transpose_rhs=transpose_rhs)
    spec = GroupedSpec(kernels=kernels, transpose_rhs=transpose_rhs)
    return fused_grouped_matmul(spec, lhs, rhs, bias, adapter, groups, None, None)


def moe_mlp(
    x: Float[Array, "M D"],
    routing: Routing,
    gate_up: Float[Array, "E D 2F"] | Quantized,
    down: Float[Array, "E F D"] | Quantized,
    *,
    activation: Activation = "swiglu",
    gate_up_bias: Float[Array, "E 2F"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    transpose_rhs: bool = False,
    lora: ExpertLora | None = None,
    fp8: bool = False,
    inference: bool = False,
    exact: bool = False,
    backend: str = "auto",
) -> Float[Array, "M D"]:
    """Compute Σ weight · down(activation(gate_up(x))) over each token's experts, in x's dtype.

    The weight multiplies the input of `down`, so its gradient does not need the output of `down`.

    Args:
        x: tokens.
        routing: from `route` for the same M tokens.
        gate_up, down: the experts' matrices; [E, 2F, D] and [E, D, F] with `transpose_rhs`, the layout of Qwen3-MoE
            and of every `MXFP4` checkpoint.
        activation: `swiglu`, silu(gate)·up, the gate in the first half of 2F; `geglu`, gelu_tanh(gate)·up likewise; or
            `gpt_oss`, clamped, gate and up alternating; `relu2`, max(up, 0)² of F columns, without a gate.
        gate_up_bias, down_bias: of each expert.
        transpose_rhs: the matrices are stored [out, in].
        lora: adapters of the experts.
        fp8: multiply `MXFP4` matrices, whose values FP8 can hold, in FP8: x and gradients are quantized by row. Only
            kernels do; the reference dequantizes.
        inference: no gradients are taken: few rows have kernels of their own.
        exact: a token's bits are those of training: grouped matmuls multiply few rows, too.
        backend: as in `grouped_matmul`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, or a named backend that cannot serve.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}, got {activation!r}")
    if x.shape[0] != routing.expert_ids.shape[0]:
        raise ValueError(f"routing is for {routing.expert_ids.shape[0]} tokens, but x has {x.shape[0]}")
    lora = lora or ExpertLora()
    adapters, E = lora.of_rows(routing), routing.group_sizes.shape[0]
    F = _check_operands("gate_up", gate_up, (E, x.shape[1]), gate_up_bias, adapters[0], transpose_rhs)
    F = F if activation == "relu2" else F // 2
    _check_operands("down", down, (E, F), down_bias, adapters[1], transpose_rhs)
    operands = x, routing, (gate_up, down), (gate_up_bias, down_bias)
    call = FewRowsExpertsCall(
        dtype=x.dtype,
        rows=routing.permutation.size,
        experts=E,
        matrices=(gate_up, down),
        adapters=adapters,
        activation=activation,
        transpose_rhs=transpose_rhs,
        exact=exact,
    )
    if inference and (few := FEW_ROWS_EXPERTS.load(call)) is not None:
        shape: dict[str, Any] = {"activation": activation, "transpose_rhs": transpose_rhs, "exact": exact}
        return few.mlp(*operands, adapters, **shape, lora_scales=lora.scales)
    adapters = scaled(adapters[0], lora.scales[0]), scaled(adapters[1], lora.scales[1])
    kernels = GROUPED_MATMUL.load(GroupedCall(dtype=x.dtype, activation=activation), backend=backend)
    if kernels is None:
        return reference_mlp(*operands, adapters, activation=activation, transpose_rhs=transpose_rhs)
    return fused_mlp(kernels, *operands, adapters, activation=activation, transpose_rhs=transpose_rhs, fp8=fp8)


class ExpertProjection(NamedTuple):
    """Parameters of one projection of this device's experts."""

    weight: Float[Array, "E a b"] | Quantized
    bias: Float[Array, "E out"] | None = None
    adapter: ExpertAdapter | None = None


def experts(
    x: Float[Array, "M D"],
    routing: Routing,
    gate_up: ExpertProjection,
    down: ExpertProjection,
    *,
    activation: Activation,
    transpose_rhs: bool,
    lora_scales: tuple[float, float] = (1.0, 1.0),
    ranks: Bool[Array, "M R"] | None = None,
    fp8: bool = False,
    inference: bool = False,
    exact: bool = False,
) -> Float[Array, "M D"]:
    """Compute `moe_mlp` of this device's tokens, with an equal share of the experts on each device along `expert`.

    Args:
        x: this device's tokens.
        routing: of these tokens to all experts.
        gate_up, down: of this device's experts.
        activation, transpose_rhs, fp8, inference, exact: see `moe_mlp`.
        lora_scales: of both adapters.
        ranks: of the adapters that each token uses, or [1, R] for all tokens; by default all use all.
    """

    def apply(x, routing: Routing, adapters: ExpertLora) -> Float[Array, "M D"]:
        return moe_mlp(
            x,
            routing,
            gate_up.weight,
            down.weight,
            activation=activation,
            gate_up_bias=gate_up.bias,
            down_bias=down.bias,
            transpose_rhs=transpose_rhs,
            lora=adapters,
            fp8=fp8,
            inference=inference,
            exact=exact,
        )

    adapters = ExpertLora(gate_up=gate_up.adapter, down=down.adapter, scales=lora_scales, ranks=ranks)
    return expert_parallel(apply, x, routing, adapters)


def _check_operands(
    name: str, rhs, expected: tuple[int, int], bias, adapter: ExpertAdapter | None, transpose_rhs: bool
) -> int:
    """Return N, after checking that matrices, biases and adapters are of `expected` (E, K).

    Raises:
        ValueError: shapes that do not fit.
    """
    if isinstance(rhs, Quantized):
        rhs.check(name)
    (E, K), layout = expected, "[E, N, K]" if transpose_rhs else "[E, K, N]"
    shape = tuple(rhs.shape)
    N = shape[1 if transpose_rhs else 2] if len(shape) == 3 else 0
    if shape != ((E, N, K) if transpose_rhs else (E, K, N)):
        raise ValueError(f"{name} must be {layout} with E={E} groups and K={K}, got {shape}")
    if bias is not None and bias.shape != (E, N):
        raise ValueError(f"bias of {name} must be [E, N] = [{E}, {N}], got {tuple(bias.shape)}")
    if adapter is not None:
        R = adapter.A.shape[1]
        if adapter.A.shape != (E, R, K) or adapter.B.shape != (E, N, R):
            got = f"{tuple(adapter.A.shape)} and {tuple(adapter.B.shape)}"
            raise ValueError(f"adapter of {name} must be [{E}, R, {K}] and [{E}, {N}, R], got {got}")
    return N
