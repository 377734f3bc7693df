"""Differentiate a layer inside one program and apply its gradient in another: the residuals between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Literal
from jaxtyping import Array, Float

from jaxglue.engine.policy import RematPolicy
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import Params
from jaxglue.ops.names import ATTENTION_OUT, LAYER_INPUT

_ARGUMENT, _SAVED, _OFFLOADED = range(3)

LayerInputs = tuple[Params, Params, Float[Array, "B T D"], PackedContext]
"""Trainable and frozen parameters, hidden states, context."""
Layer = Callable[[Params, Params, Float[Array, "B T D"], PackedContext], Float[Array, "B T D"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """Arrays of a layer's vjp function other than the layer's inputs, each once."""

    saved: list[Array]
    """Kept on the device."""
    offloaded: list[Array]
    """Sent to the host by the policy."""
    treedef: Any = field(metadata={"static": True})
    sources: tuple[tuple[int, int, tuple[int, ...]], ...] = field(metadata={"static": True})
    """For every leaf of the vjp function: (input, saved or offloaded; index there; shape)."""
    attention: int | None = field(default=None, metadata={"static": True})
    """The leaf that is attention's output, where it was looked for."""

    @property
    def attention_out(self) -> Array | None:
        """Return attention's output, None where it is not kept; of any shape."""
        if self.attention is None:
            return None
        kind, index, _ = self.sources[self.attention]
        return (self.saved if kind == _SAVED else self.offloaded)[index]

    def with_offloaded(self, offloaded: list[Array]) -> "Residuals":
        """Return the residuals with copies of the offloaded arrays."""
        return replace(self, offloaded=offloaded)

    def vjp(self, inputs: LayerInputs) -> Callable:
        """Rebuild the vjp function from the forward pass's inputs: dy → (dtrainable, dx)."""
        arrays = (jax.tree.leaves(inputs), self.saved, self.offloaded)
        leaves = [arrays[kind][index].reshape(shape) for kind, index, shape in self.sources]
        return jax.tree.unflatten(self.treedef, leaves)


def differentiate(
    layer: Layer, policy: RematPolicy, inputs: LayerInputs, *, find_attention: bool = False
) -> tuple[Float[Array, "B T D"], Residuals]:
    """Run a layer under a policy; return its output and the residuals of its gradient to parameters and x.

    Inputs are never copied into the residuals: the backward pass gets them again. With `find_attention` the residuals
    know attention's output.
    """
    y, vjp = _vjp(policy.wrap(layer), inputs)
    leaves, treedef = jax.tree.flatten(vjp)
    ids = _value_ids(layer, inputs) if policy.saved is None else list(map(id, jax.tree.leaves((inputs, vjp))))
    on_host = _offloaded_leaves(layer, policy, inputs) if policy.offloads_residuals else [False] * len(leaves)
    known = {value: (_ARGUMENT, index) for index, value in enumerate(ids[: -len(leaves)])}
    kept: dict[int, list[Array]] = {_SAVED: [], _OFFLOADED: []}
    sources = []
    for leaf, value, offload in zip(leaves, ids[-len(leaves) :], on_host, strict=True):
        if value not in known:
            kind = _OFFLOADED if offload else _SAVED
            known[value] = kind, len(kept[kind])
            kept[kind].append(leaf)
        sources.append((*known[value], leaf.shape))
    attention = _attention_leaf(layer, policy, inputs) if find_attention else None
    return y, Residuals(kept[_SAVED], kept[_OFFLOADED], treedef, tuple(sources), attention)


def _attention_leaf(layer: Layer, policy: RematPolicy, inputs: LayerInputs) -> int | None:
    """Return the leaf of the vjp function that is attention's output, by offloading nothing else."""
    if not policy.keeps_attention:
        return None
    kept = (policy.saved or frozenset()) | policy.offloaded
    only = RematPolicy(saved=kept - {ATTENTION_OUT, LAYER_INPUT}, offloaded=frozenset({ATTENTION_OUT}))
    found = _offloaded_leaves(layer, only, inputs)
    return found.index(True) if True in found else None


def _vjp(layer: Layer, inputs: LayerInputs) -> tuple[Array, Callable]:
    trainable, frozen, x, context = inputs
    return jax.vjp(lambda trainable, x: layer(trainable, frozen, x, context), trainable, x)


def _value_ids(layer: Layer, inputs: LayerInputs) -> list[int]:
    """Return an id for every input and leaf of the vjp function, equal for equal values.

    Without `jax.checkpoint` a leaf may be an input, or another leaf, under another name or in another shape.
    """
    jaxpr = jax.make_jaxpr(lambda *inputs: jax.tree.leaves(_vjp(layer, inputs)[1]))(*inputs).jaxpr
    same = {result: operand for eqn in jaxpr.eqns for result, operand in _passed_through(eqn)}

    def origin(value):
        while not isinstance(value, Literal) and value in same:
            value = same[value]
        return id(value)

    return [origin(value) for value in (*jaxpr.invars, *jaxpr.outvars)]


def _passed_through(eqn) -> Iterator[tuple[Any, Any]]:
    """Yield (result, operand) wherever an equation's result is its operand."""
    if eqn.primitive.name in ("name", "reshape"):
        yield eqn.outvars[0], eqn.invars[0]
    elif eqn.primitive.name == "custom_vjp_call":
        inner = eqn.params["call_jaxpr"].jaxpr
        operands = dict(zip(inner.invars, eqn.invars, strict=True))
        for outer, value in zip(eqn.outvars, inner.outvars, strict=True):
            if not isinstance(value, Literal) and value in operands:
                yield outer, operands[value]


def _offloaded_leaves(layer: Layer, policy: RematPolicy, inputs: LayerInputs) -> list[bool]:
    """Ask `jax.checkpoint` which leaves of the vjp function its own offloading would send to the host."""

    def leaves(trainable, x):
        return jax.tree.leaves(_vjp(policy.wrap_with_offload(layer), (trainable, inputs[1], x, inputs[3]))[1])

    avals = jax.make_jaxpr(leaves)(inputs[0], inputs[2]).out_avals
    return [aval.memory_space == jax.memory.Space.Host for aval in avals]
