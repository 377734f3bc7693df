"""Prediction of a training step's time and memory under remat policies and places of weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from jaxglue.engine.layer_groups import why_not_grouped
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residency import DEVICE, is_streamed, parse_weights
from jaxglue.engine.transfer import (
    HEAD_AHEAD,
    RUN_AHEAD,
    default_prefetch_depth,
    keep_on_device,
    weights_prefetch_depth,
)
from jaxglue.ops.backend import has_jax_triton
from jaxglue.planner import calibration as fitted
from jaxglue.planner.attention import with_fitting_attention
from jaxglue.planner.gpus import RECORDED, Dispatch, Gpu
from jaxglue.planner.kernel_times import fused_seconds
from jaxglue.planner.layer_costs import LayerCost, TracedModel
from jaxglue.planner.memory import PeakMemory, resident_bytes
from jaxglue.planner.plan import SMALL_VALUES, Memory, Plan
from jaxglue.planner.programs import Programs
from jaxglue.planner.step import (
    LayerArrays,
    MicroBatch,
    Setting,
    Work,
    choose_group,
    compile_seconds,
    micro_batch,
    pinning_seconds,
    replayed_bytes,
    restorations,
    restore_work,
    restored_bytes,
    restored_layers,
    simulate,
)
from jaxglue.planner.vision import tower_seconds
from jaxglue.planner.workload import Workload

_SLOW_HOST = 3
"""Times as long as the recorded host takes."""


class Predictor:
    """Predicts the cost of a workload's settings on one GPU, which need not be present.

    Args:
        workload: the training to predict.
        gpu: rates and memory.
        prefetch_depth: layers by which copies from the host are ahead; None for the executor's default.
        run_ahead: dispatched layers that the host does not wait for.
        layers_per_program: consecutive layers dispatched as one program, where they may share one; None for the fewest
            that hide the host's time.
        programs: of the workload; traced by default.

    Raises:
        ValueError: a mixture of experts without jax-triton installed, whose kernels are traced.
    """

    def __init__(
        self,
        workload: Workload,
        gpu: Gpu,
        *,
        prefetch_depth: int | None = None,
        run_ahead: int = RUN_AHEAD,
        layers_per_program: int | None = None,
        programs: Programs | None = None,
    ):
        if workload.config.moe is not None and not has_jax_triton():
            raise ValueError(
                f"planning {workload.config.model_type}, which has experts, needs the kernels' definitions: install "
                "jax-triton and triton (pip install '.[cuda13]' in the clone of jaxglue)"
            )
        self.workload, self.gpu = with_fitting_attention(workload, gpu), gpu
        self.layers_per_program = layers_per_program
        self._depth, self._run_ahead = prefetch_depth, run_ahead
        self.model = TracedModel(self.workload, gpu, kernels=has_jax_triton(), programs=programs)
        self.resident = resident_bytes(self.workload)
        self._settings, self._memory_of = cache(self._make_setting), cache(self._predict_memory)

    def plan(
        self,
        policies: RematPolicy | Sequence[RematPolicy],
        *,
        weights: str | Sequence[str] = DEVICE,
        layers_per_program: int | None = None,
    ) -> Plan:
        """Predict the cost of a setting: policies, places of the layers' weights, and layers in a program.

        By default as many layers in a program as the planner was given.
        """
        setting = self._setting(policies, weights)
        memory = self._memory_of(setting)
        size = layers_per_program or self._size(setting)
        config, one_program = self.workload.config, self._is_one_program(size)
        compiling = compile_seconds(config, setting.policies, size, one_program=one_program)
        return Plan(
            policies=setting.policies,
            weights=setting.weights,
            seconds=self._seconds(setting, size),
            device_bytes=memory.device_bytes,
            tile=self.workload.tile,
            layers_per_program=size,
            one_program=one_program,
            host_bytes=memory.host_bytes,
            offloaded_bytes=setting.offloaded,
            mapped_bytes=sum(setting.mapped),
            compile_seconds=compiling,
            pinning_seconds=pinning_seconds(setting.offloaded, compiling, devices=self.workload.mesh.devices),
        )

    def memory(self, policies: RematPolicy | Sequence[RematPolicy], *, weights: str | Sequence[str] = DEVICE) -> Memory:
        """Predict the memory of a setting, in half the time of its plan."""
        return self._memory_of(self._setting(policies, weights))

    def _setting(self, policies: RematPolicy | Sequence[RematPolicy], weights: str | Sequence[str]) -> Setting:
        layers = self.model.layers
        chosen = (policies,) * layers if isinstance(policies, RematPolicy) else tuple(policies)
        places = parse_weights(weights, layers) if isinstance(weights, str) else tuple(weights)
        return self._settings(chosen, places)

    def _keep_small(self, policies: tuple[RematPolicy, ...], places: tuple[str, ...]) -> tuple[RematPolicy, ...]:
        """Return policies that keep `SMALL_VALUES` on the device, unless streamed weights need the host anyway."""
        if is_streamed(places):
            return policies

        def is_small(index: int, policy: RematPolicy) -> bool:
            return bool(policy.offloaded) and self.model.layer(index, policy).offloaded <= SMALL_VALUES

        return tuple(policy.on_device() if is_small(i, policy) else policy for i, policy in enumerate(policies))

    def _make_setting(self, policies: tuple[RematPolicy, ...], places: tuple[str, ...]) -> Setting:
        policies = self._keep_small(policies, places)
        depth = default_prefetch_depth(is_streamed(places)) if self._depth is None else self._depth
        costs, restored = list(map(self.model.layer, range(len(policies)), policies)), restored_layers(policies, depth)
        for index in restored:
            backward = self.model.layer(index, policies[index].restored()).backward
            costs[index] = replace(costs[index], backward=backward)
        return Setting(
            policies=policies,
            weights=places,
            costs=costs,
            streamed=self.resident.streamed_layers(places),
            mapped=self.resident.mapped_layers(places),
            depth=depth,
        )

    def _predict_memory(self, setting: Setting) -> Memory:
        recomputes = any(policy.saved is not None for policy in setting.policies)
        size = self._size(setting)
        one_program = self._is_one_program(size)
        grouped = 1 < size < self.model.layers
        peak = PeakMemory(
            workload=self.workload,
            model=self.model,
            resident=self.resident,
            costs=setting.costs,
            streamed=setting.streamed,
            depth=setting.depth,
            run_ahead=self._run_ahead,
            restored=restored_bytes(setting.policies, setting.depth, self.model),
            replayed=replayed_bytes(setting.policies, setting.depth, self.model, setting.streamed),
            one_program=one_program,
            scattered=recomputes and one_program,
            compiled_ahead=self.workload.compiled_ahead and not grouped,
        )
        host_bytes = self.resident.host_ends + setting.weight_bytes + setting.offloaded
        return Memory(device_bytes=peak.total(), host_bytes=host_bytes)

    def _size(self, setting: Setting) -> int:
        """Return the layers of a program; by default one where gradients of several should not exist at once."""
        work = self.workload
        if why_not_grouped(setting.policies, stream_weights=any(setting.streamed)):
            return 1
        if self.layers_per_program or work.update_in_backward:
            return self.layers_per_program or 1
        return choose_group(setting.costs, one_program=not work.host_embeddings)

    def _is_one_program(self, size: int) -> bool:
        """Return whether a micro-batch is one program when `size` layers are."""
        return 1 < self.model.layers <= size and not self.workload.host_embeddings

    def _seconds(self, setting: Setting, size: int) -> float:
        """Predict the time of an optimizer step."""
        updates = self._updates(size)
        seconds = self._micro_batch(setting, size, updates=updates).seconds(self.gpu.dispatch)
        seconds += tower_seconds(self.workload, self.gpu)
        if self.workload.objective.two_passes:
            seconds += self._first_pass_seconds(setting)
        return seconds if updates else self.workload.gradient_accumulation_steps * seconds + self.update_seconds

    def _first_pass_seconds(self, setting: Setting) -> float:
        """Predict the time of a micro-batch's pass that keeps nothing, before the one with gradients."""
        streamed = self._arriving(setting.streamed, setting.mapped)
        layers = [
            Work(cost.forward.seconds, weights=size / self._link)
            for cost, size in zip(setting.costs, streamed, strict=True)
        ]
        ahead = weights_prefetch_depth(setting.depth)
        return simulate(layers, depth=0, run_ahead=self._run_ahead, weights_depth=ahead)

    def _updates(self, size: int) -> bool:
        """Return whether a program of `size` layers is a step's only one."""
        work = self.workload
        return self._is_one_program(size) and work.gradient_accumulation_steps == 1 and not work.update_in_backward

    def work(self, plan: Plan) -> MicroBatch:
        """Return the work of a plan's micro-batch, from which its time on any host follows."""
        return self._micro_batch(self._settings(plan.policies, plan.weights), plan.layers_per_program)

    def hides_dispatch(self, plan: Plan) -> bool:
        """Return whether a plan takes the same time, within a percent, on much slower hosts than the recorded one."""
        setting, size = self._settings(plan.policies, plan.weights), plan.layers_per_program
        work = self._micro_batch(setting, size, updates=self._updates(size))
        slow = Dispatch(*(_SLOW_HOST * rate for rate in RECORDED))
        return work.seconds(slow) < 1.01 * work.gpu_seconds

    def _micro_batch(self, setting: Setting, size: int, *, updates: bool = False) -> MicroBatch:
        streamed, depth = self._arriving(setting.streamed, setting.mapped), setting.depth
        forward, backward = self._work(setting.costs, streamed, depth)
        for again in restorations(setting.policies, depth):
            work = restore_work(again, setting.policies, self.model, streamed, link=self._link)
            backward[again.layers.stop] = backward[again.layers.stop].and_before(work)
        layers = simulate(forward, depth=0, run_ahead=self._run_ahead, weights_depth=weights_prefetch_depth(depth))
        layers += simulate(backward[::-1], depth=depth, run_ahead=self._run_ahead, weights_depth=depth)
        hidden = sum(work.kernels for work in forward[-HEAD_AHEAD:])
        head = self.model.head_seconds + max(self.resident.host_head / self._link - hidden, 0)
        passes, one_program = 3 if self.workload.reference else 2, self._is_one_program(size)
        ends = head + self._embedding_seconds(one_program=one_program) + (self.update_seconds if updates else 0)
        return micro_batch(layers + ends, self._arrays(setting), size, passes, one_program=one_program, updates=updates)

    def _embedding_seconds(self, *, one_program: bool) -> float:
        """Return the time of a trained embedding's gradient: zeros for the table, and its addition to a sum."""
        return fused_seconds(self._table_passes(one_program=one_program) * self.resident.trainable_table, self.gpu)

    def _table_passes(self, *, one_program: bool) -> int:
        """Return the passes over the table; an only program adds rows in place, or as it scales the head's gradient."""
        accumulates, tied = self.workload.gradient_accumulation_steps > 1, self.workload.config.tie_word_embeddings
        if not (accumulates or tied):
            return 1
        if not one_program:
            return 4
        return 0 if accumulates else 2

    def _arrays(self, setting: Setting) -> list[LayerArrays]:
        arrays, costs, streamed = map(self.model.arrays, range(self.model.layers)), setting.costs, setting.streamed
        return [
            LayerArrays(
                trainable,
                frozen,
                offloaded=cost.offloaded_names,
                streamed=bool(size),
                kernels=cost.forward.kernels + cost.backward.kernels,
            )
            for (trainable, frozen), cost, size in zip(arrays, costs, streamed, strict=True)
        ]

    def reference_seconds(self, policies: Sequence[RematPolicy], weights: Sequence[str]) -> tuple[float, float]:
        """Predict the time that the reference adds to a step, and the time of a pass of its own over the same rows."""
        setting, model = self._setting(policies, weights), self.model
        size = self._size(setting)
        without = Predictor(replace(self.workload, reference=False), self.gpu)
        alone = without.plan(policies, weights=weights, layers_per_program=size).seconds
        added = self._seconds(setting, size) - alone
        arriving = (size / self._link for size in self._arriving(setting.streamed, setting.mapped))
        layers = [Work(model.reference_seconds(index), weights=copy) for index, copy in enumerate(arriving)]
        ahead = weights_prefetch_depth(setting.depth)
        own_pass = simulate(layers, depth=0, run_ahead=self._run_ahead, weights_depth=ahead)
        own_pass += model.head_seconds - without.model.head_seconds
        return added, self.workload.gradient_accumulation_steps * own_pass

    @property
    def programs(self) -> Programs:
        """Return the programs of the workload's layers and head."""
        return self.model.programs

    @property
    def _link(self) -> float:
        """Return the bytes/s between host and GPU that a plan counts on."""
        return fitted.LINK_SHARE * self.gpu.link

    def _arriving(self, streamed: list[int], mapped: list[int]) -> list[int]:
        """Return each layer's streamed bytes, those from files in units of the link's rate."""
        slower = max(self.gpu.link / self.gpu.files, 1) if self.gpu.files else 1
        return [size + round(in_file * (slower - 1)) for size, in_file in zip(streamed, mapped, strict=True)]

    @property
    def update_seconds(self) -> float:
        """Return the optimizer's time: it reads parameter, gradient and two moments and writes all but the gradient.

        Gradients are exchanged before.
        """
        moved = 3 * self.resident.trainable + 2 * self.resident.moments
        return moved / self.gpu.copy + self.resident.exchanged / self.gpu.peers

    def _work(self, costs: list[LayerCost], streamed: list[int], depth: int) -> tuple[list[Work], list[Work]]:
        """Return each layer's work forward and backward; a hidden copy still takes device memory bandwidth."""
        link, copy = self._link, self.gpu.copy
        forward, backward = [], []
        gathered = self.model.gathered_layers
        for index, (cost, weights) in enumerate(zip(costs, streamed, strict=True)):
            out, gather = cost.offloaded, gathered[index] / self.gpu.peers
            stays = keep_on_device(index, len(costs), depth)
            computing = cost.forward.seconds + self.model.reference_seconds(index)
            kernels = max(computing + (out + weights) / copy, gather)
            forward.append(Work(kernels, weights=weights / link, leaving=0.0 if stays else out / link))
            kernels = max(cost.backward.seconds + (out + weights) / copy, gather)
            backward.append(Work(kernels) if stays else Work(kernels, arriving=out / link, weights=weights / link))
        return forward, backward
