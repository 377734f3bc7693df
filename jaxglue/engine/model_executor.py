"""The executor of a causal language model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Traced
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.executor import LayerExecutor
from jaxglue.engine.lowering import on_device
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.scores import ScoreHead
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import RouterLosses
from jaxglue.models.parameters import ModelGraphDefs, Params, without_parts
from jaxglue.objectives.config import SUPERVISED
from jaxglue.objectives.objective import Objective
from jaxglue.sharding.rules import Layout


class Executor(LayerExecutor):
    """Compute loss and gradients of a causal language model.

    Args:
        graphdefs: modules of `split_model`.
        config: the model's shape.
        policy: remat policy of all layers, or one for each.
        dtype: of activations and matmuls.
        attention: attention backend.
        tile: tokens of a device's rows that pass through a layer at a time, apart from attention; None for all.
        router_losses: coefficients of the routers' auxiliary losses, each a mean over the layers with experts; None
            disables them. Their gradients are added to the loss's, their values are not.
        objective: its loss, followed by its further sums if it has some; by default the targets' cross-entropy.
        neftune_alpha: scale of the noise on embeddings in training; 0 adds none.
        mesh: devices of parameters and batches (see `jaxglue.sharding`); None for one device.
        options: of `LayerExecutor`.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        policy: RematPolicy | Sequence[RematPolicy],
        dtype=jnp.bfloat16,
        attention: str = "auto",
        tile: int | None = None,
        router_losses: RouterLosses | None = None,
        objective: Objective = SUPERVISED,
        neftune_alpha: float = 0.0,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        layout = Layout(mesh, dtype)
        shared: dict[str, Any] = {"dtype": dtype, "attention": attention, "tile": tile, "router_losses": router_losses}
        shared |= {"objective": objective, "neftune_alpha": neftune_alpha}
        embed_head = EmbedHead(graphdefs, config, **shared, layout=layout)
        self._embed_head = embed_head
        self._scores = ScoreHead(embed_head, layout)
        super().__init__(graphdefs.layers, embed_head, policy=policy, layout=layout, **options)

    def trace_step(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        key: PRNGKeyArray | None = None,
    ) -> Iterator[Traced]:
        """Trace the programs of a step on one device: each layer's, or the one of all; pin buffers for values.

        Args:
            trainable, frozen: parameters' shapes, of any arrays.
            micro_batches: of the step, on the device.
            key: for dropout and noise.
        """
        trainable, frozen = on_device((trainable, frozen))
        sums, accumulates = without_parts(trainable), len(micro_batches) > 1
        if accumulates or self._whole is not None:
            sums = on_device(jax.eval_shape(self._zero_partials, trainable, None))
        head, scale = self._embed_head, np.float32(1)
        for kind, batch in enumerate({jax.tree.structure(batch): batch for batch in micro_batches}.values()):
            if self._whole is not None:
                yield self._whole.trace(trainable, frozen, batch, scale, key, sums, accumulates=accumulates)
                continue
            traced, x, contexts = head.trace_embed(trainable, frozen, batch, key, scale)
            yield traced
            layers = zip(self._layers, trainable["layers"], frozen["layers"], contexts, sums["layers"], strict=True)
            first = {layer: inputs for layer, *inputs in reversed(list(layers))}
            backward = []
            for layer, (*weights, context, accumulated) in reversed(first.items()):
                traced = layer.forward.trace(*weights, x, context, None)
                yield traced
                y, residuals, _ = on_device(traced.out_info)
                if not kind:
                    self._passes.prepare_buffers(layer, x, residuals)
                x = y
                backward.append((layer, (residuals, *weights, x, context, x, accumulated, None)))
            yield head.trace_head_backward(trainable, frozen, x, batch, scale, sums)
            yield from (layer.backward.trace(*inputs) for layer, inputs in reversed(backward))

    def multiply_in_fp8(self, layers: Sequence[bool], head: bool) -> None:
        """Say which layers, and whether the head, multiply matrices for FP8 products so; at first all do."""
        self._embed_head.fp8_layers, self._embed_head.fp8_head = list(layers), head
        self._whole = self._make_whole()

    def answer_log_probs(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, "B U 2"]:
        """Return the log-probabilities of a batch's answers."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self._embed_head.answer_log_probs(trainable, frozen, x, batch)

    def evaluate(self, trainable: Params, frozen: Params, batch: Batch, sources: int = 1) -> Float[Array, "3 sources"]:
        """Return a batch's Σ weight · loss, Σ weight · hit and Σ weight by source.

        A hit is a target with the largest logit.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, replace(batch, sources=None))
        return self._scores.sums(trainable, self._embed_head.parts_on_device(frozen), x, batch, sources)

    def token_scores(
        self, trainable: Params, frozen: Params, batch: Batch
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """Return each target's cross-entropy, and whether it has the largest logit."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self._scores.tokens(trainable, self._embed_head.parts_on_device(frozen), x, batch)
