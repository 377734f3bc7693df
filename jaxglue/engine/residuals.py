"""Differentiate a layer inside one program and apply its gradient in another: the residuals between them."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, Float

from jaxglue.engine.policy import RematPolicy
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import Params
from jaxglue.ops.names import ATTENTION_OUT

_ARGUMENT, _SAVED, _OFFLOADED = range(3)

LayerInputs = tuple[Params, Params, Float[Array, "B T D"], PackedContext]
"""Trainable and frozen parameters, hidden states, context."""
Layer = Callable[[Params, Params, Float[Array, "B T D"], PackedContext], Float[Array, "B T D"]]


@dataclass(frozen=True, eq=False)
class VjpForm:
    """How a layer's vjp function is made of arrays."""

    treedef: Any
    sources: tuple[tuple[int, int, tuple[int, ...]], ...]
    """For every leaf of the vjp function: (input, saved or offloaded; index there; shape)."""
    attention: int | None = None
    """The leaf that is attention's output, where it was looked for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """Arrays of a layer's vjp function other than the layer's inputs, each once."""

    saved: list[Array]
    """Kept on the device."""
    offloaded: list[Array]
    """Sent to the host by the policy."""
    form: "weakref.ref[VjpForm]" = field(metadata={"static": True})
    """JAX's caches, which outlive a run, hold the types of a program's arguments, and should not hold its traces."""

    @property
    def _form(self) -> VjpForm:
        form = self.form()
        assert form is not None, "residuals outlive the programs that made them"
        return form

    @property
    def attention_out(self) -> Array | None:
        """Return attention's output, None where it is not kept; of any shape."""
        form = self._form
        if form.attention is None:
            return None
        kind, index, _ = form.sources[form.attention]
        return (self.saved if kind == _SAVED else self.offloaded)[index]

    def with_offloaded(self, offloaded: list[Array]) -> "Residuals":
        """Return the residuals with copies of the offloaded arrays."""
        return replace(self, offloaded=offloaded)

    def vjp(self, inputs: LayerInputs) -> Callable:
        """Rebuild the vjp function from the forward pass's inputs: dy → (dtrainable, dx)."""
        arrays = (jax.tree.leaves(inputs), self.saved, self.offloaded)
        leaves = [arrays[kind][index].reshape(shape) for kind, index, shape in self._form.sources]
        return jax.tree.unflatten(self._form.treedef, leaves)


def differentiate(
    layer: Layer, policy: RematPolicy, inputs: LayerInputs, forms: list[VjpForm], *, find_attention: bool = False
) -> tuple[Float[Array, "B T D"], Residuals]:
    """Run a layer under a policy; return its output and the residuals of its gradient to parameters and x.

    Inputs are never copied into the residuals: the backward pass gets them again. With `find_attention` the residuals
    know attention's output. They are good for as long as `forms`, to which their form is added.
    """
    y, vjp = _vjp(policy.wrap(layer), inputs)
    leaves, treedef = jax.tree.flatten(vjp)
    ids = _value_ids(layer, inputs) if policy.saved is None else list(map(id, jax.tree.leaves((inputs, vjp))))
    find_attention = find_attention and policy.keeps_attention
    looked_for = policy.offloads_residuals or find_attention
    names: list[str | None] = _leaf_names(policy.wrap(layer), inputs) if looked_for else [None] * len(leaves)
    source_of = {value: (_ARGUMENT, index) for index, value in enumerate(ids[: -len(leaves)])}
    stored: dict[int, list[Array]] = {_SAVED: [], _OFFLOADED: []}
    sources = []
    for leaf, value, name in zip(leaves, ids[-len(leaves) :], names, strict=True):
        if value not in source_of:
            kind = _OFFLOADED if name in policy.offloaded else _SAVED
            source_of[value] = kind, len(stored[kind])
            stored[kind].append(leaf)
        sources.append((*source_of[value], leaf.shape))
    attention = names.index(ATTENTION_OUT) if find_attention and ATTENTION_OUT in names else None
    forms.append(VjpForm(treedef, tuple(sources), attention))
    return y, Residuals(stored[_SAVED], stored[_OFFLOADED], weakref.ref(forms[-1]))


def _vjp(layer: Layer, inputs: LayerInputs) -> tuple[Array, Callable]:
    """Return a layer's output, and dy → (dtrainable, dx); dx is a pair with the gradient to the layer's own input."""
    trainable, frozen, x, context = inputs
    if getattr(context, "trains_input", False):

        def run(trainable: Params, both: tuple[Array, Array]) -> Array:
            return layer(trainable, frozen, both[0], replace(context, layer_input=both[1]))

        return jax.vjp(run, trainable, (x, context.layer_input))
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


def _leaf_names(layer: Layer, inputs: LayerInputs) -> list[str | None]:
    """Return the name of `jaxglue.ops.names` by which each leaf of the vjp function is kept, None for the others."""
    trainable, frozen, x, context = inputs

    def leaves(trainable, x):
        return jax.tree.leaves(_vjp(layer, (trainable, frozen, x, context))[1])

    return result_names(jax.make_jaxpr(leaves)(trainable, x).jaxpr)


def result_names(jaxpr: Jaxpr) -> list[str | None]:
    """Return the name of `jaxglue.ops.names` that a layer gives each of a program's results, None without one."""
    sources: dict[Any, tuple[Any, int]] = {
        result: (eqn, index) for eqn in jaxpr.eqns for index, result in enumerate(eqn.outvars)
    }

    def name_of(value) -> str | None:
        if isinstance(value, Literal) or value not in sources:
            return None
        eqn, index = sources[value]
        match eqn.primitive.name:
            case "name":
                return eqn.params["name"]
            case "reduce_precision" | "reshape":
                return name_of(eqn.invars[0])
            case "broadcast_in_dim" if value.aval.size == eqn.invars[0].aval.size:
                return name_of(eqn.invars[0])
            case "jit":
                return result_names(eqn.params["jaxpr"].jaxpr)[index]
        return None

    return list(map(name_of, jaxpr.outvars))
