"""What comes before and after the layers: embedding and rotary tables, final norm, output projection and loss."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import jit_step
from jaxglue.engine.host_table import needed_rows
from jaxglue.engine.layer import add_trees
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext, RouterLosses
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.ops.collectives import BATCH_AXES, psum, share
from jaxglue.ops.cross_entropy import linear_cross_entropy
from jaxglue.ops.rope import rope_tables
from jaxglue.sharding.layout import WHOLE, Layout


class EmbedHead:
    """Compiled functions around the stack of layers; every tree argument is the whole model's.

    `jit` compiles each; `jax.jit` where they are to be parts of a larger program.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        dtype,
        attention: str,
        router_losses: RouterLosses | None = None,
        layout: Layout = WHOLE,
        jit=jit_step,
    ):
        self._layout = layout
        self._router_losses = router_losses
        self._graphdefs, self._config, self._dtype, self._attention = graphdefs, config, dtype, attention
        self.head_parts = ("norm", "embed_tokens" if graphdefs.lm_head is None else "lm_head")
        self._embed = jit(self._embed_and_rope)
        self._embed_backward = jit(self._embed_gradients, donate_argnames="accumulated")
        self._head_loss = jit(self._loss)
        self._head_backward = jit(self._loss_and_gradients, donate_argnames=("x", "accumulated"))
        self.functions = (self._embed, self._embed_backward, self._head_loss, self._head_backward)

    def embed(
        self, trainable: Params, frozen: Params, batch: Batch, key: PRNGKeyArray | None, scale=None
    ) -> tuple[Float[Array, "B T D"], list[PackedContext]]:
        """Embeds the tokens; every layer's context differs in its dropout key only.

        `scale` is that of the loss, where there will be a backward pass.
        """
        table, tokens = needed_rows(frozen["embed_tokens"], batch.tokens)
        x, cos, sin, keys, router_losses = self._embed(trainable["embed_tokens"], table, tokens, batch, key, scale)
        shared = {"segments": batch.segments, "cos": cos, "sin": sin, "backend": self._attention}
        return x, [PackedContext(**shared, dropout_key=layer_key, router_losses=router_losses) for layer_key in keys]

    def embed_backward(self, trainable: Params, batch: Batch, dx: Float[Array, "B T D"], accumulated: Params) -> Params:
        """`accumulated` of the embedding plus its gradient, where it trains."""
        return self._embed_backward(trainable["embed_tokens"], batch, dx, accumulated)

    def loss(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch, scale
    ) -> Float[Array, ""]:
        """scale · Σ loss of the last layer's output."""
        return self._head_loss(self._head(trainable), self._head(frozen), x, batch, scale)

    def head_backward(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch, scale, sums: Params
    ):
        """(loss, dx, the head's parts of `sums` plus gradients); x is donated."""
        return self._head_backward(self._head(trainable), self._head(frozen), x, batch, scale, self._head(sums))

    def _head(self, tree: Params) -> Params:
        """The final norm and the output projection's part of a tree, tied or not."""
        return {name: tree[name] for name in self.head_parts}

    def _embed_and_rope(self, trainable: Params, frozen: Params, tokens, batch: Batch, key, scale):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen), "embed_tokens")

        def enter(weights, tokens, batch, key, scale):
            embed = merge_module(self._graphdefs.embed_tokens, *layout.gather(weights, stored))
            cos, sin = rope_tables(batch.segments.positions, self._config.rope, self._config.head_dim)
            count = len(self._graphdefs.layers)
            keys = [None] * count if key is None else list(jax.random.split(key, count))
            return embed(tokens, self._dtype), cos, sin, keys, self._layers_router_losses(batch, scale)

        rows, whole = layout.batch_spec, PartitionSpec()
        specs, results = (stored, rows, rows, whole, whole), (rows, rows, rows, whole, whole)
        return layout.run(enter, specs, results)((trainable, frozen), tokens, batch, key, scale)

    def _layers_router_losses(self, batch: Batch, scale) -> RouterLosses | None:
        """What a layer's router losses count: the mean over layers, and over micro-batches by their targets."""
        moe = self._config.moe
        if self._router_losses is None or moe is None or scale is None:
            return None
        share = scale * psum(batch.loss_weights.sum(), *BATCH_AXES) / sum(moe.sparse_layers)
        return RouterLosses(*(share * coefficient for coefficient in self._router_losses))

    def _embed_gradients(self, trainable: Params, batch: Batch, dx, accumulated: Params | None) -> Params:
        if not trainable:
            return {}
        layout, prefix = self._layout, "embed_tokens"
        stored, summands = layout.param_specs(trainable, prefix), layout.grad_specs(trainable, prefix)

        def backward(trainable, batch, dx, accumulated):
            def embed(trainable):
                return merge_module(self._graphdefs.embed_tokens, trainable)(batch.tokens, self._dtype)

            # Only the shape of what is gathered matters, and the dtype: rows of frequent tokens are long sums.
            whole = Layout(layout.mesh, jnp.float32).gather(trainable, stored)
            (gradients,) = jax.vjp(embed, whole)[1](dx)
            return add_trees(accumulated, layout.reduce_scatter_grads(gradients, stored, prefix))

        specs = (stored, layout.batch_spec, layout.batch_spec, None if accumulated is None else summands)
        return layout.run(backward, specs, summands)(trainable, batch, dx, accumulated)

    def _loss(self, trainable: Params, frozen: Params, x, batch: Batch, scale):
        """Every device's share of the loss."""
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))

        def loss(weights, x, batch, scale):
            trainable, frozen = layout.gather(weights, stored)
            return layout.stack(share(self._own_loss(trainable, frozen, x, batch, scale), "tensor"))

        specs = (stored, layout.batch_spec, layout.batch_spec, PartitionSpec())
        return layout.run(loss, specs, layout.every)((trainable, frozen), x, batch, scale)

    def _loss_and_gradients(self, trainable, frozen, x, batch, scale, accumulated):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))
        summands = layout.grad_specs(trainable)

        def backward(weights, x, batch, scale, accumulated):
            differentiate = jax.value_and_grad(self._own_loss, argnums=(0, 2))
            loss, (gradients, dx) = differentiate(*layout.gather(weights, stored), x, batch, scale)
            gradients = layout.reduce_scatter_grads(gradients, stored[0])
            loss = layout.stack(share(loss, "tensor"))
            return loss, dx, {n: add_trees(accumulated[n], gradients[n]) for n in self.head_parts}

        sums = {name: None if accumulated[name] is None else summands[name] for name in self.head_parts}
        specs = (stored, layout.batch_spec, layout.batch_spec, PartitionSpec(), sums)
        results = (layout.every, layout.batch_spec, summands)
        return layout.run(backward, specs, results)((trainable, frozen), x, batch, scale, accumulated)

    def _own_loss(self, trainable: Params, frozen: Params, x, batch: Batch, scale):
        """scale · Σ loss of a device's rows."""
        graphs = {"norm": self._graphdefs.norm, self.head_parts[1]: self._graphdefs.output}
        norm, output = (merge_module(graphs[name], trainable[name], frozen[name]) for name in self.head_parts)
        flat = norm(x).reshape(-1, x.shape[-1])
        loss = linear_cross_entropy(flat, output.weight[...], batch.targets.ravel(), batch.loss_weights.ravel())
        return loss * scale
