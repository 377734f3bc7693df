"""A workload's layers and head, traced for a GPU: what each costs under a policy, and the bytes of their parameters."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.policy import RematPolicy
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import tracing_for
from jaxglue.planner.cost import ATTENTION_BACKWARD, ATTENTION_FORWARD, Cost, program_cost, received_bytes
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.layer_programs import layer_programs
from jaxglue.planner.workload import Workload, abstract_batch, abstract_input, abstract_parts
from jaxglue.sharding.layout import Layout

_FORWARD_SHARE, _BACKWARD_SHARE = 0.35, 0.30
"""Of the matmul rate, reached by packed attention's forward and backward kernels."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Of one layer under one policy."""

    forward: Cost
    backward: Cost
    saved: int
    """Bytes that stay on the device."""
    offloaded: int
    """Bytes that go to the host."""


class TracedModel:
    """Traces each kind of layer under each policy once; compiles nothing and needs no GPU.

    Args:
        workload: what is trained.
        gpu: for whose kernels programs are traced.
        kernels: jax-triton is installed; otherwise what XLA makes of the references stands for the kernels.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, kernels: bool):
        self._workload, self._gpu = workload, gpu
        self._capability = gpu.capability if kernels else None
        self._graphdefs, *trees = abstract_parts(workload)
        # Of one GPU: parts as they are stored, whole layers as programs take them, what it gathers for that.
        layout = Layout(workload.mesh.abstract, workload.dtype)
        self.trainable, self.frozen = (layout.local(tree, layout.param_specs(tree)) for tree in trees)
        # Every GPU computes as much as if it had all experts and 1 / n of their tokens.
        whole = Layout(replace(workload.mesh, expert=1).abstract, workload.dtype)
        self._used = [whole.local(tree, whole.gathered_specs(tree)) for tree in trees]
        self._gathers = [layout.gathered(tree) for tree in trees]
        self._kinds = [self._graphdefs.layers.index(graph) for graph in self._graphdefs.layers]
        self._cost = cache(self._trace_layer)
        self.head = self._trace_head()

    @property
    def layers(self) -> int:
        """How many."""
        return len(self._kinds)

    def layer(self, index: int, policy: RematPolicy) -> LayerCost:
        """What a layer costs."""
        return self._cost(self._kinds[index], policy)

    @cached_property
    def input_bytes(self) -> int:
        """Of a layer's input."""
        return tree_bytes(abstract_input(self._workload)[0])

    @cached_property
    def trained(self) -> int:
        """Bytes of all trained parameters of a GPU."""
        return tree_bytes(self.trainable)

    @cached_property
    def trained_layers(self) -> list[int]:
        """Bytes of every layer's trained parameters."""
        return [tree_bytes(layer) for layer in self.trainable["layers"]]

    @cached_property
    def frozen_layers(self) -> list[int]:
        """Bytes of every layer's frozen parameters."""
        return [tree_bytes(layer) for layer in self.frozen["layers"]]

    @cached_property
    def frozen_ends(self) -> int:
        """Bytes of the other frozen parameters, a table on the host left out."""
        on_host = {"layers", "embed_tokens"} if self._workload.host_embeddings else {"layers"}
        return sum(tree_bytes(part) for name, part in self.frozen.items() if name not in on_host)

    @cached_property
    def gathered_layers(self) -> list[int]:
        """Bytes that are gathered for each layer."""
        return [tree_bytes(parts) for parts in zip(*(tree["layers"] for tree in self._gathers), strict=True)]

    @cached_property
    def gathered(self) -> int:
        """Bytes that gathering takes at most: a layer that is used and the next, or one of the ends."""
        ends = [name for name in self.trainable if name != "layers"]
        parts = (tree_bytes([tree[name] for tree in self._gathers]) for name in ends)
        return max(sum(sorted(self.gathered_layers)[-2:]), *parts)

    @cached_property
    def scattered(self) -> int:
        """Bytes of a layer's gradients before they are split among GPUs."""
        return max(2 * tree_bytes(layer) for layer in self._gathers[0]["layers"])

    def _trace_layer(self, index: int, policy: RematPolicy) -> LayerCost:
        work, trees = self._workload, [tree["layers"][index] for tree in self._used]
        graph, seconds = self._graphdefs.layers[index], self._attention_seconds(work.config.layer_windows[index])
        with tracing_for(self._capability):
            roomy = programs = layer_programs(graph, policy, work, trees)
            if (devices := work.mesh.expert) > 1:
                # All devices' tokens may come to one; on average it computes as many rows as its own have.
                roomy = layer_programs(graph, policy, work, trees, experts=devices)
        return LayerCost(
            forward=self._program_cost(programs.forward, roomy.forward, seconds),
            backward=self._program_cost(programs.backward, roomy.backward, seconds),
            saved=roomy.saved + (0 if policy.offloads_input else self.input_bytes),
            offloaded=roomy.offloaded + (self.input_bytes if policy.offloads_input else 0),
        )

    def _program_cost(self, program: ClosedJaxpr, roomy: ClosedJaxpr, seconds: dict[str, float]) -> Cost:
        """Time of one program, memory and exchange of the other."""
        cost, memory = (program_cost(each, self._gpu, attention_seconds=seconds) for each in (program, roomy))
        return replace(memory, seconds=cost.seconds + received_bytes(roomy.jaxpr) / self._gpu.peers)

    def _trace_head(self) -> Cost:
        ends = EmbedHead(self._graphdefs, self._workload.config, dtype=self._workload.dtype, attention="auto")
        trainable, frozen = self._used
        sums: Params = dict.fromkeys(trainable)
        x, _ = abstract_input(self._workload)
        batch = abstract_batch(self._workload)
        trees = ends._head(trainable), ends._head(frozen)
        with tracing_for(self._capability):
            jaxpr = jax.make_jaxpr(ends._loss_and_gradients)(*trees, x, batch, jnp.float32(1), ends._head(sums))
        return program_cost(jaxpr, self._gpu, attention_seconds={})

    def _attention_seconds(self, window: int | None) -> dict[str, float]:
        config, keys = self._workload.config, min(self._workload.visible_keys, window or float("inf"))
        flops = 4 * config.num_attention_heads * config.head_dim * keys * self._workload.tokens
        return {
            ATTENTION_FORWARD: flops / (_FORWARD_SHARE * self._gpu.matmul),
            ATTENTION_BACKWARD: 2.5 * flops / (_BACKWARD_SHARE * self._gpu.matmul),
        }


def tree_bytes(tree: Any) -> int:
    """Of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
