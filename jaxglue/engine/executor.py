"""Run a model layer by layer: one compiled forward and one compiled backward per layer type, dispatched in order.

Compile time is one layer's at any depth.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Traced
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.compiler import Program, on_devices, products_of
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.fixed_addresses import MicroBatchProgram
from jaxglue.engine.host_buffers import Buffers
from jaxglue.engine.layer import LayerFunctions, layer_function
from jaxglue.engine.layer_groups import LayerGroups, check_grouped
from jaxglue.engine.layer_passes import LayerPasses
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residuals import Layer
from jaxglue.engine.saved import check_dropped_inputs
from jaxglue.engine.score_head import ScoreHead
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext, RouterLosses
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params, set_part, without_parts
from jaxglue.objectives.config import SUPERVISED
from jaxglue.objectives.objective import Objective
from jaxglue.ops.row_split import in_rows
from jaxglue.sharding.gather import merge_gathered, select_to_gather, sum_partials, zero_partials
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.vision.rows import Patches


class EntryHead(Protocol):
    """Compiled functions around the stack of layers; every tree argument is the whole model's."""

    entry: str
    """Key of the entry's parameters."""
    programs: tuple[Any, ...]
    loss_shape: tuple[int, ...]
    """Shape of the losses on one device."""
    layers_fed: int
    """The first layers to whose outputs the entry adds values that train."""
    trains_inputs: bool
    """The layers' own inputs, which the entry makes, have gradients."""

    def embed(self, trainable: Params, frozen: Params, batch: Any, key: PRNGKeyArray | None, scale=None) -> tuple:
        """Return (the first layer's input, every layer's context)."""

    def embed_backward(
        self,
        trainable: Params,
        frozen: Params,
        batch: Any,
        key: PRNGKeyArray | None,
        dx: list[Array],
        accumulated: Params | None,
    ) -> Params:
        """Return `accumulated` plus the entry's gradients.

        Those in `dx` are to the first layer's input, to the outputs of `layers_fed` layers, and to layers' own inputs
        that train.
        """

    def loss(self, trainable: Params, frozen: Params, x, batch: Any, scale) -> Array:
        """Return scale · Σ loss of the last layer's output."""

    def with_reference(self, trainable: Params, frozen: Params, x, batch: Any) -> Any:
        """Return the batch with values of a reference model's last output; called only with such a model."""

    def head_backward(self, trainable: Params, frozen: Params, x, batch: Any, scale, sums: Params) -> tuple:
        """Return (loss, dx, the head's entries of `sums` plus gradients)."""


Update = Callable[[ParamKey, Params], None]
"""Called with a part of the parameters (a name, or a layer's index) and its finished gradients."""

_Backward = Callable[[list[Array], list[Params | None], Update], list[Array]]
"""([gradient to the last layer's output], layers' sums, receiver of their gradients) → gradients to the first input,
and to the outputs of layers that the entry feeds.

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
        reference: layers of a reference model on the same frozen weights, each run where the model's layer runs; their
            last output enters the batch by `EntryHead.with_reference`. Batches of rollouts bring its values.
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
        host_buffers: Buffers | None = None,
    ):
        policies = [policy] * len(layers) if isinstance(policy, RematPolicy) else list(policy)
        if len(policies) != len(layers):
            raise ValueError(f"{len(policies)} remat policies for {len(layers)} layers: give one for each")
        self.layout, self.entry_head = layout, entry_head
        self.watch: Callable[[Params, Params, Array, Any], None] | None = None
        """Called with trainable, frozen, the last layer's output and its batch in each micro-batch of a step; it may
        read the output before it returns, and no executor of one program calls it."""
        self.takes_turns = False
        """Wait for each micro-batch, so that programs of others on the device run between two."""
        check_dropped_inputs(policies)
        replayed = any(policy.drops_input for policy in policies)
        functions = {layer: layer_function(layer) for layer in set(layers)}
        types = [(functions[layer], policy) for layer, policy in zip(layers, policies, strict=True)]
        self._layer_types = {kind: LayerFunctions(*kind, layout, replayed=replayed) for kind in types}
        self.layers = [self._layer_types[kind] for kind in types]
        reference_types = {layer: LayerFunctions(layer, policies[0], layout) for layer in reference or ()}
        self._reference = None if reference is None else [reference_types[layer] for layer in reference]
        check_grouped(layers_per_program, policies, stream_weights=stream_weights)
        if entry_head.layers_fed or entry_head.trains_inputs:
            layers_per_program = 1  # gradients between layers are read
        self._passes = LayerPasses(
            self.layers,
            self._reference,
            layout,
            stream_weights=stream_weights,
            prefetch_depth=prefetch_depth,
            host_buffers=host_buffers,
        )
        grouped = (self.layers, self._reference, layers_per_program, layout)
        self._groups = LayerGroups(*grouped) if layers_per_program > 1 else None
        self.is_one_program = 1 < len(layers) <= layers_per_program
        """A micro-batch is one program."""
        self.has_reference = reference is not None
        self.reuses_gradients = self.is_one_program and layout.mesh is None
        """Tells callers to pass a step's gradients to the next step as `into`."""
        self._partials: Params | None = None
        """On a mesh, each device's own gradients of the last step, for the next step to overwrite."""
        self.loss_shape = entry_head.loss_shape
        self._program = self._make_program()
        # Zeros of unread arguments would not be committed to their device, and programs compiled for both kinds.
        self._zero_partials = jax.jit(self._zeros, keep_unused=True, donate_argnames="into")
        self._sum_partials = jax.jit(partial(sum_partials, layout), static_argnames="prefix")
        self._sum_loss = jax.jit(partial(jnp.sum, axis=0), out_shardings=layout.sharding(PartitionSpec()))

    def loss_and_gradients(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        key: PRNGKeyArray | None = None,
        into: Params | None = None,
    ) -> tuple[Float[Array, ""], Params]:
        """Return Σ loss / total_weight over all micro-batches, and its gradient to the trainable parameters.

        Args:
            trainable, frozen: parameter trees of `split_model`.
            micro_batches: batches of one shape.
            total_weight: Σ of all loss weights, so that accumulation equals one large batch.
            key: for dropout and noise; None drops and adds nothing.
            into: gradients of an earlier step, whose memory the new ones take where `reuses_gradients`; donated.
        """
        gradients = without_parts(trainable)
        arguments = trainable, frozen, micro_batches, total_weight, partial(set_part, gradients)
        if self.layout.mesh is None:
            return self._loss_and_partials(*arguments, key, into), gradients
        partials, self._partials = self._partials, None
        loss = self._loss_and_partials(*arguments, key, partials)
        # One exchange at the end: after each layer, devices would wait for the slowest one's.
        total = self._sum_partials(gradients)
        self._partials = gradients if self.is_one_program else None
        return loss, total

    def loss_and_update(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        update: Update,
        key: PRNGKeyArray | None = None,
        into: Params | None = None,
    ) -> Float[Array, ""]:
        """Return Σ loss / total_weight; pass every part's gradients to `update` as soon as they are complete.

        With one micro-batch and several programs, only one layer's gradients exist at a time. `update` may donate its
        part of `trainable`. The arguments are those of `loss_and_gradients`.
        """
        finish = partial(self._finish, update)
        return self._loss_and_partials(trainable, frozen, micro_batches, total_weight, finish, key, into)

    def _loss_and_partials(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        done: Update,
        key,
        into,
    ) -> Float[Array, ""]:
        """Return Σ loss / total_weight; pass every part's gradients to `done`, on a mesh each device's own."""
        trainable, frozen = transfer.commit((trainable, frozen))
        scale = np.float32(1.0 / total_weight)
        program, several, losses = self._program_on(frozen), len(micro_batches) > 1, []
        sums = self._first_sums(trainable, into, one_program=program is not None, several=several)
        run = self._run_micro_batch if program is None else partial(self._run_program, program, accumulates=several)
        for index, batch in enumerate(micro_batches):
            batch_key = None if key is None else jax.random.fold_in(key, index)
            last = index == len(micro_batches) - 1
            finish = done if last else partial(set_part, sums)
            arguments = trainable, frozen, batch, scale, batch_key, sums
            losses.append(run(*arguments, finish))
            if self.takes_turns and not last:
                jax.block_until_ready((losses[-1], sums))
        return self._total_loss(sum(losses[1:], start=losses[0]))

    def loss(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, ""]:
        """Return Σ loss over one batch, not divided by its weight; keep nothing for a backward pass."""
        trainable, frozen = transfer.commit((trainable, frozen))
        if self._needs_reference(batch):
            z = self.last_output(trainable, frozen, batch, reference=True)
            batch = self.entry_head.with_reference(trainable, frozen, z, batch)
        x = self.last_output(trainable, frozen, batch)
        return self._total_loss(self.entry_head.loss(trainable, frozen, x, batch, np.float32(1)))

    def last_output(
        self, trainable: Params, frozen: Params, batch: Batch, *, reference: bool = False
    ) -> Float[Array, "B T D"]:
        """Return the output of the last layer, or of the reference model's."""
        if self._groups is not None:
            x, contexts = self.entry_head.embed(trainable, frozen, batch, None)
            return self._groups.output(trainable["layers"], frozen["layers"], x, contexts, reference=reference)
        (x,) = deque(self.hidden_states(trainable, frozen, batch, reference=reference), maxlen=1)
        return x

    def hidden_states(
        self, trainable: Params, frozen: Params, batch: Batch, *, reference: bool = False
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yield the embedded tokens of a batch, then the output of each layer, or of the reference model's layers."""
        x, contexts = self.entry_head.embed(trainable, frozen, batch, None)
        yield x
        layers = trainable["layers"], frozen["layers"]
        outputs = self._passes.outputs(*layers, x, contexts, reference=reference)
        del x  # as later outputs, it stays on the device only while it is read
        yield from outputs

    def outputs_in(
        self, trainable: Params, frozen: Params, batch: Batch, change: Callable[[PackedContext], PackedContext]
    ) -> Iterator[tuple[Float[Array, "B T D"], Float[Array, "B T D"], Float[Array, "B T D"]]]:
        """Yield each layer's input, its output, and its output in a changed context, which the next layer reads.

        Args:
            trainable, frozen: parameter trees of `split_model`.
            batch: to run.
            change: of each layer's context.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        x, contexts = self.entry_head.embed(trainable, frozen, batch, None)
        stored = self._passes.stored_weights(trainable["layers"], frozen["layers"])
        gathered = self._passes.gather_first(stored)
        for layer, context in zip(self.layers, contexts, strict=True):
            weights = merge_gathered(gathered, stored.take())
            y, gathered = layer.apply(*weights, x, context, select_to_gather(self.layout, stored.following))
            z, _ = layer.apply(*weights, x, change(context))
            yield x, y, z
            x = z

    def compilations(self) -> int:
        """Return the number of compiled programs, constant after the first step."""
        groups = self._groups.programs if self._groups else []
        programs: list[Program | MicroBatchProgram] = [*self.entry_head.programs, *groups]
        for layer in [*self._layer_types.values(), *set(self._reference or ())]:
            programs += [layer.forward, layer.backward, layer.apply, layer.replay, layer.restore]
        programs += [self._program] if self._program else []
        return sum(program.compilations() for program in programs)

    def _first_sums(self, trainable: Params, into: Params | None, *, one_program: bool, several: bool) -> Params:
        """Return zeros for several micro-batches, arrays for one program to overwrite, or nothing."""
        if several or (one_program and into is None):
            return transfer.commit(self._zero_partials(trainable, into))
        return into if one_program and into is not None else without_parts(trainable)

    def _zeros(self, trainable: Params, into: Params | None) -> Params:
        return zero_partials(self.layout, trainable)

    def _program_on(self, frozen: Params) -> MicroBatchProgram | None:
        """Return the program of a whole micro-batch where there is one and the entry is on the device."""
        return None if transfer.is_on_host(frozen[self.entry_head.entry]) else self._program

    def _run_program(
        self,
        program: MicroBatchProgram,
        trainable,
        frozen,
        batch,
        scale,
        key,
        sums: Params,
        finish: Update,
        *,
        accumulates,
    ) -> Array:
        """Run a micro-batch as `_run_micro_batch` does, in one program."""
        loss, gradients = program(trainable, frozen, batch, scale, key, sums, accumulates=accumulates)
        layers, entry = gradients.pop("layers"), gradients.pop(self.entry_head.entry)
        for name in list(gradients):
            finish(name, gradients.pop(name))
        for index in reversed(range(len(layers))):
            finish(index, layers.pop())
        finish(self.entry_head.entry, entry)
        return loss

    def _make_program(self) -> MicroBatchProgram | None:
        """Return the program of a whole micro-batch, for an executor with one; it is traced when it is called."""
        shape = (self.layout.mesh.size, *self.loss_shape) if self.layout.mesh else self.loss_shape
        return MicroBatchProgram(self._loss_and_sums, shape, self.layout) if self.is_one_program else None

    def traced_step(self, trainable, frozen, batch, scale, key) -> tuple[Array, Params]:
        """Return loss and gradients of a micro-batch; traced, as a part of a program that has all layers."""
        loss, gradients = self._loss_and_sums(trainable, frozen, batch, scale, key, without_parts(trainable))
        return self._total_loss(loss), self._sum_partials(gradients) if self.layout.mesh else gradients

    def _loss_and_sums(self, trainable, frozen, batch, scale, key, sums: Params) -> tuple[Array, Params]:
        """Return the loss, and `sums` plus the gradients, on a mesh each device's own; traced."""
        gradients = without_parts(trainable)
        loss = self._run_micro_batch(
            trainable, frozen, batch, scale, key, {**sums, "layers": [*sums["layers"]]}, partial(set_part, gradients)
        )
        return loss, gradients

    def _run_micro_batch(self, trainable, frozen, batch, scale, key, sums: Params, finish: Update) -> Array:
        """Return the loss; pass every part of `sums` plus its gradients to `finish`, the last layer first."""
        x, contexts = self.entry_head.embed(trainable, frozen, batch, key, scale)
        z = self._reference_input(trainable, frozen, batch, x, key)
        ends = dict(frozen)
        x, z, backward = self._run_layers(trainable, frozen, x, contexts, z, ends)
        if self.watch is not None:
            self.watch(trainable, ends, x, batch)
        if z is not None:
            batch = self.entry_head.with_reference(trainable, ends, z, batch)
        loss, *dy, head = self.entry_head.head_backward(trainable, ends, x, batch, scale, sums)
        del x, z, ends
        entry = self.entry_head.entry
        entry_sums = head.pop(entry, sums[entry])
        for name in list(head):
            finish(name, head.pop(name))
        dx = backward(dy, sums["layers"], finish)
        finish(entry, self.entry_head.embed_backward(trainable, frozen, batch, key, dx, entry_sums))
        return loss

    def _run_layers(
        self, trainable, frozen, x, contexts: list[PackedContext], z: Array | None, ends: Params
    ) -> tuple[Array, Array | None, _Backward]:
        """Run all layers, and on `z` the reference model's; return both outputs and the function of the backward pass.

        The head's parameters in `ends` that are on the host become copies on the device.
        """
        layers = trainable["layers"], frozen["layers"]
        if self._groups is not None:
            # Where there are several groups, the first one's programs serve the others, too.
            constant = self.is_one_program and not jax.tree.leaves(trainable[self.entry_head.entry])
            x, groups, z = self._groups.forward(*layers, x, contexts, z, constant=constant)
            backward = partial(self._groups.backward, groups, *layers, contexts)
            return x, z, lambda *arguments: [backward(*arguments)]
        x, saved, z = self._passes.forward(*layers, x, contexts, z, partial(self._fetch_head, ends))
        return x, z, partial(self._passes.backward, saved, *layers, contexts, fed=self.entry_head.layers_fed)

    def _reference_input(self, trainable, frozen, batch, x: Array, key: PRNGKeyArray | None) -> Array | None:
        """Return the input of the reference model's layers, without the noise of training, where such a model runs."""
        if not self._needs_reference(batch):
            return None
        return x if key is None else self.entry_head.embed(trainable, frozen, batch, None)[0]

    def _needs_reference(self, batch: Batch) -> bool:
        if self._reference is None or batch.rollouts is not None:
            return False
        return batch.answers is None or batch.answers.reference is None

    def _fetch_head(self, ends: Params) -> None:
        """Start copying the head's parameters that are on the host, in place of these."""
        for name in sorted(ends.keys() - {"layers", self.entry_head.entry}):
            if transfer.is_on_host(ends[name]):
                ends[name] = transfer.to_device(ends[name])

    def _finish(self, update: Update, part: ParamKey, gradients: Params) -> None:
        """Pass on a part's gradients, summed over devices: once a step, however many the micro-batches."""
        if self.layout.mesh:
            gradients = self._sum_partials(gradients, prefix=part if isinstance(part, str) else "")
        update(part, gradients)

    def _total_loss(self, shares: Array) -> Float[Array, ""]:
        return self._sum_loss(shares) if self.layout.mesh else shares


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
        exact: bool = False,
        router_losses: RouterLosses | None = None,
        objective: Objective = SUPERVISED,
        neftune_alpha: float = 0.0,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        layout, self.config = Layout(mesh, dtype), config
        with products_of(dtype):
            self.embed_head = embed_head = EmbedHead(
                graphdefs,
                config,
                dtype=dtype,
                attention=attention,
                tile=tile,
                exact=exact,
                router_losses=router_losses,
                objective=objective,
                neftune_alpha=neftune_alpha,
                layout=layout,
            )
            self._scores = ScoreHead(embed_head, layout)
            super().__init__(graphdefs.layers, embed_head, policy=policy, layout=layout, **options)

    def trace_step(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        key: PRNGKeyArray | None = None,
    ) -> Iterator[Traced]:
        """Trace the programs of a step: each layer's, or the one of all; pin buffers for values.

        Layers that gather weights have other programs.

        Args:
            trainable, frozen: parameters' shapes, of any arrays.
            micro_batches: of the step, on the devices.
            key: for dropout and noise.
        """
        layout = self.layout
        trainable, frozen = (on_devices(layout, tree, layout.param_specs(tree)) for tree in (trainable, frozen))
        sums, accumulates = without_parts(trainable), len(micro_batches) > 1
        if accumulates or self._program is not None:
            zeros = jax.eval_shape(self._zero_partials, trainable, None)
            sums = on_devices(layout, zeros, layout.grad_specs(trainable))
        head, scale = self.embed_head, np.float32(1)
        for kind, batch in enumerate({jax.tree.structure(batch): batch for batch in micro_batches}.values()):
            if self._program is not None:
                yield self._program.trace(trainable, frozen, batch, scale, key, sums, accumulates=accumulates)
                continue
            traced, x, contexts = head.trace_embed(trainable, frozen, batch, key, scale)
            yield traced
            layers = zip(self.layers, trainable["layers"], frozen["layers"], contexts, sums["layers"], strict=True)
            first = {layer: inputs for layer, *inputs in reversed(list(layers))}
            backward = []
            for layer, (*weights, context, accumulated) in reversed(first.items()):
                traced = layer.forward.trace(*weights, x, context, None)
                yield traced
                y, residuals = on_devices(layout, traced.out_info[:2], (layout.batch_spec, layout.device_spec))
                if not kind:
                    self._passes.prepare_buffers(layer, x, residuals)
                x = y
                backward.append((layer, (residuals, *weights, x, context, x, accumulated, None)))
            yield head.trace_head_backward(trainable, frozen, x, batch, scale, sums)
            yield from (layer.backward.trace(*inputs) for layer, inputs in reversed(backward))

    @property
    def fp8_layers(self) -> list[bool]:
        """Return whether each layer multiplies its FP8 matrices in FP8."""
        return self.embed_head.fp8_layers

    def multiply_in_fp8(self, layers: Sequence[bool], head: bool) -> None:
        """Multiply FP8 matrices in FP8 in these layers alone, and in the head if `head`; at first all do."""
        self.embed_head.fp8_layers, self.embed_head.fp8_head = list(layers), head
        self._program = self._make_program()

    def image_features(self, trainable: Params, frozen: Params, patches: Patches) -> Float[Array, "B I D"]:
        """Return the features of rows of patches by the model's tower; see `EmbedHead.image_features`."""
        return self.embed_head.image_features(trainable, frozen, patches)

    def answer_log_probs(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, "B U 2"]:
        """Return the log-probabilities of a batch's answers."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self.embed_head.answer_log_probs(trainable, frozen, x, batch)

    def read(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, "B A *K"]:
        """Return what the objective's model gives for each part of a batch (`ReadObjective.outputs`)."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self.embed_head.read(trainable, frozen, x, batch)

    def log_probs(
        self, trainable: Params, frozen: Params, batch: Batch, *, reference: bool = False
    ) -> Float[Array, "B T"]:
        """Return log-probabilities of a batch's targets, at the objective's temperature; 0 where they do not count.

        Of rows that are split over devices they are in the order of whole rows. With `reference` the layers are those
        of the reference model.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch, reference=reference)
        log_probs = self.embed_head.log_probs(trainable, frozen, x, batch)
        return log_probs if batch.segments.split is None else in_rows(log_probs, batch.segments.split)

    def evaluate(self, trainable: Params, frozen: Params, batch: Batch, sources: int = 1) -> Float[Array, "3 sources"]:
        """Return a batch's Σ weight · loss, Σ weight · hit and Σ weight by source.

        A hit is a target with the largest logit.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, replace(batch, sources=None))
        return self._scores.sums(trainable, self.embed_head.parts_on_device(frozen), x, batch, sources)

    def token_scores(
        self, trainable: Params, frozen: Params, batch: Batch
    ) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
        """Return each target's cross-entropy, and the token with the largest logit in its place."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self._scores.tokens(trainable, self.embed_head.parts_on_device(frozen), x, batch)

    def likely_tokens(
        self, trainable: Params, frozen: Params, batch: Batch, count: int
    ) -> tuple[Float[Array, " T"], Int[Array, "T count"], Float[Array, "T count"]]:
        """Return log-probabilities of a row's targets, and the most likely tokens in their places with theirs."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x = self.last_output(trainable, frozen, batch)
        return self._scores.likely(trainable, self.embed_head.parts_on_device(frozen), x, batch.targets, count)
