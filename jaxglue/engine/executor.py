"""Run a model layer by layer: one compiled forward and one compiled backward per layer type, dispatched in order.

Compile time is one layer's at any depth, and the executor, not the compiler, decides where residuals are kept and when
they are copied: XLA delays copies to the host until they save nothing, or serializes them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.compiler import Program, jit_step
from jaxglue.engine.embed_head import EntryHead
from jaxglue.engine.host_buffers import HostBuffers
from jaxglue.engine.layer import LayerFunctions, layer_function
from jaxglue.engine.layer_groups import LayerGroups, check_grouped
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residuals import Layer
from jaxglue.engine.saved import SavedLayer, check_dropped_inputs, offload, restore_inputs
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ParamKey, Params, set_part
from jaxglue.ops.collectives import per_device
from jaxglue.sharding.gather import gather, merge_gathered, select_to_gather, sum_partials, zero_partials
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout

Update = Callable[[ParamKey, Params], None]
"""Called with a part of the parameters (a name, or a layer's index) and its finished gradients."""

_Weights = tuple[Params, Params]
"""Trainable and frozen parameters of a layer."""
_Backward = Callable[[list[Array], list[Params | None], Update], Array]
"""([gradient to the last layer's output], layers' sums, receiver of their gradients) → gradient to the first input.

The list is emptied, so that no caller's variable keeps the gradient on the device.
"""


class LayerExecutor:
    """Compute loss and gradients over the micro-batches of one optimizer step.

    Args:
        layers: modules without parameters, or functions; equal ones share their compiled programs.
        entry_head: the functions around them.
        policy: remat policy of all layers, or one for each.
        layout: of the model's arrays.
        stream_weights: frozen weights of some layers are in pinned host memory or in files.
        reference: layers of a reference on the same frozen weights, each run where the model's layer runs; their last
            output enters the batch by `EntryHead.with_reference`.
        prefetch_depth: layers by which copies from the host are requested ahead: 1 is double buffering; 0 runs copies
            and layers one after another; None chooses (`default_prefetch_depth`).
        layers_per_program: consecutive layers dispatched as one program, on one device that keeps everything. With all
            of several layers it is the micro-batch's only program, unless embeddings are on the host.
        host_buffers: of the device, for offloaded values; JAX's pool by default.

    Raises:
        ValueError: the number of policies differs from the number of layers, the policy or the weights need pinned host
            memory and the device has none, or layers that need programs of their own are to share one.
    """

    def __init__(
        self,
        layers: Sequence[nnx.GraphDef | Layer],
        entry_head: EntryHead,
        *,
        policy: RematPolicy | Sequence[RematPolicy],
        layout: Layout = SINGLE_DEVICE,
        stream_weights: bool = False,
        reference: Sequence[nnx.GraphDef] | None = None,
        prefetch_depth: int | None = None,
        layers_per_program: int = 1,
        host_buffers: HostBuffers | None = None,
    ):
        policies = [policy] * len(layers) if isinstance(policy, RematPolicy) else list(policy)
        if len(policies) != len(layers):
            raise ValueError(f"{len(policies)} remat policies for {len(layers)} layers: give one for each")
        self._layout, self._entry_head = layout, entry_head
        check_dropped_inputs(policies, meshed=layout.mesh is not None)
        replayed = any(policy.drops_input for policy in policies)
        functions = {layer: layer_function(layer) for layer in set(layers)}
        types = [(functions[layer], policy) for layer, policy in zip(layers, policies, strict=True)]
        self._layer_types = {kind: LayerFunctions(*kind, layout, replayed=replayed) for kind in types}
        self._layers = [self._layer_types[kind] for kind in types]
        reference_types = {layer: LayerFunctions(layer, policies[0], layout) for layer in reference or ()}
        self._reference = None if reference is None else [reference_types[layer] for layer in reference]
        self._groups: LayerGroups | None = None
        devices = layout.mesh.size if layout.mesh else 1
        check_grouped(layers_per_program, policies, devices=devices, stream_weights=stream_weights)
        if layers_per_program > 1:
            self._groups = LayerGroups(self._layers, self._reference, layers_per_program)
        self._is_whole = 1 < len(layers) <= layers_per_program
        self._whole = self._make_whole()
        self._stream_weights = stream_weights
        self._prefetch_depth = (
            transfer.default_prefetch_depth(stream_weights) if prefetch_depth is None else prefetch_depth
        )
        self._uses_host = stream_weights or any(policy.offloaded for policy in policies)
        if self._uses_host:
            transfer.check_pinned_memory(jax.local_devices()[0])
        self._host_buffers, self._offload = host_buffers, partial(offload, buffers=host_buffers)
        # Zeros of unread arguments would not be committed to their device, and programs compiled for both kinds.
        self._zero_partials = jax.jit(partial(zero_partials, layout), keep_unused=True)
        self._sum_partials = jax.jit(partial(sum_partials, layout), static_argnames="prefix")
        self._sum_loss = jax.jit(partial(jnp.sum, axis=0), out_shardings=layout.sharding(PartitionSpec()))
        self._gather = jax.jit(self._gather_weights)
        self._join = jax.jit(jax.lax.optimization_barrier, donate_argnums=0)

    def loss_and_gradients(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Params]:
        """Return Σ loss / total_weight over all micro-batches, and its gradient to the trainable parameters.

        Args:
            trainable, frozen: parameter trees of `split_model`.
            micro_batches: batches of one shape.
            total_weight: Σ of all loss weights, so that accumulation equals one large batch.
            key: for dropout and noise; None drops and adds nothing.
        """
        gradients = self._empty_tree(trainable)
        loss = self.loss_and_update(trainable, frozen, micro_batches, total_weight, partial(set_part, gradients), key)
        return loss, gradients

    def loss_and_update(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        update: Update,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, ""]:
        """Return Σ loss / total_weight; pass every part's gradients to `update` as soon as they are complete.

        With one micro-batch only one layer's gradients exist at a time. `update` may donate its part of `trainable`.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        scale = np.float32(1.0 / total_weight)
        sums = (
            transfer.commit(self._zero_partials(trainable)) if len(micro_batches) > 1 else self._empty_tree(trainable)
        )
        losses = []
        for index, batch in enumerate(micro_batches):
            batch_key = None if key is None else jax.random.fold_in(key, index)
            last = index == len(micro_batches) - 1
            finish = partial(self._finish, update) if last else partial(set_part, sums)
            losses.append(self._micro_batch(trainable, frozen, batch, scale, batch_key, sums, finish))
        return self._total_loss(sum(losses[1:], start=losses[0]))

    def loss(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, ""]:
        """Return Σ loss over one batch, not divided by its weight; keep nothing for a backward pass."""
        trainable, frozen = transfer.commit((trainable, frozen))
        if self._needs_reference(batch):
            z = self.last_output(trainable, frozen, batch, reference=True)
            batch = self._entry_head.with_reference(trainable, frozen, z, batch)
        x = self.last_output(trainable, frozen, batch)
        return self._total_loss(self._entry_head.loss(trainable, frozen, x, batch, np.float32(1)))

    def last_output(
        self, trainable: Params, frozen: Params, batch: Batch, *, reference: bool = False
    ) -> Float[Array, "B T D"]:
        """Return the output of the last layer, or of the reference's."""
        if self._groups is not None:
            x, contexts = self._entry_head.embed(trainable, frozen, batch, None)
            return self._groups.output(trainable["layers"], frozen["layers"], x, contexts, reference=reference)
        (x,) = deque(self.hidden_states(trainable, frozen, batch, reference=reference), maxlen=1)
        return x

    def hidden_states(
        self, trainable: Params, frozen: Params, batch: Batch, *, reference: bool = False
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yield the embedded tokens of a batch, then the output of each layer, or of the reference's layers."""
        layers = self._reference if reference and self._reference is not None else self._layers
        x, contexts = self._entry_head.embed(trainable, frozen, batch, None)
        yield x
        running = self._run_ahead()
        stored = self._stored_weights(trainable, frozen)
        gathered = self._gather_first(stored)
        for layer, context in zip(layers, contexts, strict=True):
            weights = merge_gathered(gathered, stored.take())
            weights = ({}, weights[1]) if reference else weights
            x, gathered = layer.apply(*weights, x, context, select_to_gather(self._layout, stored.following))
            if self._stream_weights:
                running.add(x)
            del weights
            yield x

    def compilations(self) -> int:
        """Return the number of compiled programs, constant after the first step."""
        programs: list[Program] = [*self._entry_head.programs, *(self._groups.programs if self._groups else ())]
        for layer in [*self._layer_types.values(), *set(self._reference or ())]:
            programs += [layer.forward, layer.backward, layer.apply, layer.replay, layer.restore]
        programs += [self._whole] if self._whole else []
        return sum(program.compilations() for program in programs)

    def _prepare_buffers(self, layer: LayerFunctions, x: Any, residuals: Any) -> None:
        """Pin buffers for the values of all layers of a type, by the shapes of one's."""
        if self._host_buffers is None or not layer.policy.offloaded:
            return
        sent = jax.tree.leaves((x if layer.policy.offloads_input else None, residuals.offloaded))
        stays = partial(transfer.keep_on_device, layers=len(self._layers), depth=self._prefetch_depth)
        leaving = sum(own is layer and not stays(index) for index, own in enumerate(self._layers))
        self._host_buffers.prepare([value.size * value.dtype.itemsize for value in sent] * leaving)

    def _empty_tree(self, trainable: Params) -> Params:
        return {**dict.fromkeys(trainable), "layers": [None] * len(self._layers)}

    def _run_ahead(self) -> transfer.RunAhead:
        return transfer.RunAhead(transfer.RUN_AHEAD if self._prefetch_depth else 0)

    def _micro_batch(self, trainable, frozen, batch, scale, key, sums: Params, finish: Update) -> Array:
        """Return the loss; pass every part of `sums` plus its gradients to `finish`, the last layer first."""
        if self._whole is None or transfer.is_on_host(frozen[self._entry_head.entry]):
            return self._run_micro_batch(trainable, frozen, batch, scale, key, sums, finish)
        loss, gradients = self._whole(trainable, frozen, batch, scale, key, sums)
        layers, entry = gradients.pop("layers"), gradients.pop(self._entry_head.entry)
        for name in list(gradients):
            finish(name, gradients.pop(name))
        for index in reversed(range(len(layers))):
            finish(index, layers.pop())
        finish(self._entry_head.entry, entry)
        return loss

    def _make_whole(self) -> Program | None:
        """Return the program of a whole micro-batch, for an executor with one; it is traced when it is called."""
        return jit_step(self._loss_and_sums, donate_argnames="sums") if self._is_whole else None

    def _loss_and_sums(self, trainable, frozen, batch, scale, key, sums: Params) -> tuple[Array, Params]:
        """Return the loss, and `sums` plus the gradients."""
        gradients = self._empty_tree(trainable)
        loss = self._run_micro_batch(
            trainable, frozen, batch, scale, key, {**sums, "layers": [*sums["layers"]]}, partial(set_part, gradients)
        )
        return loss, gradients

    def _run_micro_batch(self, trainable, frozen, batch, scale, key, sums: Params, finish: Update) -> Array:
        x, contexts = self._entry_head.embed(trainable, frozen, batch, key, scale)
        z = self._reference_input(trainable, frozen, batch, x, key)
        ends = dict(frozen)
        x, z, backward = self._run_layers(trainable, frozen, x, contexts, z, ends)
        if z is not None:
            batch = self._entry_head.with_reference(trainable, ends, z, batch)
        loss, *dy, head = self._entry_head.head_backward(trainable, ends, x, batch, scale, sums)
        del x, z, ends
        entry = self._entry_head.entry
        entry_sums = head.pop(entry, sums[entry])
        for name in list(head):
            finish(name, head.pop(name))
        dx = backward(dy, sums["layers"], finish)
        finish(entry, self._entry_head.embed_backward(trainable, frozen, batch, key, dx, entry_sums))
        return loss

    def _run_layers(
        self, trainable, frozen, x, contexts: list[PackedContext], z: Array | None, ends: Params
    ) -> tuple[Array, Array | None, _Backward]:
        """Run all layers, and on `z` the reference's; return both outputs and the function of the backward pass.

        The head's parameters in `ends` that are on the host become copies on the device.
        """
        if self._groups is not None:
            layers = trainable["layers"], frozen["layers"]
            # Where there are several groups, the first one's programs serve the others, too.
            constant = self._is_whole and not jax.tree.leaves(trainable[self._entry_head.entry])
            x, grouped, z = self._groups.forward(*layers, x, contexts, z, constant=constant)
            return x, z, partial(self._groups.backward, grouped, *layers, contexts)
        x, saved, weights, z = self._forward(trainable, frozen, x, contexts, z, ends)
        return x, z, partial(self._backward, saved, weights, trainable, frozen, contexts)

    def _reference_input(self, trainable, frozen, batch, x: Array, key: PRNGKeyArray | None) -> Array | None:
        """Return the input of the reference's layers, without the noise of training; None without a reference."""
        if not self._needs_reference(batch):
            return None
        return x if key is None else self._entry_head.embed(trainable, frozen, batch, None)[0]

    def _needs_reference(self, batch: Batch) -> bool:
        return self._reference is not None and (batch.answers is None or batch.answers.reference is None)

    def _forward(
        self, trainable, frozen, x, contexts: list[PackedContext], z: Array | None, ends: Params
    ) -> tuple[Array, list[SavedLayer], list[_Weights], Array | None]:
        """Run all layers, and on `z` the reference's; start offloading residuals as soon as a layer is dispatched.

        Return the output, every layer's values and weights for the backward pass, and the reference's output.
        """
        saved: list[SavedLayer] = []
        kept: list[_Weights] = []
        running = self._run_ahead()
        stored = self._stored_weights(trainable, frozen)
        gathered = self._gather_first(stored)
        for i, layer in enumerate(self._layers):
            weights = merge_gathered(gathered, stored.take())
            if i == max(len(self._layers) - transfer.HEAD_AHEAD, 0):
                self._fetch_head(ends)
            to_gather = select_to_gather(self._layout, stored.following)
            y, residuals, gathered = layer.forward(*weights, x, contexts[i], to_gather)
            if z is not None and self._reference is not None:
                z, _ = self._reference[i].apply({}, weights[1], z, contexts[i])
                if self._layout.mesh:  # all devices must run programs with collectives in one order
                    y, z = self._join((y, z))
            stays = transfer.keep_on_device(i, len(self._layers), self._prefetch_depth)
            kept.append(weights if stays else (trainable["layers"][i], frozen["layers"][i]))
            saved.append(SavedLayer(x, residuals) if stays else self._offload(layer.policy, x, residuals))
            if self._uses_host:
                running.add((saved[-1].x, saved[-1].residuals.offloaded) if layer.policy.offloaded or stays else y)
            x = y
            del weights, y, residuals  # free this layer's buffers before the next copy is requested
        return x, saved, kept, z

    def _fetch_head(self, ends: Params) -> None:
        """Start copying the head's parameters that are on the host, in place of these."""
        for name in sorted(ends.keys() - {"layers", self._entry_head.entry}):
            if transfer.is_on_host(ends[name]):
                ends[name] = transfer.to_device(ends[name])

    def _backward(
        self,
        saved: list[SavedLayer],
        kept: list[_Weights],
        trainable,
        frozen,
        contexts,
        dy: list[Array],
        sums,
        finish: Update,
    ) -> Array:
        """Return the gradient to the first layer's input; empty `saved`, `kept`, `dy` and `sums` on the way."""
        moving = [self._stream_weights and transfer.is_on_host(layer) for layer in frozen["layers"]]
        weights_ahead = self._prefetch_weights(kept, moving)
        functions = tuple(zip(self._layers, trainable["layers"], frozen["layers"], contexts, strict=True))
        restore = partial(restore_inputs, layers=functions, depth=self._prefetch_depth)
        running, count = self._run_ahead(), len(saved)
        values = self._prefetch_saved(saved, restore)
        layers = transfer.Lookahead(zip(weights_ahead, values, strict=True), early=self._layout.gathers)
        gathered, dx = None, dy.pop()
        for i in reversed(range(count)):
            stored, (x, residuals) = layers.take()
            weights = merge_gathered(gathered, stored)
            accumulated, sums[i] = sums[i], None
            to_gather = select_to_gather(self._layout, layers.following and layers.following[0])
            arguments = (residuals, *weights, x, contexts[i], dx, accumulated, to_gather)
            dx, gradients, done, gathered = self._layers[i].backward(*arguments)
            finish(i, gradients)
            del stored, weights, x, residuals, to_gather, arguments, gradients, accumulated
            if self._uses_host:
                running.add(done)
        return dx

    def _prefetch_weights(self, kept: list[_Weights], moving: list[bool]) -> Iterator[_Weights]:
        """Iterate over the layers' weights, the last first, prefetching those on the host; empty `kept` on the way."""
        loads = [lambda: transfer.request(kept.pop())] * len(kept)
        return map(transfer.received, transfer.prefetch(loads, self._prefetch_depth, reversed(moving)))

    def _stored_weights(self, trainable: Params, frozen: Params) -> transfer.Lookahead[_Weights]:
        """Iterate over every layer's stored weights, prefetching those on the host."""
        layers = zip(trainable["layers"], frozen["layers"], strict=True)
        if not self._stream_weights:
            return transfer.Lookahead(iter(layers), early=self._layout.gathers)
        loads = (partial(transfer.request, layer) for layer in layers)
        depth = transfer.weights_prefetch_depth(self._prefetch_depth)
        moving = map(transfer.is_on_host, frozen["layers"])
        fetched = map(transfer.received, transfer.prefetch(loads, depth, moving))
        return transfer.Lookahead(fetched, early=self._layout.gathers)

    def _gather_first(self, stored: transfer.Lookahead[_Weights]) -> Any:
        """Gather the first layer's weights in a program of their own: no layer before it could."""
        return self._gather(select_to_gather(self._layout, stored.following)) if self._layout.gathers else None

    def _gather_weights(self, shards):
        layout, specs = self._layout, self._layout.param_specs(shards)
        program = partial(gather, layout, specs=specs)
        return per_device(program, layout.mesh, (specs,), layout.gathered_specs(shards))(shards)

    def _finish(self, update: Update, part: ParamKey, gradients: Params) -> None:
        """Pass on a part's gradients, summed over devices: once a step, however many the micro-batches."""
        if self._layout.mesh:
            gradients = self._sum_partials(gradients, prefix=part if isinstance(part, str) else "")
        update(part, gradients)

    def _total_loss(self, shares: Array) -> Float[Array, ""]:
        return self._sum_loss(shares) if self._layout.mesh else shares

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
