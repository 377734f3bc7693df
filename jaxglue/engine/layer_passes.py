"""Forward and backward passes over a stack of layers, with the copies between device and host under their programs.

The executor, not the compiler, decides where residuals are kept and when they are copied: XLA delays copies to the host
until they save nothing, or serializes them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.host_buffers import Buffers
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.saved import SavedLayer, offload, restore_inputs
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.sharding.gather import gather_alone, merge_gathered, select_to_gather
from jaxglue.sharding.rules import Layout

_Weights = tuple[Params, Params]
"""Trainable and frozen parameters of a layer."""
_Saved = tuple[list[SavedLayer], list[_Weights]]
"""Every layer's values and weights for the backward pass."""


class LayerPasses:
    """Forward and backward passes of a stack, dispatched in order, with a program for each layer and pass.

    Args:
        layers: of the stack.
        reference: layers of a reference model on the same frozen weights, each run where the model's layer runs.
        layout: of the model's arrays.
        stream_weights: frozen weights of some layers are in pinned host memory or in files.
        prefetch_depth: layers by which copies from the host are requested ahead (see `LayerExecutor`).
        host_buffers: for offloaded values; JAX's pool by default.

    Raises:
        ValueError: values or weights need pinned host memory and the device has none.
    """

    def __init__(
        self,
        layers: Sequence[LayerFunctions],
        reference: Sequence[LayerFunctions] | None,
        layout: Layout,
        *,
        stream_weights: bool,
        prefetch_depth: int | None,
        host_buffers: Buffers | None,
    ):
        self._layers, self._reference, self._layout = layers, reference, layout
        self._stream_weights = stream_weights
        self._prefetch_depth = (
            transfer.default_prefetch_depth(stream_weights) if prefetch_depth is None else prefetch_depth
        )
        self._uses_host = stream_weights or any(layer.policy.offloaded for layer in layers)
        if self._uses_host:
            transfer.check_pinned_memory(jax.local_devices()[0])
        self._compiled: set[Any] = set()
        """Kinds of contexts on which all programs have run."""
        self._host_buffers, self._offload = host_buffers, partial(offload, buffers=host_buffers)
        self._gather = jax.jit(partial(gather_alone, layout))
        self._join = jax.jit(jax.lax.optimization_barrier, donate_argnums=0)

    def prepare_buffers(self, layer: LayerFunctions, x: Any, residuals: Any) -> None:
        """Pin buffers for the values of all layers of a type, by the shapes of one's."""
        if self._host_buffers is None or not layer.policy.offloaded:
            return
        sent = jax.tree.leaves((x if layer.policy.offloads_input else None, residuals.offloaded))
        stays = partial(transfer.keep_on_device, layers=len(self._layers), depth=self._prefetch_depth)
        leaving = sum(each is layer and not stays(index) for index, each in enumerate(self._layers))
        parts = [(math.prod(value.sharding.shard_shape(value.shape)), value.dtype.itemsize) for value in sent]
        self._host_buffers.prepare([count * size for count, size in parts] * leaving)

    def outputs(
        self,
        trainable: list[Params],
        frozen: list[Params],
        x: Float[Array, "B T D"],
        contexts: list[PackedContext],
        *,
        reference: bool,
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yield the output of each layer, or of the reference model's layers; keep nothing for a backward pass."""
        layers = self._reference if reference and self._reference is not None else self._layers
        running = self._run_ahead()
        stored = self.stored_weights(trainable, frozen)
        gathered = self.gather_first(stored)
        for layer, context in zip(layers, contexts, strict=True):
            weights = merge_gathered(gathered, stored.take())
            weights = ({}, weights[1]) if reference else weights
            x, gathered = layer.apply(*weights, x, context, select_to_gather(self._layout, stored.following))
            if self._stream_weights:
                running.add(x)
            del weights
            yield x

    def forward(
        self,
        trainable: list[Params],
        frozen: list[Params],
        x: Float[Array, "B T D"],
        contexts: list[PackedContext],
        z: Array | None,
        near_end: Callable[[], None],
    ) -> tuple[Float[Array, "B T D"], _Saved, Array | None]:
        """Run all layers, and on `z` the reference model's; offload residuals as soon as a layer is dispatched.

        Return both outputs, and between them values for `backward`. `near_end` is called some layers before the last.
        """
        saved: list[SavedLayer] = []
        held_weights: list[_Weights] = []
        compiles = _kind(contexts) not in self._compiled
        running = self._run_ahead(compiles=compiles)
        stored = self.stored_weights(trainable, frozen)
        gathered = self.gather_first(stored)
        for i, layer in enumerate(self._layers):
            weights = merge_gathered(gathered, stored.take())
            if i == max(len(self._layers) - transfer.HEAD_AHEAD, 0):
                near_end()
            to_gather = select_to_gather(self._layout, stored.following)
            y, residuals, gathered = layer.forward(*weights, x, contexts[i], to_gather)
            if z is not None and self._reference is not None:
                z, _ = self._reference[i].apply({}, weights[1], z, contexts[i])
                if self._layout.mesh:  # all devices must run programs with collectives in one order
                    y, z = self._join((y, z))
            stays = transfer.keep_on_device(i, len(self._layers), self._prefetch_depth)
            held_weights.append(weights if stays else (trainable[i], frozen[i]))
            saved.append(SavedLayer(x, residuals) if stays else self._offload(layer.policy, x, residuals))
            if self._uses_host or compiles:
                running.add((saved[-1].x, saved[-1].residuals.offloaded) if layer.policy.offloaded or stays else y)
            x = y
            del weights, y, residuals  # free this layer's buffers before the next copy is requested
        return x, (saved, held_weights), z

    def backward(
        self,
        saved: _Saved,
        trainable: list[Params],
        frozen: list[Params],
        contexts: list[PackedContext],
        dy: list[Float[Array, "B T D"]],
        sums: list[Params | None],
        finish: Callable[[ParamKey, Params], None],
        *,
        fed: int = 0,
    ) -> list[Float[Array, "B T D"]]:
        """Return the gradients to the first layer's input, to the outputs of the first `fed` layers, and to own inputs.

        Empty `saved`, `dy` and `sums` on the way, and pass each layer's gradients to `finish`, the last layer's first.
        """
        values, held_weights = saved
        moving = [self._stream_weights and transfer.is_on_host(layer) for layer in frozen]
        weights_ahead = self._prefetch_weights(held_weights, moving)
        functions = tuple(zip(self._layers, trainable, frozen, contexts, strict=True))
        restore = partial(restore_inputs, layers=functions, depth=self._prefetch_depth)
        compiles = (kind := _kind(contexts)) not in self._compiled
        running, count = self._run_ahead(compiles=compiles), len(values)
        values_ahead = self._prefetch_saved(values, restore)
        layers = transfer.Lookahead(zip(weights_ahead, values_ahead, strict=True), early=self._layout.gathers)
        gathered, dx, between, own = None, dy.pop(), deque[Array](), deque[Array]()
        if compiles:
            running.add(dx)
        for i in reversed(range(count)):
            if i < fed:
                between.appendleft(dx)
            stored, (x, residuals) = layers.take()
            weights = merge_gathered(gathered, stored)
            accumulated, sums[i] = sums[i], None
            to_gather = select_to_gather(self._layout, layers.following and layers.following[0])
            arguments = (residuals, *weights, x, contexts[i], dx, accumulated, to_gather)
            dx, gradients, done, gathered = self._layers[i].backward(*arguments)
            if isinstance(dx, tuple):
                dx, own_input = dx
                own.appendleft(own_input)
            finish(i, gradients)
            del stored, weights, x, residuals, to_gather, arguments, gradients, accumulated
            if self._uses_host or compiles:
                running.add(done)
        self._compiled.add(kind)
        return [dx, *between, *own]

    def stored_weights(self, trainable: list[Params], frozen: list[Params]) -> transfer.Lookahead[_Weights]:
        """Iterate over every layer's stored weights, prefetching those on the host."""
        layers = zip(trainable, frozen, strict=True)
        if not self._stream_weights:
            return transfer.Lookahead(iter(layers), early=self._layout.gathers)
        loads = (partial(transfer.request, layer) for layer in layers)
        depth = transfer.weights_prefetch_depth(self._prefetch_depth)
        moving = map(transfer.is_on_host, frozen)
        fetched = map(transfer.received, transfer.prefetch(loads, depth, moving))
        return transfer.Lookahead(fetched, early=self._layout.gathers)

    def gather_first(self, stored: transfer.Lookahead[_Weights]) -> Any:
        """Gather the first layer's weights in a program of their own."""
        return self._gather(select_to_gather(self._layout, stored.following)) if self._layout.gathers else None

    def _run_ahead(self, *, compiles: bool = False) -> transfer.RunAhead:
        """Return the limit of unfinished layers: none where the next one's program may be compiled.

        XLA compares algorithms of its matmuls meanwhile, on copies of their operands and results. These would need
        memory beside the temporary memory of programs under way, as the head's.
        """
        return transfer.RunAhead(transfer.RUN_AHEAD if self._prefetch_depth and not compiles else 0)

    def _prefetch_weights(self, held: list[_Weights], moving: list[bool]) -> Iterator[_Weights]:
        """Iterate over the layers' weights, the last first, prefetching those on the host; empty `kept` on the way."""
        loads = [lambda: transfer.request(held.pop())] * len(held)
        return map(transfer.received, transfer.prefetch(loads, self._prefetch_depth, reversed(moving)))

    def _prefetch_saved(
        self, saved: list[SavedLayer], restore: Callable[[list[SavedLayer]], None]
    ) -> Iterator[SavedLayer]:
        """Iterate over the layers' values, the last first, prefetching those on the host; empty `saved` on the way.

        A dropped input is computed when its layer's turn comes, as it takes memory.
        """
        ahead: deque[SavedLayer] = deque()
        while saved or ahead:
            while saved and len(ahead) <= self._prefetch_depth and (saved[-1].x is not None or not ahead):
                if saved[-1].x is None:
                    restore(saved)
                layer = saved.pop()
                ahead.append(transfer.to_device(layer) if self._uses_host else layer)
                del layer
            yield ahead.popleft()


def _kind(contexts: list[PackedContext]) -> Any:
    """Return a key that contexts share on which the same compiled programs run."""
    leaves, treedef = jax.tree.flatten(contexts[0])
    return treedef, tuple(getattr(leaf, "shape", ()) for leaf in leaves)
