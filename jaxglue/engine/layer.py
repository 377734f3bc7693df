"""The compiled forward and backward of one layer type, and what passes between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array

from jaxglue.engine.compiler import jit_exchanging, jit_step
from jaxglue.engine.policy import RematPolicy
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import Params, merge_module
from jaxglue.ops.collectives import own_key
from jaxglue.sharding.layout import WHOLE, Layout

_ARGUMENT, _SAVED, _OFFLOADED = range(3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What a layer's backward pass needs beyond the forward pass's own arguments."""

    saved: list[Array]
    offloaded: list[Array]
    """Those that the policy sends to the host."""
    treedef: Any = field(metadata={"static": True})
    sources: tuple[tuple[int, int, tuple[int, ...]], ...] = field(metadata={"static": True})
    """For every leaf of the vjp function where it is: (argument, saved or offloaded; index there; the leaf's shape)."""

    def with_offloaded(self, offloaded: list[Array]) -> "Residuals":
        """The same with copies of the offloaded values."""
        return replace(self, offloaded=offloaded)


class LayerFunctions:
    """The compiled forward and backward of one layer type under one policy.

    On a mesh each is one program of every device. Where weights are stored in parts, it also gathers those of the layer
    whose turn is next (`ahead`: the parts of its trainable and frozen parameters), while this one computes.
    """

    def __init__(self, graph, policy: RematPolicy, layout: Layout = WHOLE):
        self._graph, self._layout = graph, layout
        self.policy = policy
        jit = jit_exchanging if layout.gathers else jit_step
        self.forward = jit(self._forward)
        # dy is not donated: dx would take its place, and XLA copy dy for matmuls that it schedules after dx.
        self.backward = jit(self._backward, donate_argnames="accumulated")
        self.apply = jit(self._apply)

    def _apply(self, trainable: Params, frozen: Params, x, context: PackedContext, ahead=None):
        """(y, the next layer's parameters)."""

        def apply(_, *arguments):
            return (self._layer(*arguments),)

        arguments = (trainable, frozen, x, context)
        return self._run(apply, arguments, self._specs(*arguments), (self._layout.batch_spec,), ahead)

    def _forward(self, trainable: Params, frozen: Params, x, context: PackedContext, ahead=None):
        """(y, residuals, the next layer's parameters)."""
        layout, arguments = self._layout, (trainable, frozen, x, context)

        def forward(_, *arguments):
            y, residuals = self._vjp(*arguments)
            return y, layout.stack(residuals)

        return self._run(forward, arguments, self._specs(*arguments), (layout.batch_spec, layout.every), ahead)

    def _backward(self, residuals: Residuals, trainable, frozen, x, context, dy, accumulated, ahead=None):
        """(dx, accumulated + dtrainable, a scalar that is there when the layer is done, parameters of the next)."""
        layout, forward_arguments = self._layout, (trainable, frozen, x, context)
        stored, summands = layout.param_specs(trainable), layout.grad_specs(trainable)

        def backward(gathered, residuals, forward_arguments, dy, accumulated):
            residuals = layout.unstack(residuals)
            places = (jax.tree.leaves(forward_arguments), residuals.saved, residuals.offloaded)
            leaves = [places[place][index].reshape(shape) for place, index, shape in residuals.sources]
            dtrainable, dx = jax.tree.unflatten(residuals.treedef, leaves)(dy)
            gradients = add_trees(accumulated, layout.reduce_scatter_grads(after(gathered, dtrainable), stored))
            return dx, gradients, layout.stack(dx[(0,) * dx.ndim])

        specs = (
            layout.every,
            self._specs(*forward_arguments),
            layout.batch_spec,
            None if accumulated is None else summands,
        )
        results = (layout.batch_spec, summands, layout.every)
        return self._run(backward, (residuals, forward_arguments, dy, accumulated), specs, results, ahead)

    def _run(self, function: Callable, arguments: tuple, specs: tuple, results: tuple, ahead: Params | None) -> tuple:
        """The function's results, on each device, and the gathered parameters, which are its first argument too."""
        layout, stored = self._layout, self._layout.param_specs(ahead)

        def program(ahead, *arguments):
            gathered = layout.gather(ahead, stored)
            return *function(gathered, *arguments), gathered

        return layout.run(program, (stored, *specs), (*results, layout.gathered_specs(ahead)))(ahead, *arguments)

    def _specs(self, trainable: Params, frozen: Params, x, context: PackedContext) -> tuple:
        layout = self._layout
        return (
            layout.gathered_specs(trainable),
            layout.gathered_specs(frozen),
            layout.batch_spec,
            layout.context(context),
        )

    def _layer(self, trainable: Params, frozen: Params, x, context: PackedContext):
        if context.dropout_key is not None:
            context = replace(context, dropout_key=own_key(context.dropout_key))
        return merge_module(self._graph, trainable, frozen)(x, context)

    def _vjp(self, trainable: Params, frozen: Params, x, context: PackedContext):
        """(y, residuals): weights and context are not differentiated and never copied into the residuals."""

        def layer(trainable, x):
            return self.policy.wrap(self._layer)(trainable, frozen, x, context)

        y, vjp = jax.vjp(layer, trainable, x)
        leaves, treedef = jax.tree.flatten(vjp)
        inputs = (trainable, frozen, x, context)
        keys = self._identities(inputs) if self.policy.saved is None else list(map(id, jax.tree.leaves((inputs, vjp))))
        places = {key: (_ARGUMENT, index) for index, key in enumerate(keys[: -len(leaves)])}
        on_host = self._on_host(*inputs) if self.policy.offloads_residuals else [False] * len(leaves)
        kept: dict[int, list[Array]] = {_SAVED: [], _OFFLOADED: []}
        sources = []
        for leaf, key, offload in zip(leaves, keys[-len(leaves) :], on_host, strict=True):
            if key not in places:
                place = _OFFLOADED if offload else _SAVED
                places[key] = place, len(kept[place])
                kept[place].append(leaf)
            sources.append((*places[key], leaf.shape))
        return y, Residuals(kept[_SAVED], kept[_OFFLOADED], treedef, tuple(sources))

    def _identities(self, inputs: tuple) -> list:
        """For every input and leaf of the vjp function of the layer itself something that is equal for equal values.

        Without `jax.checkpoint` a leaf may be an input, or another leaf, under another name or in another shape.
        """

        def leaves(trainable, frozen, x, context):
            return jax.tree.leaves(
                jax.vjp(lambda *moving: self._layer(moving[0], frozen, moving[1], context), trainable, x)[1]
            )

        jaxpr = jax.make_jaxpr(leaves)(*inputs).jaxpr
        same = {made: origin for eqn in jaxpr.eqns for made, origin in _passed_on(eqn)}

        def origin(value):
            while not isinstance(value, Literal) and value in same:
                value = same[value]
            return id(value)

        return [origin(value) for value in (*jaxpr.invars, *jaxpr.outvars)]

    def _on_host(self, trainable, frozen, x, context) -> list[bool]:
        """For every leaf of the vjp function whether the policy offloads it: whether `jax.checkpoint` itself would."""

        def residuals(trainable, x):
            layer = self.policy.wrap_with_offload(self._layer)
            vjp = jax.vjp(lambda trainable, x: layer(trainable, frozen, x, context), trainable, x)[1]
            return jax.tree.leaves(vjp)

        avals = jax.make_jaxpr(residuals)(trainable, x).out_avals
        return [aval.memory_space == jax.memory.Space.Host for aval in avals]


def _passed_on(eqn) -> Iterator[tuple[Any, Any]]:
    """(result, operand) wherever an equation's result is its operand."""
    if eqn.primitive.name in ("name", "reshape"):
        yield eqn.outvars[0], eqn.invars[0]
    elif eqn.primitive.name == "custom_vjp_call":
        inner = eqn.params["call_jaxpr"].jaxpr
        operands = dict(zip(inner.invars, eqn.invars, strict=True))
        for outer, value in zip(eqn.outvars, inner.outvars, strict=True):
            if not isinstance(value, Literal) and value in operands:
                yield outer, operands[value]


def after(first: Any, tree: Params) -> Params:
    """The tree, each of whose arrays exists when `first` does.

    XLA would leave gathering, for which it has the whole program, for the end, where gradients have to be sent.
    """
    if not jax.tree.leaves(first):
        return tree
    return jax.tree.map(lambda leaf: jax.lax.optimization_barrier((leaf, first))[0], tree)


def add_trees(accumulated: Params | None, gradients: Params) -> Params:
    """The sum, or the gradients alone where nothing has been accumulated."""
    return gradients if accumulated is None else jax.tree.map(jnp.add, accumulated, gradients)
