"""The reference that an objective compares the model with."""

import flax.nnx as nnx

from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.objectives.preference import PreferenceLoss
from jaxglue.training.config import TrainConfig
from jaxglue.training.setup import Setup


def preference_loss(config: TrainConfig) -> PreferenceLoss | None:
    """Return the loss of a run's objective; None for supervised training."""
    return None if config.objective.objective == "sft" else PreferenceLoss(config=config.objective)


def reference_layers(
    setup: Setup, graphdefs: ModelGraphDefs, trainable: Params, frozen: Params
) -> list[nnx.GraphDef] | None:
    """Return the frozen layers without adapters, to run beside the model's; None where no loss needs them."""
    if not setup.config.objective.needs_reference:
        return None
    kinds: dict[nnx.GraphDef, nnx.GraphDef] = {}
    for graphdef, *trees in zip(graphdefs.layers, trainable["layers"], frozen["layers"], strict=True):
        if graphdef not in kinds:
            kinds[graphdef] = without_adapters(graphdef, *trees)
    return [kinds[graphdef] for graphdef in graphdefs.layers]
