"""Projections of few rows, as in decoding: weights are read once, in their stored form, in one launch an input.

There are no gradients: the caller's conditions say that none are taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import (
    Backend,
    Capability,
    Operation,
    check_hopper,
    check_one_device,
    check_tried,
    check_triton,
)
from jaxglue.ops.projection.call import Conditions, LowRankAdapter, Projection, StaticConditions
from jaxglue.ops.projection.few_rows_operands import (
    MANY_GATE_ROWS,
    MANY_WEIGHT_ROWS,
    MOST_ADAPTED_ROWS,
    MOST_MANY_ROWS,
    MOST_ROWS,
    MOST_WIDE_ROWS,
    MULTIPROCESSORS,
    FewRows,
    FewRowsAdapters,
    NF4Scales,
)
from jaxglue.ops.projection.fp8 import encode
from jaxglue.ops.projection.fp8_adapters import FP8Rows, NormedRows, QuantizedRows
from jaxglue.ops.quant.formats import is_quantized
from jaxglue.ops.quant.fp8 import FP8Weight
from jaxglue.ops.quant.int8 import LARGEST, Int8Weight
from jaxglue.ops.quant.nf4 import NF4

if TYPE_CHECKING:
    from jaxglue.ops.projection.few_rows_triton import TritonFewRows

MOST_NF4_ROWS = 64
"""Rows up to which a kernel is faster for NF4, whose values each program looks up in turn with its product."""
LARGEST_RANK = 64
PERMUTED = ("int8", "e4m3", "nf4")
"""Ways of multiplication that convert weights to x's dtype."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FewRowsCall:
    """Meaning of projections of one input without gradients."""

    dtype: jnp.dtype
    rows: int
    projections: Sequence[Projection]
    conditions: StaticConditions
    in_fp8: bool = False
    """The input is e4m3 values of a norm."""
    gated: bool = False
    """The projections are gate and up, whose kernel has the activation."""
    activation: str = "silu"
    """Of the gate."""

    @classmethod
    def of(
        cls,
        x: Float[Array, "*B in"] | FP8Rows,
        projections: Sequence[Projection],
        conditions: Conditions | StaticConditions,
        *,
        gated: bool = False,
        activation: str = "silu",
    ) -> "FewRowsCall":
        """Return the meaning of projections of x under a layer's conditions."""
        values = x.values if isinstance(x, FP8Rows) else x
        return cls(
            dtype=values.dtype,
            rows=values.size // values.shape[-1],
            projections=projections,
            conditions=StaticConditions.of(conditions),
            in_fp8=isinstance(x, FP8Rows),
            gated=gated,
            activation=activation,
        )


def _check(capability: Capability | None, call: FewRowsCall) -> None:
    check_triton(capability, call.dtype)
    check_hopper(capability)
    check_one_device()
    if len(call.projections) > 3:
        raise NotImplementedError("more than three weights")
    _check_weights(call)
    _check_parts(call)
    _check_speed(call, _kind(call.projections[0], call.conditions))


def _check_weights(call: FewRowsCall) -> None:
    kinds = {_kind(projection, call.conditions) for projection in call.projections}
    if len(kinds) > 1:
        raise NotImplementedError(f"weights in several formats: {', '.join(sorted(kinds))}")
    for kind in kinds:
        check_tried(f"few rows of {kind}")
    if call.in_fp8 and kinds != {"fp8"}:
        raise NotImplementedError("only FP8 products read e4m3 values")
    if kinds <= set(PERMUTED) and call.projections[0].weight.shape[1] % 32:
        raise NotImplementedError("32 does not divide the columns")


def _check_speed(call: FewRowsCall, kind: str) -> None:
    """Raise NotImplementedError where XLA's products are faster, as measured on an H100 and an H200 (Qwen3-8B)."""
    rows, projections = call.rows, call.projections
    if _suits_many(rows, projections, kind, call.gated):
        return
    if rows > MOST_ROWS:
        raise NotImplementedError(f"more than {MOST_ROWS} rows")
    adapted = projections[0].adapter is not None
    if kind == "nf4" and rows > MOST_NF4_ROWS:
        raise NotImplementedError(f"cuBLAS on expanded weights is faster for more than {MOST_NF4_ROWS} rows")
    if kind in PERMUTED or (kind == "fp8" and adapted):
        return
    if rows > (most := MOST_ADAPTED_ROWS if adapted else MOST_WIDE_ROWS) and len(projections) < 3:
        raise NotImplementedError(f"cuBLAS is as fast for more than {most} rows, but for narrow keys and values")


def _suits_many(rows: int, projections: Sequence[Projection], kind: str, gated: bool) -> bool:
    """Return whether kernels of many rows are faster: for gate and up, and for q, k and v, that fill the GPU.

    XLA's graphs run separate products of one input side by side, which fill the places that each leaves, so that a step
    of 256 rows is not faster by these kernels. 512 rows in FP8 leave few places.
    """
    weights = [projection.weight for projection in projections]
    parts = any(projection.adapter is not None or projection.bias is not None for projection in projections)
    if kind != "fp8" or parts or sum(math.prod(weight.shape) for weight in weights) >= 2**31:
        return False
    if not MOST_MANY_ROWS - 64 < rows <= MOST_MANY_ROWS:
        return False
    wide = sum(weight.shape[0] for weight in weights)
    if gated:
        return _share(-(-wide // sum(MANY_GATE_ROWS)) * 2) > 0.9
    divides = len(weights) == 3 and not any(weight.shape[0] % MANY_WEIGHT_ROWS for weight in weights[:-1])
    return divides and _share(-(-wide // MANY_WEIGHT_ROWS) * 2) > 0.7


def _share(programs: int) -> float:
    """Return the share of its multiprocessors that a GPU uses for so many programs, each of which takes a whole one."""
    turns = -(-programs // MULTIPROCESSORS)
    return programs / (turns * MULTIPROCESSORS)


def _kind(projection: Projection, conditions: StaticConditions) -> str:
    """Return the way in which a weight is multiplied."""
    weight = projection.weight
    if projection.trains_in_fp8:
        raise NotImplementedError("a trained weight is rounded to e4m3 for each product")
    if not is_quantized(weight):
        return "16 bits"
    if isinstance(weight, Int8Weight):
        return "int8"
    if isinstance(weight, NF4):
        return "nf4"
    if not isinstance(weight, FP8Weight):
        raise NotImplementedError(f"{type(weight).__name__} has no kernel for few rows")
    if weight.scales.ndim > 1:
        raise NotImplementedError("rows of e4m3 values have several scales")
    return "fp8" if conditions.fp8 and projection.is_for_fp8 else "e4m3"


def _check_parts(call: FewRowsCall) -> None:
    projections = call.projections
    with_bias = [projection.bias is not None for projection in projections]
    if any(with_bias) and not all(with_bias):
        raise NotImplementedError("only some projections have biases")
    adapters = [projection.adapter for projection in projections]
    present = [adapter for adapter in adapters if adapter is not None]
    if present and len(present) < len(adapters):
        raise NotImplementedError("only some projections have adapters")
    if any(adapter.magnitude is not None for adapter in present):
        raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
    if any(adapter.dropout > 0.0 and call.conditions.dropout for adapter in present):
        raise NotImplementedError("dropout gives each adapter an input of its own")
    if len(ranks := {adapter.A.shape[0] for adapter in present}) > 1:
        raise NotImplementedError("adapters have several ranks")
    if ranks and max(ranks) > LARGEST_RANK:
        raise NotImplementedError(f"rank must be at most {LARGEST_RANK}, got {max(ranks)}")


def _load(capability: Capability, call: FewRowsCall) -> "TritonFewRows":
    from jaxglue.ops.projection.few_rows_triton import TritonFewRows

    return TritonFewRows.of(capability)


FEW_ROWS = Operation(
    name="projection of few rows",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="weights are read once, as they are stored, by one kernel",
            reads={
                FewRowsCall: {
                    **dict.fromkeys(("dtype", "rows", "projections", "conditions", "in_fp8", "gated")),
                    "activation": ("silu", "gelu_tanh"),
                },
                StaticConditions: ("dropout", "fp8", "inference", "ranks"),
                Projection: ("weight", "bias", "adapter"),
                LowRankAdapter: ("A", "B", "scale", "dropout", "salt"),
                Int8Weight: ("codes", "absmax", "dtype"),
                NF4: ("codes", "scales", "scale_absmax", "scale_offset", "dtype"),
                FP8Weight: ("values", "scales", "dtype", "expand"),
            },
        ),
    },
)
"""Backends of projections without gradients."""


def load_few_rows(call: FewRowsCall) -> "TritonFewRows | None":
    """Return the kernels that serve a call; None where gradients may be taken."""
    return FEW_ROWS.load(call) if call.conditions.inference else None


def few_rows_read_fp8(call: FewRowsCall) -> bool:
    """Return whether kernels of few rows multiply e4m3 values of the input, so that a norm need write nothing else."""
    return load_few_rows(call) is not None and _kind(call.projections[0], call.conditions) == "fp8"


def project_few_rows(kernels: "TritonFewRows", x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    """Do as `adapted_projection` by the kernels of `FEW_ROWS`."""
    operands, leading = _operands(x, projections, conditions)
    flat = None if stream is None else stream.reshape(-1, stream.shape[-1])
    outputs = kernels.project(operands, flat)
    return [y.reshape(*leading, -1) for y in outputs]


def gate_few_rows(
    kernels: "TritonFewRows", x, projections: Sequence[Projection], conditions, activation: str
) -> Float[Array, "*B F"]:
    """Compute activation(gate(x)) · up(x) by the kernels of `FEW_ROWS`."""
    operands, leading = _operands(x, projections, conditions)
    return kernels.gate(operands, activation).reshape(*leading, -1)


def _operands(x, projections: Sequence[Projection], conditions: Conditions) -> tuple[FewRows, tuple[int, ...]]:
    """Return the operands of a launch, and the leading axes of x."""
    kind = _kind(projections[0], StaticConditions.of(conditions))
    if kind == "fp8" and not isinstance(x, FP8Rows):
        x = QuantizedRows(x, *encode(x))
    values = x.values if isinstance(x, FP8Rows) else x
    rows = values.reshape(-1, values.shape[-1])
    weights, scales, nf4 = _stored([projection.weight for projection in projections], kind, rows.dtype)
    biases = tuple(projection.bias for projection in projections if projection.bias is not None) or None
    operands = FewRows(
        dtype=rows.dtype,
        x=_permuted(rows) if kind in PERMUTED else x.fp8_values.reshape(rows.shape) if isinstance(x, FP8Rows) else rows,
        x_scales=x.scales.reshape(-1) if isinstance(x, FP8Rows) else None,
        weights=weights,
        scales=scales,
        factor=1.0 / LARGEST if kind == "int8" else 1.0,
        nf4=nf4,
        biases=biases,
        low_rank=_low_rank(x, rows, [p.adapter for p in projections], getattr(conditions, "ranks", None)),
    )
    return operands, values.shape[:-1]


def _permuted(x: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Return x with its columns in the order in which kernels multiply values of fewer than 16 bits.

    A thread's operands are neighboring pairs 0, 4, 8 and 12 of each 16. These are made its pairs 0 to 3, which it reads
    at once.
    """
    return x.reshape(len(x), -1, 4, 4, 2).swapaxes(2, 3).reshape(x.shape)


def _stored(weights: Sequence[Any], kind: str, dtype) -> tuple[tuple, tuple | None, NF4Scales | None]:
    """Return the weights' values as they are stored, the factors of their rows, and NF4's scales."""
    if kind == "16 bits":
        return tuple(weight.astype(dtype) for weight in weights), None, None
    if kind == "int8":
        return tuple(weight.codes for weight in weights), tuple(weight.absmax for weight in weights), None
    if kind == "nf4":
        names = "scales", "scale_absmax", "scale_offset"
        return tuple(w.codes for w in weights), None, NF4Scales(*(tuple(getattr(w, n) for w in weights) for n in names))
    return tuple(weight.values for weight in weights), tuple(weight.scales for weight in weights), None


def _low_rank(x, rows: Float[Array, "M K"], adapters: Sequence[Any], ranks) -> FewRowsAdapters | None:
    """Return the operands of adapters, of whose ranks [tokens or 1, R] each token of x may use some."""
    if adapters[0] is None:
        return None
    normed = isinstance(x, NormedRows)
    if ranks is not None:
        leading = (x.values if isinstance(x, FP8Rows) else x).shape[:-1]
        ranks = jnp.broadcast_to(ranks, (*leading, ranks.shape[-1])).reshape(len(rows), -1).astype(jnp.uint8)
    return FewRowsAdapters(
        source=rows,
        norm_weight=x.weight.astype(jnp.float32) if normed else None,
        inverse_rms=x.inverse_rms.reshape(-1) if normed else None,
        downs=tuple(adapter.A for adapter in adapters),
        ups=tuple(adapter.B for adapter in adapters),
        factors=tuple(adapter.scale for adapter in adapters),
        used=ranks,
    )
