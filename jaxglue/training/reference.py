"""The reference that an objective compares the model with: the model as training begins."""

import flax.nnx as nnx

from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.training.setup import Setup


def caches_reference(setup: Setup) -> bool:
    """Tell whether the reference's log-probabilities are computed once, before training."""
    return setup.config.objective.kind.needs_reference and not setup.workload.reference


def reference_layers(
    setup: Setup, graphdefs: ModelGraphDefs, trainable: Params, frozen: Params
) -> list[nnx.GraphDef] | None:
    """Return the frozen layers without adapters, to run beside the model's; None where no loss needs them."""
    if not setup.workload.reference:
        return None
    kinds: dict[nnx.GraphDef, nnx.GraphDef] = {}
    for graphdef, *trees in zip(graphdefs.layers, trainable["layers"], frozen["layers"], strict=True):
        if graphdef not in kinds:
            kinds[graphdef] = without_adapters(graphdef, *trees)
    return [kinds[graphdef] for graphdef in graphdefs.layers]
