"""Programs of several layers, where weights and saved values stay on the device.

A small model's layer computes for less time than its dispatch takes; compile time grows with the layers in a program.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from jaxglue.engine.compiler import jit_exchanging, jit_step
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.saved import SavedLayer
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.sharding.gather import gather_alone, merge_gathered, select_to_gather
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout

_Layers = list[Params]
"""Parameters of consecutive layers."""
_Sums = list[Params | None]
"""Gradients of layers, accumulated so far."""


def why_not_grouped(policies: Sequence[RematPolicy], *, stream_weights: bool) -> str | None:
    """Return why layers need programs of their own; None where they may share one."""
    if stream_weights:
        return "weights are streamed from host memory"
    if any(policy.offloaded or policy.drops_input for policy in policies):
        return "values are offloaded, or layers' inputs are dropped"
    return None


def check_grouped(size: int, policies: Sequence[RematPolicy], *, stream_weights: bool) -> None:
    """Raise ValueError where `size` layers cannot share a program."""
    reason = why_not_grouped(policies, stream_weights=stream_weights)
    if size > 1 and reason:
        raise ValueError(f"--layers-per-program {size} is for GPUs that keep everything, but {reason}: use 1")


class GroupFunctions:
    """Compiled `forward`, `backward` and `apply` of consecutive layers.

    Trees of layers are lists. Contexts are those of the group's layers, as `_share` splits them.
    """

    def __init__(self, layers: Sequence[LayerFunctions], layout: Layout):
        self._layers, self._layout = layers, layout
        self._recomputes = [layer.policy.saved is not None for layer in layers]
        jit = jit_exchanging if layout.gathers else jit_step
        self.forward = jit(self._forward, static_argnames=("treedefs", "constant"))
        self.backward = jit(self._backward, static_argnames="treedefs", donate_argnames="accumulated")
        self.apply = jit(self._apply, static_argnames="treedefs")

    def _apply(self, trainable: _Layers, frozen: _Layers, x: Array, shared: list, keys: list, treedefs: tuple) -> Array:
        """Return the last layer's output."""
        contexts, weights = _contexts(shared, keys, treedefs), GatheredWeights(self._layout, trainable, frozen)
        for layer, context in zip(self._layers, contexts, strict=True):
            x, weights.gathered = layer.apply(*weights.take(), _round(x), context, weights.following)
        return _round(x)

    def _forward(
        self, trainable: _Layers, frozen: _Layers, x: Array, shared: list, keys: list, treedefs: tuple, constant: bool
    ):
        """Return (the last layer's output, every layer's saved values without the first one's input)."""
        saved: list[SavedLayer] = []
        contexts, weights = _contexts(shared, keys, treedefs), GatheredWeights(self._layout, trainable, frozen)
        for layer, context in zip(self._layers, contexts, strict=True):
            x, inputs = _round(x), weights.take()
            constant = constant and not saved
            y, residuals, weights.gathered = layer.forward(*inputs, x, context, weights.following, constant=constant)
            saved.append(SavedLayer(x if saved else None, residuals))
            x = y
        return _round(x), saved

    def _backward(
        self,
        saved: list[SavedLayer],
        trainable: _Layers,
        frozen: _Layers,
        x: Array,
        shared: list,
        keys: list,
        treedefs: tuple,
        dy: Array,
        accumulated: _Sums,
    ):
        """Return (dx, every layer's accumulated + dtrainable)."""
        gradients: list[Params] = []
        contexts = _contexts(shared, keys, treedefs)
        weights = GatheredWeights(self._layout, trainable[::-1], frozen[::-1])
        for i in reversed(range(len(self._layers))):
            layer_saved = saved[i] if i else SavedLayer(x, saved[0].residuals)
            # Or XLA would recompute several layers' values at once.
            layer_saved, dy = _round((layer_saved, dy)) if self._recomputes[i] else (layer_saved, _round(dy))
            train, fixed = weights.take()
            fixed, dy = _convert_again(fixed, dy)
            arguments = (
                layer_saved.residuals,
                train,
                fixed,
                layer_saved.x,
                contexts[i],
                dy,
                accumulated[i],
                weights.following,
            )
            dy, gradient, _, weights.gathered = self._layers[i].backward(*arguments)
            gradients.append(gradient)
        return _round(dy), gradients[::-1]


class GatheredWeights:
    """Weights of layers in the order in which they run, each gathered while the one before it computes.

    Args:
        layout: of the weights.
        trainable, frozen: as stored, in this order.
    """

    def __init__(self, layout: Layout, trainable: _Layers, frozen: _Layers):
        self._stored = list(zip(trainable, frozen, strict=True))
        self._to_gather = [select_to_gather(layout, layer) for layer in self._stored] + [None]
        self._next = 0
        self.gathered: Any = gather_alone(layout, self._to_gather[0]) if layout.gathers else None
        """Gathered weights of the next layer, which its predecessor's result sets."""

    def take(self) -> tuple[Params, Params]:
        """Return the next layer's trainable and frozen parameters."""
        self._next += 1
        return merge_gathered(self.gathered, self._stored[self._next - 1])

    @property
    def following(self) -> Any:
        """Return the weights that the layer taken gathers for the one after it."""
        return self._to_gather[self._next]


def _round[Tree](values: Tree) -> Tree:
    """Return values between layers rounded as between programs: XLA fuses nothing across."""
    return jax.lax.optimization_barrier(values)


def _convert_again(weights: Params, dy: Array) -> tuple[Params, Array]:
    """Return both so that XLA does not keep the values of all layers' quantized weights from the forward pass."""
    if all(leaf.dtype.itemsize > 1 for leaf in jax.tree.leaves(weights)):
        return weights, dy
    return jax.lax.optimization_barrier((weights, dy))


class _Group(NamedTuple):
    functions: GroupFunctions
    reference: GroupFunctions | None
    layers: slice


class LayerGroups:
    """Forward and backward passes of a stack, `size` layers in a program; equal groups share their programs.

    Args:
        layers: of the stack.
        reference: layers of a reference model on the same frozen weights, each run where the model's layer runs.
        size: layers in a program; the last program has those that remain.
        layout: of the model's arrays.
    """

    def __init__(
        self,
        layers: Sequence[LayerFunctions],
        reference: Sequence[LayerFunctions] | None,
        size: int,
        layout: Layout = SINGLE_DEVICE,
    ):
        self._layout = layout
        self._join = jax.jit(jax.lax.optimization_barrier, donate_argnums=0)
        self._programs: dict[tuple[LayerFunctions, ...], GroupFunctions] = {}
        self._groups = []
        for first in range(0, len(layers), size):
            part = slice(first, min(first + size, len(layers)))
            other = None if reference is None else self._functions(reference[part])
            self._groups.append(_Group(self._functions(layers[part]), other, part))

    def _functions(self, layers: Sequence[LayerFunctions]) -> GroupFunctions:
        return self._programs.setdefault(tuple(layers), GroupFunctions(layers, self._layout))

    @property
    def programs(self) -> list[Any]:
        """Return the compiled programs."""
        return [program for each in self._programs.values() for program in (each.forward, each.backward, each.apply)]

    def output(
        self,
        trainable: _Layers,
        frozen: _Layers,
        x: Float[Array, "B T D"],
        contexts: list,
        *,
        reference: bool,
    ) -> Float[Array, "B T D"]:
        """Return the output of the last layer, or of the reference model's; keep nothing for a backward pass."""
        for group in self._groups:
            arguments = frozen[group.layers], x, *_share(contexts[group.layers])
            if reference and group.reference:
                x = group.reference.apply(_nothing(arguments[0]), *arguments)
            else:
                x = group.functions.apply(trainable[group.layers], *arguments)
        return x

    def forward(
        self,
        trainable: _Layers,
        frozen: _Layers,
        x: Float[Array, "B T D"],
        contexts: list,
        z: Array | None,
        *,
        constant: bool,
    ) -> tuple[Float[Array, "B T D"], list[list[SavedLayer]], Array | None]:
        """Run all layers, and on `z` the reference model's; return both outputs, and between them each group's values.

        The backward pass leaves out the gradient to a constant x.
        """
        saved: list[list[SavedLayer]] = []
        for group in self._groups:
            arguments = frozen[group.layers], x, *_share(contexts[group.layers])
            y, values = group.functions.forward(trainable[group.layers], *arguments, constant=constant and not saved)
            if z is not None and group.reference:
                z = group.reference.apply(_nothing(arguments[0]), arguments[0], z, *arguments[2:])
                if self._layout.mesh:  # all devices must run programs with collectives in one order
                    y, z = self._join((y, z))
            saved.append([values[0]._replace(x=x), *values[1:]])
            x = y
        return x, saved, z

    def backward(
        self,
        saved: list[list[SavedLayer]],
        trainable: _Layers,
        frozen: _Layers,
        contexts: list,
        dy: list[Float[Array, "B T D"]],
        sums: _Sums,
        finish: Callable[[ParamKey, Params], None],
    ) -> Float[Array, "B T D"]:
        """Return the gradient to the first layer's input; empty `saved`, `dy` and `sums` on the way.

        Pass each layer's gradients to `finish`, the last layer's first.
        """
        dx = dy.pop()
        for group in reversed(self._groups):
            (first, *others), part = saved.pop(), group.layers
            inputs = trainable[part], frozen[part], first.x, *_share(contexts[part])
            accumulated, sums[part] = sums[part], [None] * len(sums[part])
            values = [first._replace(x=None), *others]
            dx, gradients = group.functions.backward(values, *inputs, dx, accumulated)
            del first, others, values, inputs, accumulated
            for i in _backwards(part):
                finish(i, gradients.pop())
        return dx


def _share(contexts: list) -> tuple[list[Array], list, tuple]:
    """Split contexts into their arrays, each once, dropout keys, and every treedef with the places of its arrays.

    Contexts share most arrays; embeddings that a layer has of its own, and segments in which images are seen, differ.
    """
    flat = [jax.tree.flatten(replace(context, dropout_key=None)) for context in contexts]
    shared = {id(leaf): leaf for leaves, _ in flat for leaf in leaves}
    place_of = {key: place for place, key in enumerate(shared)}
    treedefs = tuple((treedef, tuple(place_of[id(leaf)] for leaf in leaves)) for leaves, treedef in flat)
    return [*shared.values()], [context.dropout_key for context in contexts], treedefs


def _contexts(shared: list[Array], keys: list, treedefs: tuple) -> list:
    """Return the contexts that `_share` split."""
    contexts = [jax.tree.unflatten(treedef, [shared[place] for place in places]) for treedef, places in treedefs]
    return [replace(context, dropout_key=key) for context, key in zip(contexts, keys, strict=True)]


def _nothing(frozen: _Layers) -> _Layers:
    """Return the trainable parameters of layers that have none."""
    return [{}] * len(frozen)


def _backwards(part: slice) -> Iterator[int]:
    return reversed(range(part.start, part.stop))
