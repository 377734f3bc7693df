"""Expert load of a batch, for the metrics."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.ops.collectives import per_device
from jaxglue.ops.moe import Routing, routing_statistics
from jaxglue.sharding.gather import gather
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout


class _ObservingContext:
    """Layer context of packed rows that records routing statistics."""

    dropout_key = router_losses = None
    fp8 = True

    def __init__(self, packed: PackedContext):
        self.rotate, self.attend, self.token_mask = packed.rotate, packed.attend, packed.token_mask
        self.statistics: dict[str, Array] = {}

    def observe_routing(self, routing: Routing) -> None:
        """Record the statistics of the tokens that are not padding."""
        self.statistics = routing_statistics(routing, self.token_mask)


class ExpertLoadProbe:
    """Forward pass over a batch, layer by layer, that measures how evenly the routers load the experts.

    Args:
        graphdefs: the model's modules, from `split_model`.
        config: the model's shape.
        dtype: of activations and matmuls.
        attention: the attention backend.
        layout: placement of the parameters on the mesh.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        dtype=jnp.bfloat16,
        attention="auto",
        layout: Layout = SINGLE_DEVICE,
    ):
        self._embed_head = EmbedHead(graphdefs, config, dtype=dtype, attention=attention, layout=layout)
        types = {graph: jax.jit(partial(_run, graph, layout)) for graph in graphdefs.layers}
        self._layers = [types[graph] for graph in graphdefs.layers]

    def read(self, trainable: Params, frozen: Params, batch: Batch) -> dict[str, float]:
        """Measure a batch over all layers with experts.

        Returns:
            expert_load_max: the largest share of assignments of one expert, times E: 1 when even, E at worst.
            expert_load_entropy: entropy of the shares over log E, averaged over layers: 1 when even, 0 at worst.
        """
        x, contexts = self._embed_head.embed(trainable, frozen, batch, None)
        observed = []
        for i, layer in enumerate(self._layers):
            x, statistics = layer(trainable["layers"][i], transfer.to_device(frozen["layers"][i]), x, contexts[i])
            observed += [statistics] if statistics else []
        observed = jax.device_get(observed)
        return {
            "expert_load_max": max(float(layer["load_max"]) for layer in observed),
            "expert_load_entropy": sum(float(layer["load_entropy"]) for layer in observed) / len(observed),
        }


def _run(graph, layout: Layout, trainable: Params, frozen: Params, x, packed: PackedContext):
    stored = layout.param_specs((trainable, frozen))

    def program(weights, x, packed):
        trainable, frozen = gather(layout, weights, stored)
        return _apply(graph, trainable, frozen, x, packed)

    specs = (stored, layout.batch_spec, layout.context_specs(packed))
    return per_device(program, layout.mesh, specs, (layout.batch_spec, PartitionSpec()))((trainable, frozen), x, packed)


def _apply(graph, trainable: Params, frozen: Params, x, packed: PackedContext):
    context = _ObservingContext(packed)
    return merge_module(graph, trainable, frozen)(x, context), context.statistics
