"""Prediction of a training step's time and memory under remat policies, and the choice of the fastest that fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from jaxglue.engine.layer_groups import why_not_grouped
from jaxglue.engine.per_layer import interleave
from jaxglue.engine.policy import AUTO, PRESETS, RematPolicy, parse_policies, parse_policy
from jaxglue.engine.residency import DEVICE, HOST, is_streamed, parse_weights, stream_evenly
from jaxglue.engine.transfer import RUN_AHEAD, default_prefetch_depth, keep_on_device, weights_prefetch_depth
from jaxglue.ops.backend import has_jax_triton
from jaxglue.planner.attention import with_fitting_attention
from jaxglue.planner.candidates import candidates, tile_sizes
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.groups import group_policies, restore_work, restored_groups, restored_inputs
from jaxglue.planner.overheads import choose_group, compile_seconds, with_dispatch
from jaxglue.planner.peak import PeakMemory
from jaxglue.planner.plans import HOST_LIMIT, DoesNotFit, Plan, by_time, gib
from jaxglue.planner.resident import resident_bytes
from jaxglue.planner.schedule import Work, simulate
from jaxglue.planner.search import fastest, interpolate, most
from jaxglue.planner.traced import LayerCost, TracedModel
from jaxglue.planner.workload import Workload

MARGIN = 0.05
"""Share of the GPU's memory that a plan leaves free, for the error of predictions and for fragmentation."""
_LINK_SHARE = 0.9
"""Share of the link's rate that a plan counts on: copies of both directions wait for each other."""
_LEAN = ("full", "offload")
"""Presets that need the least device memory, without and with host memory."""
_ROW_STEP = 128


class Planner:
    """Predicts the cost of a workload's settings on one GPU, which need not be present.

    Args:
        workload: what is trained.
        gpu: rates and memory.
        prefetch_depth: layers by which copies from the host are ahead; None for the executor's default.
        run_ahead: dispatched layers that the host does not wait for.

    Raises:
        ValueError: a mixture of experts without jax-triton installed, whose kernels are traced.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, prefetch_depth: int | None = None, run_ahead: int = RUN_AHEAD):
        if workload.config.moe is not None and not has_jax_triton():
            raise ValueError(
                f"planning {workload.config.model_type}, which has experts, needs the kernels' definitions: install "
                "jax-triton and triton (part of jaxglue[cuda13])"
            )
        self.workload, self.gpu = with_fitting_attention(workload, gpu), gpu
        self._depth, self._run_ahead = prefetch_depth, run_ahead
        self._model = TracedModel(self.workload, gpu, kernels=has_jax_triton())
        self._resident = resident_bytes(self.workload)
        self._plans: dict[tuple[float, str], list[Plan]] = {}

    def plans(self, host_memory: float = math.inf, weights: str = AUTO) -> list[Plan]:
        """Return every setting considered, the fastest first.

        Args:
            host_memory: bytes of host memory that may be pinned; slower settings are considered where it is short.
            weights: places of the layers' weights, `auto` for several.
        """
        if (found := self._plans.get((host_memory, weights))) is None:
            found = self._plans[host_memory, weights] = sorted(self._candidates(host_memory, weights), key=by_time)
        return list(found)

    def plan(
        self,
        policies: RematPolicy | Sequence[RematPolicy],
        *,
        weights: str | Sequence[str] = DEVICE,
        layers_per_program: int | None = None,
    ) -> Plan:
        """Predict the cost of a setting: policies, places of the layers' weights, and layers in a program.

        The fewest layers in a program that hide the host's time by default.
        """
        model = self._model
        chosen = (policies,) * model.layers if isinstance(policies, RematPolicy) else tuple(policies)
        places = parse_weights(weights, model.layers) if isinstance(weights, str) else tuple(weights)
        costs = [model.layer(index, policy) for index, policy in enumerate(chosen)]
        streamed, mapped = self._resident.streamed_layers(places), self._resident.mapped_layers(places)
        depth = default_prefetch_depth(is_streamed(places)) if self._depth is None else self._depth
        peak = PeakMemory(
            workload=self.workload,
            model=model,
            resident=self._resident,
            costs=costs,
            streamed=streamed,
            depth=depth,
            run_ahead=self._run_ahead,
            restored=restored_inputs(chosen, depth),
        )
        size = layers_per_program or self._layers_per_program(chosen, costs, streamed)
        return Plan(
            policies=chosen,
            weights=places,
            seconds=self._seconds(chosen, costs, self._arriving(streamed, mapped), depth, size),
            device_bytes=peak.total(),
            tile=self.workload.tile,
            layers_per_program=size,
            host_bytes=self._resident.host_ends
            + (sum(streamed) - sum(mapped))
            + min(max(mapped) * (weights_prefetch_depth(depth) + 1), sum(mapped))
            + sum(cost.offloaded for cost in costs[: -1 - depth]),
            mapped_bytes=sum(mapped),
            compile_seconds=compile_seconds(
                self.workload.config, chosen, sum(c.offloaded for c in costs[: -1 - depth]), size
            ),
        )

    def resolve(self, remat: str, *, weights: str, host_memory: float) -> Plan:
        """Return the plan that `--remat` and `--weights` ask for, either of which may be `auto`.

        Raises:
            DoesNotFit: see `check` and `choose`.
            ValueError: a text is neither policies nor places.
        """
        if remat == AUTO:
            return self.choose(host_memory=host_memory, weights=weights)
        policies = parse_policies(remat, self._model.layers)
        plans = (planner._resolve(policies, weights, host_memory) for planner in self._by_tile())
        first = next(plans)
        plan = first if self.fits(first, host_memory) else next((p for p in plans if self.fits(p, host_memory)), first)
        self.check(plan, host_memory=host_memory)
        return plan

    def _resolve(self, policies: Sequence[RematPolicy], weights: str, host_memory: float) -> Plan:
        plan = self.plan(policies, weights=DEVICE if weights == AUTO else weights)
        if weights == AUTO and not self.fits(plan, host_memory):
            return self._map_least(policies, host_memory) or self._stream_least(policies) or plan
        return plan

    def _by_tile(self) -> Iterator["Planner"]:
        """Yield this planner, and where no tile is given, those of ever smaller tiles."""
        yield self
        if self.workload.tile is None:
            for tile in tile_sizes(self.workload.tokens):
                yield self._with(tile=tile)

    def choose(self, *, host_memory: float, weights: str = DEVICE) -> Plan:
        """Return the fastest plan that leaves `MARGIN` of the GPU's memory free.

        Args:
            host_memory: bytes of host memory that may be pinned.
            weights: places of the layers' weights as `parse_weights` reads them; `auto` to choose them too.

        Raises:
            DoesNotFit: nothing fits; names the nearest setting and the remedy.
        """
        nothing_recomputed = self.plan(PRESETS["none"], weights=DEVICE if weights == AUTO else weights)
        if self.fits(nothing_recomputed, host_memory):
            return nothing_recomputed
        if weights in (AUTO, DEVICE) and (plan := self._mix_in_memory()):
            return plan
        found: list[Plan] = []
        for planner in self._by_tile():
            if planner is self or planner._least_load(host_memory, weights) <= 1:
                found += islice((p for p in planner.plans(host_memory, weights) if self.fits(p, host_memory)), 1)
            # Tiles leave more memory to inputs that an untiled plan drops.
            if found and (planner is not self or not any(policy.drops_input for policy in found[0].policies)):
                return min(found, key=by_time)
        if found:
            return found[0]
        if weights == AUTO and (mapped := self._map_lean(host_memory)):
            return mapped
        leanest = min(self.plans(host_memory, weights), key=lambda plan: plan.device_bytes)
        raise DoesNotFit(self._why_not(leanest, host_memory))

    def _map_lean(self, host_memory: float) -> Plan | None:
        """Return the fastest plan that fits with some layers' weights in files."""
        found = (p._map_least(PRESETS[name], host_memory) for p in self._by_tile() for name in _LEAN)
        return min((plan for plan in found if plan and self.fits(plan, host_memory)), key=by_time, default=None)

    def _mix_in_memory(self) -> Plan | None:
        """Return the fastest mix of `dots` and `none` where `dots` fits the GPU: no plan with copies can be faster."""
        dots, none = (parse_policy(text) for text in ("dots", "none"))
        if self.workload.tile is not None or not self.fits(self.plan(dots), 0):
            return None
        return self._mix(dots, none, parse_weights(DEVICE, self._model.layers), 0) or self.plan(dots)

    def fits(self, plan: Plan, host_memory: float) -> bool:
        """Return whether the plan fits the host and leaves the margin free on the GPU."""
        return plan.device_bytes <= self._room and plan.host_bytes <= host_memory

    @property
    def _room(self) -> float:
        return (1 - MARGIN) * self.gpu.memory

    def _fits_together(self, plan: Plan, host_memory: float) -> bool:
        """Return whether the plan fits the GPU, and GPU and host together: its copies may stay on the GPU."""
        return plan.device_bytes <= min(self._room, self._room + host_memory - plan.host_bytes)

    def with_seq_len(self, seq_len: int) -> "Planner":
        """Return the planner of the same workload with rows of another length."""
        return self._with(seq_len=seq_len)

    def _with(self, **changes: Any) -> "Planner":
        workload = replace(self.workload, **changes)
        return Planner(workload, self.gpu, prefetch_depth=self._depth, run_ahead=self._run_ahead)

    def longest_row(self, *, host_memory: float, weights: str = AUTO) -> int | None:
        """Return the longest row that fits, in steps of 128 tokens up to the model's limit; None if no row does.

        Memory grows almost linearly with the row, so interpolation needs few traces.
        """
        limit = self.workload.config.max_position_embeddings

        tiled_from = math.inf

        def load(seq_len: int) -> float:
            nonlocal tiled_from
            tiles = [] if self.workload.tile else tile_sizes(self.workload.batch_size * seq_len)
            if seq_len < tiled_from or not tiles:
                planner = self if seq_len == self.workload.seq_len else self.with_seq_len(seq_len)
                if (needed := planner._least_load(host_memory, weights)) <= 1 or not tiles:
                    return needed
                tiled_from = seq_len
            return self._with(seq_len=seq_len, tile=tiles[-1])._least_load(host_memory, weights)

        loads = {seq_len: load(seq_len) for seq_len in {min(self.workload.seq_len, limit), limit}}
        if min(loads.values()) > 1:
            loads[_ROW_STEP] = load(_ROW_STEP)
        while (guess := interpolate(loads, limit, _ROW_STEP)) not in loads:
            loads[guess] = load(guess)
        return max((seq_len for seq_len, needed in loads.items() if needed <= 1), default=None)

    def _least_load(self, host_memory: float, weights: str) -> float:
        """Return the larger share of GPU and host memory that the leanest setting takes."""
        streams = (DEVICE, HOST) if weights == AUTO else (weights,)
        policies = [PRESETS[name] for name in _LEAN]
        plans = [self.plan(policy, weights=places) for policy in policies for places in streams]
        if weights == AUTO:
            partly = (self._map_least(policy, host_memory) or self._stream_least(policy) for policy in policies)
            plans += filter(None, partly)
        plans += map(self.plan, self._groups(leanest=True))
        return min(max(plan.device_bytes / self._room, plan.host_bytes / max(host_memory, 1)) for plan in plans)

    def check(self, plan: Plan, *, host_memory: float) -> None:
        """Raise DoesNotFit for an explicit plan beyond the memory, naming the fastest plan that fits."""
        if plan.device_bytes > self.gpu.memory or plan.host_bytes > host_memory:
            raise DoesNotFit(self._why_not(plan, host_memory))

    def _why_not(self, plan: Plan, host_memory: float) -> str:
        if plan.device_bytes > self._room:
            need = f"{gib(plan.device_bytes)} on the GPU, of which {gib(self._room)} may be used"
        else:
            may = f"{gib(host_memory)} may be used (the least of what is free and {HOST_LIMIT}, 64 if it is not set)"
            need = f"{gib(plan.host_bytes)} of pinned host memory, of which {may}"
        tokens = f"{self.workload.batch_size} × {self.workload.seq_len:,} tokens"
        mesh = f" on --mesh {self.workload.mesh}" if self.workload.mesh.devices > 1 else ""
        return f"{plan} with {tokens}{mesh} needs {need}: {self._remedy(host_memory)}"

    def _remedy(self, host_memory: float) -> str:
        """Return the fastest setting that fits, or else the longest row with which one does."""
        for plan in self.plans(host_memory):
            if self.fits(plan, host_memory):
                return f"{plan} would fit in {gib(plan.device_bytes)}"
        shorter = self.longest_row(host_memory=host_memory)
        return f"--seq-len {shorter} would fit" if shorter else "no setting fits: use a larger GPU or a smaller model"

    def _candidates(self, host_memory: float, weights: str) -> Iterator[Plan]:
        frozen = any(self._resident.frozen_layers)
        for places in (weights,) if weights != AUTO else (DEVICE, HOST) if frozen else (DEVICE,):
            for plan in self._candidates_of(parse_weights(places, self._model.layers), host_memory):
                yield self._keep_on_device(plan, host_memory)
                if weights == AUTO and places == HOST and (partly := self._stream_least(plan.policies)) is not None:
                    yield partly

    def _candidates_of(self, places: Sequence[str], host_memory: float) -> Iterator[Plan]:
        policies, mixes = candidates(keep_attention=self._model.keeps_attention, tiled=self.workload.tile is not None)
        for text in policies:
            yield self.plan(parse_policy(text), weights=places)
        for lean, fast in mixes:
            if (mix := self._mix(parse_policy(lean), parse_policy(fast), places, host_memory)) is not None:
                yield mix
        for grouped in self._groups():
            yield self.plan(grouped, weights=places)

    def _groups(self, *, leanest: bool = False) -> Iterator[tuple[RematPolicy, ...]]:
        """Yield policies that drop layers' inputs, where a row is long enough to need them."""
        keep_attention = self._model.keeps_attention
        if self.workload.mesh.devices == 1 and (keep_attention or self.workload.tile):
            yield from group_policies(self._model.layers, keep_attention=keep_attention, leanest=leanest)

    def _stream_least(self, policies: RematPolicy | Sequence[RematPolicy]) -> Plan | None:
        """Return the plan that streams as few layers' weights as the GPU's memory allows, if some fits."""
        layers = self._model.layers

        def plan(count: int) -> Plan:
            return self.plan(policies, weights=stream_evenly(layers, count))

        return most(plan, range(layers - 1, 0, -1), lambda plan: self.fits(plan, math.inf))

    def _map_least(self, policies: RematPolicy | Sequence[RematPolicy], host_memory: float) -> Plan | None:
        """Return that plan with as few layers' weights in files as the host's memory allows, if some fits."""
        streams, layers = self._stream_least(policies), self._model.layers
        if streams is None or not self.gpu.files or self.fits(streams, host_memory):
            return streams
        streamed = layers - streams.weights.count(DEVICE)

        def plan(mapped: int) -> Plan:
            return self.plan(policies, weights=stream_evenly(layers, streamed, mapped))

        return most(plan, range(streamed, 0, -1), lambda plan: self.fits(plan, host_memory))

    def _mix(self, lean: RematPolicy, fast: RematPolicy, places: Sequence[str], host_memory: float) -> Plan | None:
        """Return the fastest mix of the two policies that fits, over the numbers of fast layers."""
        layers = self._model.layers

        def plan(count: int) -> Plan:
            return self.plan(interleave(lean, fast, layers, count), weights=places)

        return fastest(plan, range(1, layers), lambda plan: self._fits_together(plan, host_memory))

    def _keep_on_device(self, plan: Plan, host_memory: float) -> Plan:
        """Return the plan with what it offloads kept on the GPU, for as many layers as fit: pinning takes time.

        So do further programs to compile: several policies are doubled only where host memory is short.
        """
        layers, short = self._model.layers, plan.host_bytes > host_memory
        if not short and (not plan.host_bytes or len(set(plan.policies)) > 1):
            return plan

        def keep(count: int) -> Plan:
            chosen = zip(plan.policies, interleave(False, True, layers, count), strict=True)
            return self.plan(
                [policy.on_device() if keeps else policy for policy, keeps in chosen], weights=plan.weights
            )

        kept = most(keep, range(1, layers + 1), lambda kept: self.fits(kept, math.inf))
        return kept if kept and (short or kept.compile_seconds < plan.compile_seconds) else plan

    def _layers_per_program(self, policies, costs: list[LayerCost], streamed: list[int]) -> int:
        """Return the layers of a program; one where gradients of several layers should not exist at once."""
        work = self.workload
        alone = why_not_grouped(policies, devices=work.mesh.devices, stream_weights=any(streamed))
        return 1 if alone or work.update_in_backward else choose_group(costs)

    def _seconds(self, policies, costs: list[LayerCost], streamed: list[int], depth: int, size: int) -> float:
        """Predict the time of an optimizer step."""
        forward, backward = self._work(costs, streamed, depth)
        for group in restored_groups(policies):
            work = restore_work(group, policies, self._model, streamed, link=_LINK_SHARE * self.gpu.link)
            backward[group.stop] = backward[group.stop].and_before(work)
        layers = simulate(forward, depth=0, run_ahead=self._run_ahead, weights_depth=weights_prefetch_depth(depth))
        layers += simulate(backward[::-1], depth=depth, run_ahead=self._run_ahead, weights_depth=depth)
        passes = 3 if self.workload.reference else 2
        micro_batch = with_dispatch(layers + self._model.head.seconds, costs, size, passes)
        return self.workload.gradient_accumulation_steps * micro_batch + self.update_seconds

    def _arriving(self, streamed: list[int], mapped: list[int]) -> list[int]:
        """Return each layer's streamed bytes, those from files in units of the link's rate."""
        slower = max(self.gpu.link / self.gpu.files, 1) if self.gpu.files else 1
        return [size + round(in_file * (slower - 1)) for size, in_file in zip(streamed, mapped, strict=True)]

    @property
    def update_seconds(self) -> float:
        """Return the optimizer's time: it reads parameter, gradient and two moments and writes all but the gradient."""
        return (3 * self._resident.trainable + 2 * self._resident.moments) / self.gpu.copy

    def _work(self, costs: list[LayerCost], streamed: list[int], depth: int) -> tuple[list[Work], list[Work]]:
        """Return each layer's work forward and backward; a hidden copy still takes device memory bandwidth."""
        link, copy = _LINK_SHARE * self.gpu.link, self.gpu.copy
        forward, backward = [], []
        gathered = self._model.gathered_layers
        for index, (cost, weights) in enumerate(zip(costs, streamed, strict=True)):
            out, gather = cost.offloaded, gathered[index] / self.gpu.peers
            stays = keep_on_device(index, len(costs), depth)
            computing = cost.forward.seconds + self._model.reference_seconds(index)
            kernels = max(computing + (out + weights) / copy, gather)
            forward.append(Work(kernels, weights=weights / link, leaving=0.0 if stays else out / link))
            kernels = max(cost.backward.seconds + (out + weights) / copy, gather)
            backward.append(Work(kernels) if stays else Work(kernels, arriving=out / link, weights=weights / link))
        return forward, backward
