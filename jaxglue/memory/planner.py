"""Predicts time and memory of a training step under each remat policy, and picks the fastest that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxglue.attention import tracing_for
from jaxglue.memory.cost import ATTENTION_BACKWARD, ATTENTION_FORWARD, Cost, program_cost, received_bytes
from jaxglue.memory.ends import EndFunctions
from jaxglue.memory.gpus import GIB, Gpu
from jaxglue.memory.layer_programs import layer_programs
from jaxglue.memory.policy import AUTO, RematPolicy, format_policies, parse_policies, parse_policy
from jaxglue.memory.transfer import default_depth
from jaxglue.memory.workload import Workload, abstract_batch, abstract_input, abstract_parts
from jaxglue.parameters import Tree
from jaxglue.sharding.layout import Layout

MARGIN = 0.05
"""Share of the GPU's memory that a plan leaves free: predictions are that far off, and allocations fragment."""
_LAYER_TEMPORARIES, _HEAD_TEMPORARIES = 1.4, 1.7
"""What XLA keeps beside arguments and results, measured, as a multiple of what the order of the program needs."""
_WORKSPACE = int(0.15 * GIB)
"""Bytes that programs and matmul libraries take, whatever the model."""
_FORWARD_SHARE, _BACKWARD_SHARE = 0.35, 0.30
"""Of the matmul rate, reached by packed attention's forward and backward kernels."""
_OFFLOAD_GATE = "offload:layer_input,gate"
"""As much as the link moves while a layer computes; a matmul of the feed-forward is not computed again."""
_POLICIES = ("none", "dots", "dots; offload:layer_input", "full", "offload", _OFFLOAD_GATE)
_MIXES = (("dots", "full"), ("dots", "offload"), ("dots", _OFFLOAD_GATE), ("none", "dots"))
"""(policy of the last layers, policy of the others)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting with its predicted cost."""

    policies: tuple[RematPolicy, ...]
    """One for each layer."""
    stream_weights: bool
    seconds: float
    """Of an optimiser step."""
    device_bytes: int
    """At the peak."""
    host_bytes: int
    """Of pinned memory."""

    @property
    def remat(self) -> str:
        """The policies as `parse_policies` reads them, such as `full` or `10 x full + 26 x dots`."""
        return format_policies(self.policies)

    def __str__(self) -> str:
        return f"--remat {self.remat!r}" + (" --weights host" if self.stream_weights else "")


@dataclass(frozen=True, kw_only=True)
class _LayerCost:
    forward: Cost
    backward: Cost
    saved: int
    """Bytes that stay on the device."""
    offloaded: int
    """Bytes that go to the host."""


class Planner:
    """Traces the layers of one workload for one GPU, each policy once; compiles nothing and needs no GPU.

    Raises:
        ValueError: a mixture of experts where jax-triton is not installed: its kernels are traced.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, prefetch_depth: int | None = None, run_ahead: int = 2):
        if workload.config.moe is not None and find_spec("jax_triton") is None:
            raise ValueError(
                f"{workload.config.model_type} has experts, and their plan needs the kernels' definitions: install "
                "jax-triton and triton (part of jaxglue[cuda13])"
            )
        self.workload, self.gpu = workload, gpu
        self._depth, self._run_ahead = prefetch_depth, run_ahead
        self._structure, *trees = abstract_parts(workload)
        # Of one GPU: parts as they are stored, whole layers as programs take them, what it gathers for that.
        layout = Layout(workload.mesh.abstract, workload.dtype)
        self._trainable, self._frozen = (layout.local(tree, layout.stored(tree)) for tree in trees)
        # Every GPU computes as much as if it had all experts and 1 / n of their tokens.
        whole = Layout(replace(workload.mesh, expert=1).abstract, workload.dtype)
        self._used = [whole.local(tree, whole.used(tree)) for tree in trees]
        self._gathers = [layout.gathered(tree) for tree in trees]
        # Without jax-triton, what XLA makes of the references stands for the kernels.
        self._capability = gpu.capability if find_spec("jax_triton") else None
        self._cost = cache(self._trace_layer)
        self._head = self._trace_head()

    def plans(self) -> list[Plan]:
        """Every setting that is considered, the fastest first."""
        return sorted(self._candidates(), key=lambda plan: (plan.seconds, plan.device_bytes))

    def plan(self, policies: RematPolicy | Sequence[RematPolicy], *, stream_weights: bool = False) -> Plan:
        """The predicted cost of a setting."""
        count = len(self._structure.layers)
        chosen = (policies,) * count if isinstance(policies, RematPolicy) else tuple(policies)
        costs = [self._cost(graph, policy) for graph, policy in zip(self._structure.layers, chosen, strict=True)]
        weights = [_bytes(layer) if stream_weights else 0 for layer in self._frozen["layers"]]
        host = sum(cost.offloaded for cost in costs[:-1]) + sum(weights)
        return Plan(
            policies=chosen,
            stream_weights=stream_weights,
            seconds=self._seconds(costs, weights),
            device_bytes=self._peak(
                costs, weights, default_depth(stream_weights) if self._depth is None else self._depth
            ),
            host_bytes=host,
        )

    def resolve(self, remat: str, *, stream_weights: bool | None, host_memory: float) -> Plan:
        """The plan that `--remat` and `--weights` ask for, `auto` included (of weights: None).

        Raises:
            ValueError: it does not fit (see `check` and `choose`), or the text is no policy.
        """
        if remat == AUTO:
            return self.choose(host_memory=host_memory, stream_weights=stream_weights)
        policies = parse_policies(remat, len(self._structure.layers))
        places = (False, True) if stream_weights is None else (stream_weights,)
        plans = [self.plan(policies, stream_weights=place) for place in places]
        plan = next((plan for plan in plans if self.fits(plan, host_memory)), plans[0])
        self.check(plan, host_memory=host_memory)
        return plan

    def choose(self, *, host_memory: float, stream_weights: bool | None = False) -> Plan:
        """The fastest plan that leaves `MARGIN` of the GPU's memory free.

        Args:
            host_memory: bytes of host memory that may be pinned.
            stream_weights: whether frozen weights are on the host; None to choose that too.

        Raises:
            ValueError: nothing fits; it names the setting that comes nearest and what would fit.
        """
        plans = [plan for plan in self.plans() if stream_weights is None or plan.stream_weights == stream_weights]
        for plan in plans:
            if self.fits(plan, host_memory):
                return plan
        raise ValueError(self._why_not(min(plans, key=lambda plan: plan.device_bytes), host_memory))

    def fits(self, plan: Plan, host_memory: float) -> bool:
        """Whether the plan leaves the margin free on the GPU and fits the host."""
        return plan.device_bytes <= (1 - MARGIN) * self.gpu.memory and plan.host_bytes <= host_memory

    def check(self, plan: Plan, *, host_memory: float) -> None:
        """Raises ValueError when a plan that was asked for does not fit, naming the fastest one that does."""
        if plan.device_bytes <= self.gpu.memory and plan.host_bytes <= host_memory:
            return
        raise ValueError(self._why_not(plan, host_memory))

    def _why_not(self, plan: Plan, host_memory: float) -> str:
        if plan.device_bytes > (1 - MARGIN) * self.gpu.memory:
            need = f"{_gib(plan.device_bytes)} on the GPU, of which {_gib((1 - MARGIN) * self.gpu.memory)} may be used"
        else:
            need = f"{_gib(plan.host_bytes)} of pinned host memory, of which {_gib(host_memory)} may be used"
        tokens = f"{self.workload.batch_size} × {self.workload.seq_len:,} tokens"
        mesh = f" on --mesh {self.workload.mesh}" if self.workload.mesh.devices > 1 else ""
        return f"{plan} with {tokens}{mesh} needs {need}: {self._remedy(host_memory)}"

    def _remedy(self, host_memory: float) -> str:
        """The fastest setting that fits, or the longest row with which one does."""
        for plan in self.plans():
            if self.fits(plan, host_memory):
                return f"{plan} would fit in {_gib(plan.device_bytes)}"
        smaller = self._largest_seq_len(host_memory)
        return f"--seq-len {smaller} would fit" if smaller else "no setting fits: use a larger GPU or a smaller model"

    def _largest_seq_len(self, host_memory: float) -> int | None:
        seq_len = self.workload.seq_len // 2
        while seq_len >= 128:
            shorter = replace(self.workload, seq_len=seq_len)
            planner = Planner(shorter, self.gpu, prefetch_depth=self._depth, run_ahead=self._run_ahead)
            if any(planner.fits(plan, host_memory) for plan in planner.plans()):
                return seq_len
            seq_len //= 2
        return None

    def _candidates(self) -> Iterator[Plan]:
        for stream in (False, True) if jax.tree.leaves(self._frozen["layers"]) else (False,):
            for text in _POLICIES:
                yield self.plan(parse_policy(text), stream_weights=stream)
            for fast, lean in _MIXES:
                if (mix := self._mix(parse_policy(fast), parse_policy(lean), stream)) is not None:
                    yield mix

    def _mix(self, fast: RematPolicy, lean: RematPolicy, stream: bool) -> Plan | None:
        """As many last layers under the fast policy as fit; their activations are gone before the others' come back."""
        count, best = len(self._structure.layers), None
        low, high = 1, count - 1
        while low <= high:
            middle = (low + high) // 2
            plan = self.plan([lean] * (count - middle) + [fast] * middle, stream_weights=stream)
            fits = plan.device_bytes <= (1 - MARGIN) * self.gpu.memory
            low, high, best = (middle + 1, high, plan) if fits else (low, middle - 1, best)
        return best

    def _seconds(self, costs: list[_LayerCost], weights: list[int]) -> float:
        """A layer takes as long as its kernels or its copies, whichever is longer."""
        link = self.gpu.link
        forward = backward = 0.0
        for cost, streamed, gathered in zip(costs, weights, self._gathered_layers(), strict=True):
            out, back = cost.offloaded, cost.offloaded + streamed
            # A hidden copy still takes its share of the device memory's bandwidth.
            gather = gathered / self.gpu.peers
            forward += max(cost.forward.seconds + (out + streamed) / self.gpu.copy, out / link, streamed / link, gather)
            backward += max(cost.backward.seconds + back / self.gpu.copy, back / link, gather)
        # AdamW reads parameter, gradient and two moments and writes all but the gradient.
        update = (3 * _bytes(self._trainable) + 2 * self._moments) / self.gpu.copy
        return self.workload.accumulation * (forward + backward + self._head.seconds) + update

    @property
    def _moments(self) -> int:
        """Bytes of AdamW's state; what trains is float32."""
        return round(self.workload.moment_bytes / 4 * _bytes(self._trainable))

    def _peak(self, costs: list[_LayerCost], weights: list[int], depth: int) -> int:
        """Bytes when there are most: in the head, or in some layer's backward pass."""
        x = self.workload.tokens * self.workload.config.hidden_size * jnp.dtype(self.workload.dtype).itemsize
        trained = _bytes(self._trainable)
        resident = self._moments + trained + _bytes(self._frozen) - sum(weights)
        if self.workload.host_embeddings:
            resident -= _bytes(self._frozen["embed_tokens"])
        layers = sorted(self._gathered_layers())[-2:]  # one that is used, and the next
        resident += max(sum(layers), *(_bytes([tree[name] for tree in self._gathers]) for name in self._ends()))
        buffers = depth + 1
        streamed = max(weights, default=0) * (buffers + self._run_ahead)
        in_flight = max((cost.offloaded for cost in costs[:-1]), default=0) * (depth + self._run_ahead)
        per_layer = [_bytes(layer) for layer in self._trainable["layers"]]
        scattered = max(2 * _bytes(layer) for layer in self._gathers[0]["layers"])  # a layer's, before they are split
        accumulates, updates = self.workload.accumulation > 1, self.workload.update_in_backward
        head_gradients = self._head.results - x
        stored = sum(cost.saved for cost in costs) + costs[-1].offloaded
        gradients = trained if accumulates else 0
        peak = stored + gradients + self._head.results + _HEAD_TEMPORARIES * self._head.temporary
        if not (accumulates or updates):
            gradients = head_gradients
        for cost, layer_gradients in zip(reversed(costs), reversed(per_layer), strict=True):
            here = gradients if accumulates else gradients + layer_gradients
            peak = max(peak, stored + here + scattered + 2 * x + _LAYER_TEMPORARIES * cost.backward.temporary)
            gradients = gradients if updates else here
            stored -= cost.saved
        if not accumulates:  # the embedding's come last
            peak = max(peak, gradients + max(trained - sum(per_layer) - head_gradients, 0) + x)
        return int(_WORKSPACE + resident + streamed + in_flight + peak)

    def _trace_layer(self, graph, policy: RematPolicy) -> _LayerCost:
        index = self._structure.layers.index(graph)
        trees = [tree["layers"][index] for tree in self._used]
        seconds = self._attention_seconds(self.workload.config.layer_windows[index])
        with tracing_for(self._capability):
            roomy = programs = layer_programs(graph, policy, self.workload, trees)
            if (devices := self.workload.mesh.expert) > 1:
                # All devices' tokens may come to one; on average it computes as many rows as its own have.
                roomy = layer_programs(graph, policy, self.workload, trees, experts=devices)
        forward, backward = (
            self._layer_cost(*pair, seconds)
            for pair in ((programs.forward, roomy.forward), (programs.backward, roomy.backward))
        )
        input_bytes = _bytes(abstract_input(self.workload)[0])
        return _LayerCost(
            forward=forward,
            backward=backward,
            saved=roomy.saved + (0 if policy.offloads_input else input_bytes),
            offloaded=roomy.offloaded + (input_bytes if policy.offloads_input else 0),
        )

    def _layer_cost(self, program: ClosedJaxpr, roomy: ClosedJaxpr, seconds: dict[str, float]) -> Cost:
        """Time of one program, memory and exchange of the other."""
        cost, memory = (program_cost(each, self.gpu, attention_seconds=seconds) for each in (program, roomy))
        return replace(memory, seconds=cost.seconds + received_bytes(roomy.jaxpr) / self.gpu.peers)

    def _trace_head(self) -> Cost:
        ends = EndFunctions(self._structure, self.workload.config, dtype=self.workload.dtype, attention="auto")
        trainable, frozen = self._used
        sums: Tree = dict.fromkeys(trainable)
        x, _ = abstract_input(self.workload)
        batch = abstract_batch(self.workload)
        trees = ends._head(trainable), ends._head(frozen)
        with tracing_for(self._capability):
            jaxpr = jax.make_jaxpr(ends._loss_and_gradients)(*trees, x, batch, jnp.float32(1), ends._head(sums))
        return program_cost(jaxpr, self.gpu, attention_seconds={})

    def _ends(self) -> list[str]:
        return [name for name in self._trainable if name != "layers"]

    def _gathered_layers(self) -> list[int]:
        """Bytes that are gathered for each layer."""
        return [_bytes(parts) for parts in zip(*(tree["layers"] for tree in self._gathers), strict=True)]

    def _attention_seconds(self, window: int | None) -> dict[str, float]:
        config, keys = self.workload.config, min(self.workload.visible_keys, window or float("inf"))
        flops = 4 * config.num_attention_heads * config.head_dim * keys * self.workload.tokens
        return {
            ATTENTION_FORWARD: flops / (_FORWARD_SHARE * self.gpu.matmul),
            ATTENTION_BACKWARD: 2.5 * flops / (_BACKWARD_SHARE * self.gpu.matmul),
        }


def pinned_memory(available: float, limit_gib: str | None = None) -> float:
    """Bytes of host memory that may be pinned.

    Args:
        available: bytes of host memory that no process uses; a tenth is left.
        limit_gib: what XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says, None where it is not set: JAX then stops at 64 GiB.
    """
    return min(0.9 * available, float(limit_gib or 64) * GIB)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
