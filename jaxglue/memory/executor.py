"""Runs a model layer by layer: one compiled forward and one compiled backward per layer type, dispatched in order.

Compile time is one layer's, whatever the depth, and the program rather than the compiler decides what a layer keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.losses import linear_cross_entropy
from jaxglue.memory.policy import RematPolicy
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.parameters import ModelStructure, Tree, merge_module
from jaxglue.rope import rope_tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What a layer's backward pass needs beyond the forward pass's own arguments."""

    values: list[Array]
    treedef: Any = field(metadata={"static": True})
    sources: tuple[int | None, ...] = field(metadata={"static": True})
    """For every leaf of the vjp function the argument that it is, None for the next of `values`."""


class LayerFunctions:
    """The compiled forward and backward of one layer type."""

    def __init__(self, graph, policy: RematPolicy):
        self._graph = graph
        self._policy = policy
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward, donate_argnames=("dy", "accumulated"))
        self.apply = jax.jit(self._apply)

    def _apply(self, trainable: Tree, frozen: Tree, x, context: PackedContext):
        return merge_module(self._graph, trainable, frozen)(x, context)

    def _forward(self, trainable: Tree, frozen: Tree, x, context: PackedContext):
        """(y, residuals): weights and context are not differentiated and never copied into the residuals."""

        def layer(trainable, x):
            return self._policy.wrap(self._apply)(trainable, frozen, x, context)

        y, vjp = jax.vjp(layer, trainable, x)
        leaves, treedef = jax.tree.flatten(vjp)
        arguments = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((trainable, frozen, x, context)))}
        sources = tuple(arguments.get(id(leaf)) for leaf in leaves)
        values = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return y, Residuals(values, treedef, sources)

    def _backward(self, residuals: Residuals, trainable, frozen, x, context, dy, accumulated):
        """(dx, accumulated + dtrainable)."""
        arguments = jax.tree.leaves((trainable, frozen, x, context))
        values = iter(residuals.values)
        leaves = [next(values) if source is None else arguments[source] for source in residuals.sources]
        dtrainable, dx = jax.tree.unflatten(residuals.treedef, leaves)(dy)
        return dx, add_trees(accumulated, dtrainable)


def add_trees(accumulated: Tree | None, gradients: Tree) -> Tree:
    """The sum, or the gradients alone where nothing has been accumulated."""
    return gradients if accumulated is None else jax.tree.map(jnp.add, accumulated, gradients)


class Executor:
    """Loss and gradients of a model over the micro-batches of one optimiser step.

    Args:
        structure: the modules, as `split_model` gives them.
        config: the model's shape.
        policy: what each layer keeps for its backward pass.
        dtype: the dtype of activations and matmuls.
        attention: the attention backend.
    """

    def __init__(
        self,
        structure: ModelStructure,
        config: DecoderConfig,
        *,
        policy: RematPolicy,
        dtype=jnp.bfloat16,
        attention: str = "auto",
    ):
        self._structure, self._config, self._dtype, self._attention = structure, config, dtype, attention
        self._layer_types = {graph: LayerFunctions(graph, policy) for graph in structure.layers}
        self._layers = [self._layer_types[graph] for graph in structure.layers]
        self._head_parts = ("norm", "embed_tokens" if structure.lm_head is None else "lm_head")
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like))
        self._prologue = jax.jit(self._embed_and_rope)
        self._embed_backward = jax.jit(self._embed_gradients, donate_argnames="accumulated")
        self._head_loss = jax.jit(self._loss)
        self._head_backward = jax.jit(self._loss_and_gradients, donate_argnames=("x", "accumulated"))

    def loss_and_gradients(
        self,
        trainable: Tree,
        frozen: Tree,
        micro_batches: Sequence[Batch],
        total_weight: float,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Tree]:
        """Σ loss / total_weight over all micro-batches, and its gradient to the trainable parameters.

        Args:
            trainable, frozen: parameter trees of `split_model`.
            micro_batches: batches of one shape.
            total_weight: Σ of all loss weights, so that accumulation is exactly the large batch.
            key: for dropout; None drops nothing.
        """
        scale = np.float32(1.0 / total_weight)
        gradients = self._zeros(trainable) if len(micro_batches) > 1 else None
        losses = []
        for index, batch in enumerate(micro_batches):
            batch_key = None if key is None else jax.random.fold_in(key, index)
            loss, gradients = self._micro_batch(trainable, frozen, batch, scale, batch_key, gradients)
            losses.append(loss)
        return sum(losses[1:], start=losses[0]), gradients

    def loss(self, trainable: Tree, frozen: Tree, batch: Batch) -> Float[Array, ""]:
        """Σ loss over one batch, not divided by its weight; nothing is kept for a backward pass."""
        x, contexts = self._enter(trainable, frozen, batch, None)
        for i, layer in enumerate(self._layers):
            x = layer.apply(trainable["layers"][i], frozen["layers"][i], x, contexts[i])
        return self._head_loss(self._head(trainable), self._head(frozen), x, batch, np.float32(1))

    def compilations(self) -> int:
        """How many programs have been compiled; constant once a run is under way."""
        functions = [self._prologue, self._embed_backward, self._head_loss, self._head_backward]
        for layer in self._layer_types.values():
            functions += [layer.forward, layer.backward, layer.apply]
        return sum(function._cache_size() for function in functions)

    def _micro_batch(self, trainable, frozen, batch, scale, key, accumulated: Tree | None):
        """(loss, accumulated + gradients): every activation is dropped as soon as its layer's backward is dispatched."""
        x, contexts = self._enter(trainable, frozen, batch, key)
        inputs, residuals = [], []
        for i, layer in enumerate(self._layers):
            inputs.append(x)
            x, kept = layer.forward(trainable["layers"][i], frozen["layers"][i], x, contexts[i])
            residuals.append(kept)
        sums = accumulated or {**dict.fromkeys(trainable), "layers": [None] * len(self._layers)}
        loss, dx, head = self._head_backward(
            self._head(trainable), self._head(frozen), x, batch, scale, self._head(sums)
        )
        del x
        sums = {**sums, **head, "layers": list(sums["layers"])}
        for i in reversed(range(len(self._layers))):
            arguments = (trainable["layers"][i], frozen["layers"][i], inputs.pop(), contexts[i])
            dx, sums["layers"][i] = self._layers[i].backward(residuals.pop(), *arguments, dx, sums["layers"][i])
        sums["embed_tokens"] = self._embed_backward(trainable["embed_tokens"], batch, dx, sums["embed_tokens"])
        return loss, sums

    def _enter(self, trainable, frozen, batch: Batch, key) -> tuple[Array, list[PackedContext]]:
        """Embeds the tokens; every layer's context differs in its dropout key only."""
        x, cos, sin, keys = self._prologue(trainable["embed_tokens"], frozen["embed_tokens"], batch, key)
        shared = {"segments": batch.segments, "cos": cos, "sin": sin, "backend": self._attention}
        return x, [PackedContext(**shared, dropout_key=layer_key) for layer_key in keys]

    def _embed_and_rope(self, trainable: Tree, frozen: Tree, batch: Batch, key):
        x = merge_module(self._structure.embed_tokens, trainable, frozen)(batch.tokens, self._dtype)
        cos, sin = rope_tables(batch.segments.positions, self._config.rope, self._config.head_dim)
        count = len(self._layers)
        return x, cos, sin, [None] * count if key is None else list(jax.random.split(key, count))

    def _embed_gradients(self, trainable: Tree, batch: Batch, dx, accumulated: Tree | None) -> Tree:
        """Adds the gradient to the embedding, where it trains."""

        def embed(trainable):
            return merge_module(self._structure.embed_tokens, trainable)(batch.tokens, self._dtype)

        if not trainable:
            return {}
        (gradients,) = jax.vjp(embed, trainable)[1](dx)
        return add_trees(accumulated, gradients)

    def _head(self, tree: Tree) -> Tree:
        """The final norm and the output projection's part of a tree, tied or not."""
        return {name: tree[name] for name in self._head_parts}

    def _loss(self, trainable: Tree, frozen: Tree, x, batch: Batch, scale):
        graphs = {"norm": self._structure.norm, self._head_parts[1]: self._structure.output}
        norm, output = (merge_module(graphs[name], trainable[name], frozen[name]) for name in self._head_parts)
        flat = norm(x).reshape(-1, x.shape[-1])
        loss = linear_cross_entropy(flat, output.weight[...], batch.targets.ravel(), batch.loss_weights.ravel())
        return loss * scale

    def _loss_and_gradients(self, trainable, frozen, x, batch, scale, accumulated):
        """(loss, dx, accumulated + gradients to the head's trainable parameters)."""
        loss, (gradients, dx) = jax.value_and_grad(self._loss, argnums=(0, 2))(trainable, frozen, x, batch, scale)
        return loss, dx, {name: add_trees(accumulated[name], gradients[name]) for name in self._head_parts}
