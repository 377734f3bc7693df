"""How the experts of a mixture are multiplied in decode steps, by kernels of few rows or others: for logs."""

from functools import partial

import jax
from flax import nnx

from jaxglue.models.config import DecoderConfig
from jaxglue.models.moe_layers import Experts
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.ops.backend import BackendChoice, compute_capability
from jaxglue.ops.moe import FEW_ROWS_EXPERTS, FewRowsExpertsCall


def choose_decoded_experts(
    graphdefs: ModelGraphDefs, trainable: Params, frozen: Params, config: DecoderConfig, dtype, slots: int
) -> BackendChoice | None:
    """Return the choice for steps of so many sequences, with its reason; None for a model without experts.

    Parameters may be shapes. All layers with experts are alike, so the first one's choice is that of all.
    """
    if (moe := config.moe) is None:
        return None
    chosen: list[BackendChoice] = []

    def look(graphdef, *weights: Params) -> None:
        for _, module in nnx.iter_modules(merge_module(graphdef, *weights)):
            if isinstance(module, Experts):
                call = _call(module, dtype, slots * moe.num_experts_per_tok)
                chosen.append(FEW_ROWS_EXPERTS.choose(compute_capability(), call))

    for graphdef, *weights in zip(graphdefs.layers, trainable["layers"], frozen["layers"], strict=True):
        jax.eval_shape(partial(look, graphdef), *weights)
        if chosen:
            return chosen[0]
    return None


def _call(experts: Experts, dtype, rows: int) -> FewRowsExpertsCall:
    parts = [part.projection for part in experts.projections]
    return FewRowsExpertsCall(
        dtype=dtype,
        rows=rows,
        experts=experts.down_proj.experts,
        matrices=tuple(part.weight for part in parts),
        adapters=tuple(part.adapter for part in parts),
        activation=experts.activation,
        transpose_rhs=experts.down_proj.transposed,
    )
