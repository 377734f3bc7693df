"""The compiled programs of one layer type: forward, backward, and evaluation."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.engine.compiler import jit_exchanging, jit_step
from jaxglue.engine.layer_forms import run_layer
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residuals import Layer, Residuals, VjpForm, differentiate
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import Params, merge_module
from jaxglue.ops.collectives import device_key, per_device
from jaxglue.sharding.gather import gather, reduce_scatter_grads, schedule_after, stack, unstack
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout

Hidden = Float[Array, "B T D"]


class LayerFunctions:
    """Compiled `forward`, `backward` and `apply` of one layer type under one policy.

    On a mesh each is one program per device. With FSDP it also gathers the weights of the layer that runs next
    (`ahead`: the arrays to gather of its trainable and frozen parameters) while this one computes.

    Args:
        layer: the module without its parameters, or a function of trainable and frozen parameters, x and context.
        policy: of its values for the backward pass.
        layout: of its arrays.
        replayed: `replay` or `restore` is called.
    """

    def __init__(
        self,
        layer: nnx.GraphDef | Layer,
        policy: RematPolicy,
        layout: Layout = SINGLE_DEVICE,
        *,
        replayed: bool = False,
    ):
        self._layer, self._layout = layer_function(layer), layout
        self.policy, self._replayed = policy, replayed
        self._forms: list[VjpForm] = []
        """Forms of the residuals."""
        jit = jit_exchanging if layout.gathers else jit_step
        self.forward = jit(self._forward, static_argnames="constant")
        # dy is not donated: dx would take its place, and XLA copy dy for matmuls that it schedules after dx.
        self.backward = jit(self._backward, donate_argnames="accumulated")
        self.apply = jit(self._apply)
        self.replay, self.restore = jit(self._replay), jit(self._restore)

    def _apply(self, trainable: Params, frozen: Params, x: Hidden, context: PackedContext, ahead: Any = None):
        """Return (y, the next layer's gathered weights)."""
        layout, ahead_specs = self._layout, self._layout.param_specs(ahead)

        def program(ahead, *inputs):
            gathered = gather(layout, ahead, ahead_specs)
            return self._layer(*inputs), gathered

        specs = (ahead_specs, *self._input_specs(trainable, frozen, context))
        results = (layout.batch_spec, layout.gathered_specs(ahead))
        return per_device(program, layout.mesh, specs, results)(ahead, trainable, frozen, x, context)

    def _forward(
        self,
        trainable: Params,
        frozen: Params,
        x: Hidden,
        context: PackedContext,
        ahead: Any = None,
        *,
        constant: bool = False,
    ):
        """Return (y, residuals, the next layer's gathered weights); the gradient to a constant x is zero."""
        layout, ahead_specs = self._layout, self._layout.param_specs(ahead)
        layer = partial(_with_constant_input, self._layer) if constant else self._layer

        def program(ahead, *inputs):
            gathered = gather(layout, ahead, ahead_specs)
            find_attention = self._replayed and isinstance(context, PackedContext)
            y, residuals = differentiate(layer, self.policy, inputs, self._forms, find_attention=find_attention)
            return y, stack(layout, residuals), gathered

        specs = (ahead_specs, *self._input_specs(trainable, frozen, context))
        results = (layout.batch_spec, layout.device_spec, layout.gathered_specs(ahead))
        return per_device(program, layout.mesh, specs, results)(ahead, trainable, frozen, x, context)

    def _backward(
        self,
        residuals: Residuals,
        trainable: Params,
        frozen: Params,
        x: Hidden,
        context: PackedContext,
        dy: Hidden,
        accumulated: Params | None,
        ahead: Any = None,
    ):
        """Return (dx, accumulated + dtrainable, an element of dx to wait for, the next layer's gathered weights).

        Where the layer's own input has a gradient, dx is a pair with that.
        """
        layout, ahead_specs = self._layout, self._layout.param_specs(ahead)
        param_specs, grad_specs = layout.param_specs(trainable), layout.grad_specs(trainable)

        def program(ahead, residuals, inputs, dy, accumulated):
            gathered = gather(layout, ahead, ahead_specs)
            dtrainable, dx = unstack(layout, residuals).vjp(inputs)(dy)
            gradients = reduce_scatter_grads(layout, schedule_after(gathered, dtrainable), param_specs)
            first = jax.tree.leaves(dx)[0]
            return dx, add_trees(accumulated, gradients), stack(layout, first[(0,) * first.ndim]), gathered

        input_specs = self._input_specs(trainable, frozen, context)
        sum_specs = None if accumulated is None else grad_specs
        specs = (ahead_specs, layout.device_spec, input_specs, layout.batch_spec, sum_specs)
        results = (layout.batch_spec, grad_specs, layout.device_spec, layout.gathered_specs(ahead))
        inputs = (trainable, frozen, x, context)
        return per_device(program, layout.mesh, specs, results)(ahead, residuals, inputs, dy, accumulated)

    def _replay(
        self, attention_out: Array | None, trainable: Params, frozen: Params, x: Hidden, context: PackedContext
    ) -> Hidden:
        """Return y again, from attention's output where it was kept."""

        def program(attention_out, trainable, frozen, x, context):
            if attention_out is not None:
                context = replace(context, attention_out=unstack(self._layout, attention_out))
            return self._layer(trainable, frozen, x, context)

        attention_spec = None if attention_out is None else self._layout.device_spec
        results = self._layout.batch_spec
        return self._on_stored(program, results, trainable, frozen, x, context, (attention_out,), (attention_spec,))

    def _restore(self, trainable: Params, frozen: Params, x: Hidden, context: PackedContext):
        """Return y again, and residuals with the values that the policy drops."""
        layout = self._layout

        def program(*inputs):
            y, residuals = differentiate(self._layer, self.policy.restored(), inputs, self._forms)
            return y, stack(layout, residuals)

        return self._on_stored(program, (layout.batch_spec, layout.device_spec), trainable, frozen, x, context)

    def _on_stored(
        self, program: Any, results: Any, trainable: Params, frozen: Params, x: Hidden, context: PackedContext,
        first: tuple = (), first_specs: tuple = (),
    ) -> Any:  # fmt: skip
        """Run a function of `first` and a layer's inputs on weights as they are stored, which it gathers itself."""
        layout, weights = self._layout, (trainable, frozen)
        stored = layout.param_specs(weights)

        def gathering(first, weights, x, context):
            return program(*first, *gather(layout, weights, stored), x, context)

        specs = (first_specs, stored, layout.batch_spec, layout.context_specs(context))
        return per_device(gathering, layout.mesh, specs, results)(first, weights, x, context)

    def _input_specs(self, trainable: Params, frozen: Params, context: PackedContext) -> tuple:
        layout = self._layout
        weights = layout.gathered_specs(trainable), layout.gathered_specs(frozen)
        return *weights, layout.batch_spec, layout.context_specs(context)


def layer_function(layer: nnx.GraphDef | Layer) -> Layer:
    """Return a module's function of its parameters, x and context, or the function given.

    JAX traces and differentiates one function once for all policies.
    """
    return partial(_run_module, layer) if isinstance(layer, nnx.GraphDef) else layer


def _run_module(graphdef: nnx.GraphDef, trainable: Params, frozen: Params, x: Hidden, context: PackedContext) -> Hidden:
    if context.dropout_key is not None:
        context = replace(context, dropout_key=device_key(context.dropout_key))
    return run_layer(merge_module(graphdef, trainable, frozen), x, context)


def _with_constant_input(layer: Layer, trainable: Params, frozen: Params, x: Hidden, context: PackedContext) -> Hidden:
    return layer(trainable, frozen, jax.lax.stop_gradient(x), context)


def add_trees(accumulated: Params | None, gradients: Params) -> Params:
    """Return the sum, or the gradients alone when nothing has been accumulated."""
    return gradients if accumulated is None else jax.tree.map(jnp.add, accumulated, gradients)
