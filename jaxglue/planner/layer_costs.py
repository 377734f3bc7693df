"""Costs of a workload's layers and head on a GPU."""

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxglue.engine.policy import RematPolicy
from jaxglue.models.parameters import Params
from jaxglue.ops.kernel_cost import KernelKind
from jaxglue.ops.names import LAYER_INPUT, QUERY
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.planner import calibration as fitted
from jaxglue.planner.attention import layer_attention_costs
from jaxglue.planner.cost import AttentionCost, Cost, Sizes, program_cost
from jaxglue.planner.equation_sizes import received_bytes
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.programs import Programs, SizedProgram, abstract_input, shared_programs
from jaxglue.planner.workload import Workload, abstract_parts, tree_bytes
from jaxglue.sharding.rules import Layout


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer under one policy."""

    forward: Cost
    backward: Cost
    saved: int
    """Bytes that stay on the device."""
    offloaded: int
    """Bytes that go to the host."""
    offloaded_names: int
    """Names of these values."""


class _Passes(NamedTuple):
    """Cost of a layer's passes that keep everything on the device, and bytes kept beside its input by their names."""

    forward: Cost
    backward: Cost
    kept: dict[str | None, int]


@lru_cache(maxsize=8)
def _shapes(workload: Workload) -> tuple[list[Params], list[int]]:
    """Return trainable and frozen parameters that one GPU gathers, and each layer's first alike."""
    graphdefs, *trees = abstract_parts(workload)
    layout = Layout(workload.mesh.abstract, workload.dtype)
    gathers = [layout.gathered_shapes(tree) for tree in trees]
    return gathers, [graphdefs.layers.index(graphdef) for graphdef in graphdefs.layers]


def _shapes_of(trees: list[Params]) -> tuple:
    """Return what tells the parameters of one kind of layer from those of another."""
    leaves, structure = jax.tree.flatten(trees)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class TracedModel:
    """Costs of each kind of layer under each policy, and of the head, from their programs.

    Args:
        workload: the training to predict.
        gpu: for whose kernels programs are traced.
        kernels: jax-triton is installed; without it, XLA's programs of the references stand for the kernels.
        programs: of the workload; by default those that other plans share.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, kernels: bool, programs: Programs | None = None):
        self._workload, self._gpu = workload, gpu
        few_values = FORMATS[workload.config.quantize].few_values
        self._layer_gpu = replace(gpu, matmul=fitted.FEW_VALUES_GAIN * gpu.matmul) if few_values else gpu
        self.programs = programs or shared_programs(workload, gpu.capability if kernels else None)
        self._gathers, self._kinds = _shapes(workload.any_rows)
        self._sparse = workload.config.moe.sparse_layers if workload.config.moe else (False,) * len(self._kinds)
        # Windows change attention's cost, not the programs.
        shapes = [_shapes_of(self.programs.parameters(layer)) for layer in range(len(self._kinds))]
        self._alike = list(map(shapes.index, shapes))
        self._passes, self._arrays = cache(self._cost_passes), cache(self._count_arrays)
        self._costs: dict[tuple[int, RematPolicy], LayerCost] = {}
        self._replay, self._reference = cache(self._cost_replay), cache(self._cost_reference)

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self._kinds)

    def layer(self, index: int, policy: RematPolicy) -> LayerCost:
        """Return the cost of a layer under a policy."""
        key = self._kinds[index], policy
        if key not in self._costs:
            self._costs[key] = self._layer_cost(*key)
        return self._costs[key]

    def _layer_cost(self, kind: int, policy: RematPolicy) -> LayerCost:
        """Return the cost from that of keeping the same values on the device: programs are the same."""
        on_device = RematPolicy(saved=policy.on_device().saved)
        passes = self._passes(kind, on_device)
        kept = passes.kept | {LAYER_INPUT: 0 if policy.drops_input else self.input_bytes}
        offloaded = sum(kept.get(name, 0) for name in policy.offloaded)
        early = self._early_queries(kind, on_device)
        return LayerCost(
            forward=passes.forward,
            backward=replace(passes.backward, temporary=passes.backward.temporary + early),
            saved=sum(kept.values()) - offloaded,
            offloaded=offloaded,
            offloaded_names=len(kept.keys() & policy.offloaded),
        )

    def _early_queries(self, kind: int, kept: RematPolicy) -> int:
        """Return the bytes of queries, projected and rotated, that wait for attention's gradient.

        XLA computes them before the experts' values, which are larger, though it reads them after these.
        """
        recomputed = kept.keeps_attention and QUERY not in (kept.saved or ())
        return 2 * self.attention_bytes if self._sparse[kind] and recomputed and self._workload.tile is None else 0

    def arrays(self, index: int) -> tuple[int, int]:
        """Count the arrays of a layer's trainable and frozen parameters."""
        return self._arrays(self._kinds[index])

    def _count_arrays(self, kind: int) -> tuple[int, int]:
        trainable, frozen = (len(jax.tree.leaves(tree)) for tree in self.programs.parameters(kind))
        return trainable, frozen

    def replay(self, index: int, policy: RematPolicy) -> Cost:
        """Return the cost of running a layer again, from attention's output where the policy keeps it."""
        return self._replay(self._kinds[index], policy.keeps_attention)

    def reference_seconds(self, index: int) -> float:
        """Return the time of a layer of the reference, 0 where none runs."""
        return self._reference(self._kinds[index]) if self._workload.reference else 0.0

    @cached_property
    def attention_bytes(self) -> int:
        """Return the bytes of attention's output, the largest of a layer."""
        config, work = self._workload.config, self._workload
        return (
            work.tokens
            * max(prod(config.attended(index)) for index in config.first_of_kind)
            * jnp.dtype(work.dtype).itemsize
        )

    @cached_property
    def keeps_attention(self) -> bool:
        """Return whether attention's output and log-sum-exp are copied faster than they are recomputed."""
        config, work = self._workload.config, self._workload
        copied = self.attention_bytes + 4 * work.tokens * config.num_attention_heads
        costs = layer_attention_costs(work, self._gpu, config.num_hidden_layers - 1)
        return costs[KernelKind.ATTENTION_FORWARD].seconds > copied / self._gpu.link

    @cached_property
    def input_bytes(self) -> int:
        """Return the bytes of a layer's input."""
        return tree_bytes(abstract_input(self._workload)[0])

    @cached_property
    def gathered_layers(self) -> list[int]:
        """Return the bytes that are gathered for each layer."""
        return [tree_bytes(parts) for parts in zip(*(tree["layers"] for tree in self._gathers), strict=True)]

    @cached_property
    def gathered(self) -> int:
        """Return the most bytes of gathered weights at once: a layer's and the next one's, or the embedding's."""
        ends = [name for name in self._gathers[0] if name != "layers"]
        parts = (tree_bytes([tree[name] for tree in self._gathers]) for name in ends)
        return max(sum(sorted(self.gathered_layers)[-2:]), *parts)

    @cached_property
    def scattered(self) -> int:
        """Return the bytes of a layer's gradients before they are split among GPUs."""
        return max(2 * tree_bytes(layer) for layer in self._gathers[0]["layers"])

    @cached_property
    def head(self) -> Cost:
        """Return the cost of the head, the loss and their gradients."""
        return program_cost(self.programs.head, self._gpu, attention={})

    @cached_property
    def head_seconds(self) -> float:
        """Return the time of the head, and of the reference's where one runs."""
        if not self._workload.reference:
            return self.head.seconds
        return self.head.seconds + program_cost(self.programs.reference_head, self._gpu, attention={}).seconds

    def _cost_passes(self, kind: int, policy: RematPolicy) -> _Passes:
        attention, (programs, roomy) = self._attention(kind), self.programs.layer(self._alike[kind], policy)
        forward = self._program_cost(programs.forward, roomy.forward, attention)
        backward = self._program_cost(programs.backward, roomy.backward, attention)
        if exchange := self._exchange_seconds(kind):
            forward = replace(forward, seconds=forward.seconds + exchange)
            backward = replace(backward, seconds=backward.seconds + 2 * exchange)
        return _Passes(forward=forward, backward=backward, kept=roomy.kept)

    def _exchange_seconds(self, kind: int) -> float:
        """Return the time in which linear attention exchanges tokens for heads, where rows are split."""
        work, exchanged = self._workload, self._workload.config.layer_kinds[kind].mixer.exchanged
        if work.mesh.context == 1 or not exchanged:
            return 0.0
        moved = work.tokens * exchanged * jnp.dtype(work.dtype).itemsize
        return (1 - 1 / work.mesh.context) * moved / self._gpu.peers

    def _cost_replay(self, kind: int, keeps_attention: bool) -> Cost:
        program = self.programs.replay(self._alike[kind], keeps_attention)
        return program_cost(program, self._gpu, attention=self._attention(kind))

    def _cost_reference(self, kind: int) -> float:
        program = self.programs.reference(self._alike[kind])
        return program_cost(program, self._gpu, attention=self._attention(kind)).seconds

    def _attention(self, kind: int) -> dict[KernelKind, AttentionCost]:
        return layer_attention_costs(self._workload, self._gpu, kind)

    def _cost(self, program: SizedProgram, attention: dict[KernelKind, AttentionCost]) -> Cost:
        return program_cost(program.program, self._layer_gpu, attention=attention, sizes=Sizes(program.scaled))

    def _program_cost(
        self, program: SizedProgram, roomy: SizedProgram, attention: dict[KernelKind, AttentionCost]
    ) -> Cost:
        """Combine the time of one program with the memory and exchange of a roomier one."""
        cost = self._cost(program, attention)
        memory = cost if roomy is program else self._cost(roomy, attention)
        return replace(memory, seconds=cost.seconds + received_bytes(roomy.program.jaxpr) / self._gpu.peers)
