"""Programs of a workload's layers and head, traced once for all plans that share them."""

from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.layer import layer_function
from jaxglue.engine.policy import PRESETS, RematPolicy
from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import Capability, tracing_for
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.planner.layer_programs import (
    LayerPrograms,
    layer_programs,
    reference_program,
    replay_program,
    value_names,
)
from jaxglue.planner.workload import Workload, abstract_batch, abstract_input, abstract_parts
from jaxglue.sharding.rules import Layout

_shared: WeakValueDictionary[tuple[Workload, Capability | None], "Programs"] = WeakValueDictionary()
"""By workload, and by the compute capability for whose kernels programs are traced."""


def shared_programs(workload: Workload, capability: Capability | None) -> "Programs":
    """Return the programs of a workload, those of another one in use where all that decides them is the same."""
    same: dict[str, Any] = {"document_lengths": (), "gradient_accumulation_steps": 1, "update_in_backward": False}
    same |= {"moment_bytes": 8.0, "host_embeddings": False, "attention": "auto", "reference": False}
    key = replace(workload, **same), capability
    if (programs := _shared.get(key)) is None:
        programs = _shared[key] = Programs(*key)
    return programs


@lru_cache(maxsize=8)
def used_shapes(workload: Workload) -> list[Params]:
    """Return the trainable and frozen parameters that one GPU uses."""
    # Every GPU computes as much as if it had all experts and 1 / n of their tokens.
    layout = Layout(replace(workload.mesh, expert=1).abstract, workload.dtype)
    return [layout.local_shapes(tree, layout.gathered_specs(tree)) for tree in abstract_parts(workload)[1:]]


class Programs:
    """Traces each kind of layer under each policy once; compiles nothing and needs no GPU.

    Args:
        workload: what is trained.
        capability: of the GPU for whose kernels programs are traced; None traces the references in their place.
    """

    def __init__(self, workload: Workload, capability: Capability | None):
        self.workload, self.capability = workload, capability
        self._graphdefs, self._used = abstract_parts(workload)[0], used_shapes(workload.any_rows)
        self._function = cache(lambda index: layer_function(self._graphdefs.layers[index]))
        self._layer, self._names = cache(self._trace_layer), cache(self._find_names)
        self.replay, self.reference = cache(self._trace_replay), cache(self._trace_reference)

    def layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        """Return a layer's programs, and those whose memory counts, under a policy that keeps all on the device."""
        if policy.saved is not None:
            policy = RematPolicy(saved=policy.saved & self._names(index))
        return self._layer(index, policy)

    @cached_property
    def head(self) -> ClosedJaxpr:
        """Return the program of the head, the loss and their gradients."""
        if self.workload.tile is not None:
            return shared_programs(replace(self.workload, tile=None), self.capability).head
        trainable, frozen = self._used
        sums: Params = dict.fromkeys(trainable)
        inputs = abstract_input(self.workload)[0], abstract_batch(self.workload)
        with tracing_for(self.capability):
            return self._embed_head.trace_head_backward(trainable, frozen, *inputs, jnp.float32(1), sums).jaxpr

    @cached_property
    def reference_head(self) -> ClosedJaxpr:
        """Return the program of the reference's head."""
        (trainable, frozen), x = self._used, abstract_input(self.workload)[0]
        with tracing_for(self.capability):
            return self._embed_head.trace_answer_log_probs(trainable, frozen, x, abstract_batch(self.workload)).jaxpr

    @property
    def _embed_head(self) -> EmbedHead:
        work = self.workload
        return EmbedHead(self._graphdefs, work.config, dtype=work.dtype, attention="auto", objective=work.objective)

    def parameters(self, index: int) -> list[Params]:
        """Return a layer's trainable and frozen parameters, abstract."""
        return [tree["layers"][index] for tree in self._used]

    def _trace_layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        layer = self._function(index), policy, self.workload, self.parameters(index)
        recomputing = self._recomputing(index, policy)
        with tracing_for(self.capability):
            programs = layer_programs(*layer, recomputing=recomputing)
            if (devices := self.workload.mesh.expert) == 1:
                return programs, programs
            # All devices' tokens may reach one; on average it computes as many rows as its own tokens have.
            return programs, layer_programs(*layer, experts=devices)

    def _recomputing(self, index: int, policy: RematPolicy) -> ClosedJaxpr | None:
        """Return the backward pass that keeps nothing, if that of the policy follows from it.

        Not where JAX shortens a loop over tiles to results that are not kept, or exchanges experts' tokens.
        """
        full, saved = PRESETS["full"], policy.saved
        shortened = self.workload.tile and saved and saved - {ATTENTION_OUT, ATTENTION_LSE}
        if policy == full or saved is None or shortened or self.workload.mesh.expert > 1:
            return None
        backward = self._layer(index, full)[0].backward
        return None if backward.scaled else backward.program

    def _find_names(self, index: int) -> frozenset[str]:
        """Return the names of values that the backward pass computes again if they are not kept."""
        return frozenset().union(*(value_names(each.backward.program) for each in self._layer(index, PRESETS["full"])))

    def _trace_replay(self, index: int, keeps_attention: bool) -> ClosedJaxpr:
        layer = self._graphdefs.layers[index], self.workload, self.parameters(index)
        with tracing_for(self.capability):
            return replay_program(*layer, from_attention=keeps_attention)

    def _trace_reference(self, index: int) -> ClosedJaxpr:
        trainable, frozen = self.parameters(index)
        graphdef = without_adapters(self._graphdefs.layers[index], trainable, frozen)
        with tracing_for(self.capability):
            return reference_program(graphdef, self.workload, frozen)
