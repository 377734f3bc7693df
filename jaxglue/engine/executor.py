"""Runs a model layer by layer: one compiled forward and one compiled backward per layer type, dispatched in order.

Compile time is one layer's, whatever the depth, and the program rather than the compiler decides what a layer keeps
and when it is copied: XLA delays copies to the host until they save nothing, or runs them one after the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.layer import LayerFunctions, Residuals
from jaxglue.engine.policy import RematPolicy
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext, RouterLosses
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params, set_part
from jaxglue.sharding.layout import Layout

Update = Callable[[ParamKey, Params], None]
"""Takes a part of the model (a name, or a layer's index) and its finished gradients."""


_Weights = tuple[Params, Params]
"""Trainable and frozen parameters of a layer."""


class _Kept(NamedTuple):
    """What a layer's backward pass takes beside the gradient: here or on the host."""

    weights: _Weights
    x: Array
    residuals: Residuals


class Executor:
    """Loss and gradients of a model over the micro-batches of one optimizer step.

    Args:
        graphdefs: the modules, as `split_model` gives them.
        config: the model's shape.
        policy: what each layer keeps for its backward pass; one policy for all layers, or one for each.
        dtype: the dtype of activations and matmuls.
        attention: the attention backend.
        stream_weights: the layers' frozen weights are in pinned host memory.
        prefetch_depth: how many layers ahead copies from the host are asked for: 1 is double buffering, 0 none; by
            default what `default_depth` says.
        run_ahead: how many layers may be dispatched and not done while copies are asked for.
        router_losses: coefficients of the auxiliary losses of routers, each a mean over the layers with experts. Their
            gradients are added to those of the loss, their values are not. None for no such losses.
        mesh: the devices that share the work (see `jaxglue.sharding`); parameters and batches are on it, as `Layout`
            says. None for one device.

    Raises:
        ValueError: the policy or the weights need pinned host memory, and the default device has none; or the number
            of policies is not the number of layers.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        policy: RematPolicy | Sequence[RematPolicy],
        dtype=jnp.bfloat16,
        attention: str = "auto",
        stream_weights: bool = False,
        prefetch_depth: int | None = None,
        run_ahead: int = 2,
        router_losses: RouterLosses | None = None,
        mesh: Mesh | None = None,
    ):
        policies = [policy] * len(graphdefs.layers) if isinstance(policy, RematPolicy) else list(policy)
        if len(policies) != len(graphdefs.layers):
            raise ValueError(f"{len(policies)} remat policies for {len(graphdefs.layers)} layers: give one for each")
        self._layout = layout = Layout(mesh, dtype)
        ends: dict[str, Any] = {"dtype": dtype, "attention": attention, "router_losses": router_losses}
        self._embed_head = EmbedHead(graphdefs, config, **ends, layout=layout)
        types = list(zip(graphdefs.layers, policies, strict=True))
        self._layer_types = {kind: LayerFunctions(*kind, layout) for kind in types}
        self._layers = [self._layer_types[kind] for kind in types]
        self._stream_weights, self._run_ahead = stream_weights, run_ahead
        self._prefetch_depth = transfer.default_depth(stream_weights) if prefetch_depth is None else prefetch_depth
        self._uses_host = stream_weights or any(policy.offloaded for policy in policies)
        if self._uses_host:
            transfer.check_pinned_memory(jax.local_devices()[0])
        self._zeros = jax.jit(layout.zeros)
        self._sum_partials = jax.jit(layout.sum_partials, static_argnames="prefix")
        self._total = jax.jit(jnp.sum, out_shardings=layout.sharding(PartitionSpec()))
        self._gather = jax.jit(self._gather_parts)

    def loss_and_gradients(
        self,
        trainable: Params,
        frozen: Params,
        micro_batches: Sequence[Batch],
        total_weight: float,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Params]:
        """Σ loss / total_weight over all micro-batches, and its gradient to the trainable parameters.

        Args:
            trainable, frozen: parameter trees of `split_model`.
            micro_batches: batches of one shape.
            total_weight: Σ of all loss weights, so that accumulation is exactly the large batch.
            key: for dropout; None drops nothing.
        """
        gradients: Params = {**dict.fromkeys(trainable), "layers": [None] * len(self._layers)}
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
        """Σ loss / total_weight; hands every part's gradients to `update` as soon as they are finished.

        With one micro-batch the gradients of one layer exist at a time. `update` may donate that part of `trainable`.
        """
        trainable, frozen = transfer.commit((trainable, frozen))
        scale = np.float32(1.0 / total_weight)
        nothing: Params = {**dict.fromkeys(trainable), "layers": [None] * len(self._layers)}
        sums = self._zeros(trainable) if len(micro_batches) > 1 else nothing
        losses = []
        for index, batch in enumerate(micro_batches):
            batch_key = None if key is None else jax.random.fold_in(key, index)
            last = index == len(micro_batches) - 1
            finish = partial(self._finish, update) if last else partial(set_part, sums)
            losses.append(self._micro_batch(trainable, frozen, batch, scale, batch_key, sums, finish))
        return self._whole_loss(sum(losses[1:], start=losses[0]))

    def loss(self, trainable: Params, frozen: Params, batch: Batch) -> Float[Array, ""]:
        """Σ loss over one batch, not divided by its weight; nothing is kept for a backward pass."""
        trainable, frozen = transfer.commit((trainable, frozen))
        x, contexts = self._embed_head.embed(trainable, frozen, batch, None)
        running = transfer.RunAhead(self._run_ahead)
        stored = self._stored_weights(trainable, frozen)
        ahead = self._gather_first(stored)
        for i, layer in enumerate(self._layers):
            weights = self._layout.whole(ahead, stored.take())
            x, ahead = layer.apply(*weights, x, contexts[i], self._layout.in_parts(stored.following))
            if self._stream_weights:
                running.add(x)
            del weights
        return self._whole_loss(self._embed_head.loss(trainable, frozen, x, batch, np.float32(1)))

    def compilations(self) -> int:
        """How many programs have been compiled; constant once a run is under way."""
        functions: list[Any] = list(self._embed_head.functions)
        for layer in self._layer_types.values():
            functions += [layer.forward, layer.backward, layer.apply]
        return sum(function._cache_size() for function in functions)

    def _micro_batch(self, trainable, frozen, batch, scale, key, sums: Params, finish: Update):
        """The loss; `finish` gets every part of `sums` plus its gradients, the last layer's first."""
        x, contexts = self._embed_head.embed(trainable, frozen, batch, key, scale)
        x, kept = self._forward(trainable, frozen, x, contexts)
        loss, dx, head = self._embed_head.head_backward(trainable, frozen, x, batch, scale, sums)
        del x
        embed_sums = head.pop("embed_tokens", sums["embed_tokens"])
        for part in list(head):
            finish(part, head.pop(part))
        dx = self._backward(kept, contexts, dx, sums["layers"], finish)
        finish("embed_tokens", self._embed_head.embed_backward(trainable, batch, dx, embed_sums))
        return loss

    def _forward(self, trainable, frozen, x, contexts: list[PackedContext]) -> tuple[Array, list[_Kept]]:
        """The last layer's output and what every layer keeps, on its way to where the policy wants it."""
        kept: list[_Kept] = []
        running = transfer.RunAhead(self._run_ahead)
        stored = self._stored_weights(trainable, frozen)
        ahead = self._gather_first(stored)
        for i, layer in enumerate(self._layers):
            weights = self._layout.whole(ahead, stored.take())
            y, residuals, ahead = layer.forward(*weights, x, contexts[i], self._layout.in_parts(stored.following))
            unused = trainable["layers"][i], frozen["layers"][i]
            kept.append(self._offload(i, _Kept(weights, x, residuals), unused))
            if self._uses_host:
                running.add((kept[-1].x, kept[-1].residuals.offloaded))
            x = y
            del weights, y, residuals  # what is asked for next must not find this layer's copies still held
        return x, kept

    def _backward(self, kept: list[_Kept], contexts, dx, sums: list[Params | None], finish: Update) -> Array:
        """The gradient to the first layer's input; empties `kept` and `sums` on the way."""
        running, count = transfer.RunAhead(self._run_ahead), len(kept)
        loads = transfer.prefetch([partial(self._prefetch, kept)] * count, self._prefetch_depth)
        turns = transfer.Turns(loads, early=self._layout.gathers)
        ahead = None
        for i in reversed(range(count)):
            stored, x, residuals = turns.take()
            weights = self._layout.whole(ahead, stored)
            accumulated, sums[i] = sums[i], None
            following = self._layout.in_parts(turns.following and turns.following.weights)
            arguments = (residuals, *weights, x, contexts[i], dx, accumulated, following)
            dx, gradients, done, ahead = self._layers[i].backward(*arguments)
            finish(i, gradients)
            del stored, weights, x, residuals, following, arguments, gradients, accumulated
            if self._uses_host:
                running.add(done)
        return dx

    def _stored_weights(self, trainable: Params, frozen: Params) -> transfer.Turns[_Weights]:
        """Every layer's weights as they are stored; those on the host are asked for some layers ahead."""
        layers = zip(trainable["layers"], frozen["layers"], strict=True)
        if not self._stream_weights:
            return transfer.Turns(iter(layers), early=self._layout.gathers)
        loads = (partial(transfer.to_device, layer) for layer in layers)
        depth = transfer.weights_depth(self._prefetch_depth)
        return transfer.Turns(transfer.prefetch(loads, depth), early=self._layout.gathers)

    def _gather_first(self, stored: transfer.Turns[_Weights]) -> Any:
        """What must be gathered of the first layer's weights: there is no layer before it whose program could."""
        return self._gather(self._layout.in_parts(stored.following)) if self._layout.gathers else None

    def _gather_parts(self, parts):
        specs = self._layout.param_specs(parts)
        gather = partial(self._layout.gather, specs=specs)
        return self._layout.run(gather, (specs,), self._layout.gathered_specs(parts))(parts)

    def _finish(self, update: Update, place: ParamKey, gradients: Params) -> None:
        """Hands over a part's gradients, added up over the devices: once a step, however many the micro-batches."""
        if self._layout.mesh:
            gradients = self._sum_partials(gradients, prefix=place if isinstance(place, str) else "")
        update(place, gradients)

    def _whole_loss(self, shares: Array) -> Float[Array, ""]:
        return self._total(shares) if self._layout.mesh else shares

    def _offload(self, index: int, kept: _Kept, weights: _Weights) -> _Kept:
        """Starts the copies to the host; the last layers, which would be asked for at once, keep all on the device."""
        policy = self._layers[index].policy
        if transfer.keep_on_device(index, len(self._layers), self._prefetch_depth):
            return kept
        x, offloaded = kept.x if policy.offloads_input else None, kept.residuals.offloaded
        if policy.offloaded:
            x, offloaded = transfer.to_host((x, offloaded))
        return _Kept(weights, kept.x if x is None else x, kept.residuals.with_offloaded(offloaded))

    def _prefetch(self, kept: list[_Kept]) -> _Kept:
        """Takes the last layer off the list and starts the copies from the host."""
        layer = kept.pop()
        return transfer.to_device(layer) if self._uses_host else layer
