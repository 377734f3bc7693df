"""Predicts time and memory of a training step under each remat policy, and picks the fastest that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jaxglue.engine.policy import AUTO, RematPolicy, format_policies, interleave, parse_policies, parse_policy
from jaxglue.engine.transfer import default_depth, is_streamed, keep_on_device, weights_depth
from jaxglue.ops.backend import has_jax_triton
from jaxglue.planner import schedule
from jaxglue.planner.gpus import GIB, Gpu
from jaxglue.planner.schedule import Work
from jaxglue.planner.traced import LayerCost, TracedModel
from jaxglue.planner.workload import Workload

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable with the GiB of host memory that JAX pins at most; 64 if it is not set."""
MARGIN = 0.03
"""Share of the GPU's memory that a plan leaves free: predictions are that far off, and allocations fragment."""
_LAYER_TEMPORARIES, _HEAD_TEMPORARIES = 1.1, 1.12
"""What XLA keeps beside arguments and results, as a multiple of what the order of the program needs."""
_WORKSPACE = int(0.3 * GIB)
"""Bytes that programs and matmul libraries take, whatever the model."""
_LINK_SHARE = 0.9
"""Of the link's rate, what a plan counts on: copies also wait for those of the other direction, and for their turn."""
_OFFLOADS = (
    "offload:layer_input,attention_residual,query,key,value",
    "offload:layer_input,gate",
    "offload:layer_input,attention_residual,gate",
    "offload:layer_input,attention_residual,key,value,gate",
    "offload:layer_input,attention_residual,query,key,value,gate",
)
"""Ever more on the host. What a millisecond of the link saves is much alike for all values; how much the link moves
while a layer computes is not."""
_POLICIES = ("none", "dots", "dots; offload:layer_input", "full", "offload", *_OFFLOADS)
_MIXES = (
    ("dots", "none"),
    *((lean, "dots") for lean in ("full", "offload", *_OFFLOADS)),
    *pairwise(_OFFLOADS),
    *((lean, f"{lean}; save:up") for lean in _OFFLOADS[1:]),
    *((lean, f"{other}; save:up") for other, lean in pairwise(_OFFLOADS[1:])),
)
"""Pairs of policies of which the second is faster: its layers are spread among those of the first, so that the link
catches up under them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting with its predicted cost."""

    policies: tuple[RematPolicy, ...]
    """One for each layer."""
    stream_weights: bool
    seconds: float
    """Of an optimizer step."""
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


class Planner:
    """Predicts what settings of one workload cost on one GPU, which need not be here.

    Raises:
        ValueError: a mixture of experts where jax-triton is not installed: its kernels are traced.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, prefetch_depth: int | None = None, run_ahead: int = 2):
        if workload.config.moe is not None and not has_jax_triton():
            raise ValueError(
                f"{workload.config.model_type} has experts, and their plan needs the kernels' definitions: install "
                "jax-triton and triton (part of jaxglue[cuda13])"
            )
        self.workload, self.gpu = workload, gpu
        self._depth, self._run_ahead = prefetch_depth, run_ahead
        self._model = TracedModel(workload, gpu, kernels=has_jax_triton())

    def plans(self) -> list[Plan]:
        """Every setting that is considered, the fastest first."""
        return sorted(self._candidates(), key=lambda plan: (plan.seconds, plan.device_bytes))

    def plan(self, policies: RematPolicy | Sequence[RematPolicy], *, stream_weights: bool = False) -> Plan:
        """The predicted cost of a setting."""
        model = self._model
        chosen = (policies,) * model.layers if isinstance(policies, RematPolicy) else tuple(policies)
        costs = [model.layer(index, policy) for index, policy in enumerate(chosen)]
        frozen = enumerate(model.frozen_layers)
        weights = [size if stream_weights and is_streamed(index) else 0 for index, size in frozen]
        depth = default_depth(stream_weights) if self._depth is None else self._depth
        host = sum(weights) + sum(cost.offloaded for cost in costs[: -1 - depth])
        return Plan(
            policies=chosen,
            stream_weights=stream_weights,
            seconds=self._seconds(costs, weights, depth),
            device_bytes=self._peak(costs, weights, depth),
            host_bytes=host,
        )

    def resolve(self, remat: str, *, stream_weights: bool | None, host_memory: float) -> Plan:
        """The plan that `--remat` and `--weights` ask for, `auto` included (of weights: None).

        Raises:
            ValueError: it does not fit (see `check` and `choose`), or the text is no policy.
        """
        if remat == AUTO:
            return self.choose(host_memory=host_memory, stream_weights=stream_weights)
        policies = parse_policies(remat, self._model.layers)
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
            may = f"{_gib(host_memory)} may be used (the least of what is free and {HOST_LIMIT}, 64 if it is not set)"
            need = f"{_gib(plan.host_bytes)} of pinned host memory, of which {may}"
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
        for stream in (False, True) if any(self._model.frozen_layers) else (False,):
            for text in _POLICIES:
                yield self.plan(parse_policy(text), stream_weights=stream)
            for lean, fast in _MIXES:
                if (mix := self._mix(parse_policy(lean), parse_policy(fast), stream)) is not None:
                    yield mix

    def _mix(self, lean: RematPolicy, fast: RematPolicy, stream: bool) -> Plan | None:
        """The fastest share of layers under the fast policy that fits the GPU."""
        layers = self._model.layers
        mixes = (interleave(lean, fast, layers, count) for count in range(1, layers))
        plans = (self.plan(mix, stream_weights=stream) for mix in mixes)
        fitting = (plan for plan in plans if plan.device_bytes <= (1 - MARGIN) * self.gpu.memory)
        return min(fitting, key=lambda plan: plan.seconds, default=None)

    def _seconds(self, costs: list[LayerCost], weights: list[int], depth: int) -> float:
        """A hidden copy still takes its share of the device memory's bandwidth."""
        link, copy, run_ahead = _LINK_SHARE * self.gpu.link, self.gpu.copy, self._run_ahead
        forward, backward = [], []
        for cost, streamed, gathered in zip(costs, weights, self._model.gathered_layers, strict=True):
            out, back, gather = cost.offloaded, cost.offloaded + streamed, gathered / self.gpu.peers
            kernels = max(cost.forward.seconds + (out + streamed) / copy, gather)
            forward.append(Work(kernels, arriving=streamed / link, leaving=out / link))
            kernels = max(cost.backward.seconds + back / copy, gather)
            backward.append(Work(kernels, arriving=back / link))
        for index in range(len(costs)):
            if keep_on_device(index, len(costs), depth):
                forward[index] = forward[index]._replace(leaving=0.0)
                backward[index] = backward[index]._replace(arriving=0.0)
        layers = schedule.simulate(forward, depth=weights_depth(depth), run_ahead=run_ahead)
        layers += schedule.simulate(backward[::-1], depth=depth, run_ahead=run_ahead)
        # AdamW reads parameter, gradient and two moments and writes all but the gradient.
        update = (3 * self._model.trained + 2 * self._moments) / copy
        return self.workload.gradient_accumulation_steps * (layers + self._model.head.seconds) + update

    @property
    def _moments(self) -> int:
        """Bytes of AdamW's state; what trains is float32."""
        return round(self.workload.moment_bytes / 4 * self._model.trained)

    def _peak(self, costs: list[LayerCost], weights: list[int], depth: int) -> int:
        """Bytes when there are most."""
        model = self._model
        resident = self._moments + model.trained + model.frozen_ends + sum(model.frozen_layers) - sum(weights)
        resident += model.gathered + max(weights)  # a streamed layer's are given back late
        peak = max(self._forward_peak(costs, weights, depth), self._backward_peak(costs, weights, depth))
        return int(_WORKSPACE + resident + peak)

    def _forward_peak(self, costs: list[LayerCost], weights: list[int], depth: int) -> float:
        """In some layer's forward pass: with weights of later layers, and what is on its way to the host."""
        stored, peak, ahead = 0, 0.0, weights_depth(depth)
        for index, cost in enumerate(costs):
            leaving = sum(earlier.offloaded for earlier in costs[max(index - self._run_ahead, 0) : index + 1])
            stored += cost.saved
            held = stored + leaving + sum(weights[index : index + ahead + 1]) + 2 * self._model.input_bytes
            peak = max(peak, held + cost.forward.temporary)
        return peak + (self._model.trained if self.workload.gradient_accumulation_steps > 1 else 0)

    def _backward_peak(self, costs: list[LayerCost], weights: list[int], depth: int) -> float:
        """In the head, or in some layer's backward pass."""
        model, x = self._model, self._model.input_bytes
        accumulates, updates = self.workload.gradient_accumulation_steps > 1, self.workload.update_in_backward
        head_gradients = model.head.results - x
        stored = sum(cost.saved for cost in costs)
        # What a layer and those after it in the backward pass have from the host, or have not sent there.
        fetched = [cost.offloaded + streamed for cost, streamed in zip(costs, weights, strict=True)]
        buffers = [sum(fetched[max(index - depth, 0) : index + 1]) for index in range(len(costs))]
        leaving = max(self._run_ahead - 1, 0) * max((cost.offloaded for cost in costs[: -1 - depth]), default=0)
        gradients = model.trained if accumulates else 0
        head = model.head.results + _HEAD_TEMPORARIES * model.head.temporary
        peak = buffers[-1] + leaving + stored + gradients + head
        if not (accumulates or updates):
            gradients = head_gradients
        for index in reversed(range(len(costs))):
            here = gradients if accumulates else gradients + model.trained_layers[index]
            held = stored + buffers[index] + leaving + here + model.scattered + 2 * x
            peak = max(peak, held + _LAYER_TEMPORARIES * costs[index].backward.temporary)
            gradients = gradients if updates else here
            stored, leaving = stored - costs[index].saved, 0
        if not accumulates:  # the embedding's come last
            peak = max(peak, gradients + max(model.trained - sum(model.trained_layers) - head_gradients, 0) + x)
        return peak


def pinned_memory(available: float, limit_gib: str | None = None) -> float:
    """Bytes of host memory that may be pinned.

    Args:
        available: bytes of host memory that no process uses; a tenth is left.
        limit_gib: what `HOST_LIMIT` says, None where it is not set.
    """
    return min(0.9 * available, float(limit_gib or 64) * GIB)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
