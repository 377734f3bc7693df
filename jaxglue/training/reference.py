"""The reference that an objective compares the model with: the model as training begins."""

import flax.nnx as nnx
import jax

from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.training.setup import Setup


def caches_reference(setup: Setup, trainable: Params) -> bool:
    """Tell whether the reference's log-probabilities are computed once, before training.

    They must be where the reference is not the frozen weights alone, and are with `auto` where the steps read documents
    more than once.

    Raises:
        ValueError: `--reference-cache off` where they must be.
    """
    config = setup.config
    if not config.objective.needs_reference:
        return False
    others = jax.tree.leaves({name: part for name, part in trainable.items() if name != "layers"})
    is_frozen = config.model.method == "lora" and setup.adapter is None and not others
    how = config.objective.reference_cache
    if how == "off" and not is_frozen:
        raise ValueError(
            "--reference-cache off runs the frozen weights without adapter as the reference, and this run begins with "
            f"other weights (--method {config.model.method}, --adapter {config.model.adapter}): use auto or on"
        )
    if how != "auto" or not is_frozen:
        return how == "on" or not is_frozen
    return setup.total_steps > setup.batches.steps_per_epoch


def reference_layers(
    setup: Setup, graphdefs: ModelGraphDefs, trainable: Params, frozen: Params
) -> list[nnx.GraphDef] | None:
    """Return the frozen layers without adapters, to run beside the model's; None where no loss needs them."""
    if not setup.config.objective.needs_reference or caches_reference(setup, trainable):
        return None
    kinds: dict[nnx.GraphDef, nnx.GraphDef] = {}
    for graphdef, *trees in zip(graphdefs.layers, trainable["layers"], frozen["layers"], strict=True):
        if graphdef not in kinds:
            kinds[graphdef] = without_adapters(graphdef, *trees)
    return [kinds[graphdef] for graphdef in graphdefs.layers]
