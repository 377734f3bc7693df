"""Choice of the fastest setting of a training step that fits the GPU and the host, and the remedy where none does."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxglue.engine.garbage_collection import without_collection
from jaxglue.engine.layer_groups import check_grouped
from jaxglue.engine.policy import AUTO, PRESETS, RematPolicy, parse_policies, parse_policy
from jaxglue.engine.residency import DEVICE, HOST, MAPPED, is_streamed, parse_weights
from jaxglue.engine.saved import check_dropped_inputs
from jaxglue.planner.candidates import Candidates, tile_sizes
from jaxglue.planner.gpus import GIB, Gpu, find_gpu
from jaxglue.planner.host_memory import HOST_LIMIT
from jaxglue.planner.longest_row import longest_row
from jaxglue.planner.plan import DoesNotFit, Memory, Plan, by_time, gib
from jaxglue.planner.predictor import Predictor
from jaxglue.planner.programs import Programs, ScaledPrograms
from jaxglue.planner.workload import Workload

_AS_FAST = 0.01
"""Share by which a run may be slower where its first step begins sooner: less than predictions are off by."""
_FLOAT32, _EIGHT_BIT = 8.0, 2 + 8 / 256
"""Bytes of AdamW's two moments of a value, in float32 and in 8 bits."""
_SMALLEST = ("full", "offload")
"""Presets that need the least device memory, without and with host memory."""


def first_to_start(plans: Sequence[Plan], steps: int | None = None) -> list[Plan]:
    """Return the plan, if any, that starts first among those with which a run is as fast as with the fastest.

    A run is its start and its steps; without their number, the steps alone.
    """
    times = [plan.run_seconds(steps) for plan in plans]
    as_fast = [plan for plan, time in zip(plans, times, strict=True) if time <= (1 + _AS_FAST) * min(times)]
    return [min(as_fast, key=lambda plan: plan.start_seconds)] if as_fast else []


class Planner:
    """Chooses the fastest setting that fits the GPU and the host.

    Args:
        workload: the training to plan.
        gpu: rates and memory.
        steps: of the run, whose start is weighed against them; None for so many that it does not matter.
        options: of `Predictor`.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, steps: int | None = None, **options: Any):
        self.predictor = Predictor(workload, gpu, **options)
        self.candidates = Candidates(self.predictor)
        self.plan, self.memory = self.predictor.plan, self.predictor.memory
        """Predict a setting."""
        self.fits = self.candidates.fits
        self.steps, self._options = steps, {"steps": steps, **options}
        self._plans: dict[tuple[float, str], list[Plan]] = {}
        self._longest: dict[tuple[float, str], int | None] = {}
        self._variants: dict[Workload, Planner] = {}

    @property
    def workload(self) -> Workload:
        """Return the workload, with attention's kernels that fit the GPU."""
        return self.predictor.workload

    @property
    def gpu(self) -> Gpu:
        """Return rates and memory of the GPU."""
        return self.predictor.gpu

    def plans(self, host_memory: float = math.inf, weights: str = AUTO) -> list[Plan]:
        """Return every setting considered, the fastest first.

        Args:
            host_memory: bytes of host memory that may be pinned; slower settings are considered where it is short.
            weights: places of the layers' weights, `auto` for several.
        """
        weights = self._open(weights)
        if (found := self._plans.get((host_memory, weights))) is None:
            proposed = dict.fromkeys(self.candidates.propose(host_memory, weights))
            found = self._plans[host_memory, weights] = sorted(proposed, key=by_time)
        return list(found)

    def _open(self, weights: str) -> str:
        """Return places of weights, of which `auto` is open only where no answers are sampled from them."""
        return DEVICE if weights == AUTO and self.workload.objective.needs_rollouts else weights

    def resolve(self, remat: str, *, weights: str, host_memory: float) -> Plan:
        """Return the plan that `--remat` and `--weights` ask for, either of which may be `auto`.

        Raises:
            DoesNotFit: see `check` and `choose`.
            ValueError: a text is neither policies nor places, a dropped input cannot be computed again, or layers
                cannot share programs as they should.
        """
        plan = self._find(remat, weights, host_memory)
        check_dropped_inputs(plan.policies)
        check_grouped(
            self.predictor.layers_per_program or 1,
            plan.policies,
            stream_weights=is_streamed(plan.weights),
        )
        return plan

    def _find(self, remat: str, weights: str, host_memory: float) -> Plan:
        if remat == AUTO:
            return self.choose(host_memory=host_memory, weights=weights)
        policies = parse_policies(remat, self.predictor.model.layers)
        plans = (planner._resolve(policies, weights, host_memory) for planner in self._by_tile())
        first = next(plans)
        plan = first if self.fits(first, host_memory) else next((p for p in plans if self.fits(p, host_memory)), first)
        self.check(plan, host_memory=host_memory)
        return plan

    def _resolve(self, policies: Sequence[RematPolicy], weights: str, host_memory: float) -> Plan:
        plan = self.plan(policies, weights=DEVICE if weights == AUTO else weights)
        if weights == AUTO and not self.fits(plan, host_memory):
            return self.candidates.map_least(policies, host_memory) or plan
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
        if self.memory_share(host_memory, weights) <= 1 and (plan := self._choose_in_memory(host_memory, weights)):
            return plan
        found: list[Plan] = []
        for planner in self._by_tile():
            if planner.memory_share(host_memory, weights) <= 1:
                found += first_to_start(planner.fitting_plans(host_memory, weights), self.steps)
            # Tiles leave more memory to inputs that an untiled plan drops.
            if found and (planner is not self or not any(policy.drops_input for policy in found[0].policies)):
                return min(found, key=lambda plan: (plan.run_seconds(self.steps), plan.device_bytes))
        if found:
            return found[0]
        if weights == AUTO and (mapped := self._map_smallest(host_memory)):
            return mapped
        raise DoesNotFit(self._why_not(self._smallest(weights), host_memory))

    def _smallest(self, weights: str) -> Plan:
        """Return the plan that needs the least memory of the GPU."""
        policies: list[RematPolicy | Sequence[RematPolicy]] = [*(PRESETS[name] for name in _SMALLEST)]
        policies += self.candidates.smallest_groups()
        streams = (DEVICE, HOST) if weights == AUTO else (weights,)
        plans = (self.plan(each, weights=places) for places in streams for each in policies)
        return min(plans, key=lambda plan: plan.device_bytes)

    def fitting_plans(self, host_memory: float, weights: str = AUTO) -> list[Plan]:
        """Return the plans of `plans` that fit, the fastest first."""
        if not self._may_fit(host_memory, weights):
            return []
        return [plan for plan in self.plans(host_memory, weights) if self.fits(plan, host_memory)]

    def _may_fit(self, host_memory: float, weights: str) -> bool:
        """Return whether GPU and host together hold the smallest of `plans`, found without most traces."""
        small: list[RematPolicy | Sequence[RematPolicy]] = [PRESETS["full"], *self.candidates.smallest_groups()]
        needed = [self.memory(policies, weights=DEVICE if weights == AUTO else weights) for policies in small]
        return min(map(sum, needed)) <= self.candidates.room + host_memory

    def _map_smallest(self, host_memory: float) -> Plan | None:
        """Return the fastest plan that fits with some layers' weights in files."""
        found = (p.candidates.map_least(PRESETS[name], host_memory) for p in self._by_tile() for name in _SMALLEST)
        return min((plan for plan in found if plan and self.fits(plan, host_memory)), key=by_time, default=None)

    def _choose_in_memory(self, host_memory: float, weights: str) -> Plan | None:
        """Return the plan of `none`, or the fastest mix of `dots` and `none`, where `none` or `dots` fits the GPU.

        No plan with copies can be faster.
        """
        nothing_recomputed = self.plan(PRESETS["none"], weights=DEVICE if weights == AUTO else weights)
        if self.fits(nothing_recomputed, host_memory):
            return nothing_recomputed
        if weights not in (AUTO, DEVICE):
            return None
        dots, none = (parse_policy(text) for text in ("dots", "none"))
        if self.workload.tile is not None or not self.fits(self.memory(dots), 0):
            return None
        return self.candidates.mix(dots, none, parse_weights(DEVICE, self.predictor.model.layers), 0) or self.plan(dots)

    def with_seq_len(self, seq_len: int) -> "Planner":
        """Return the planner of the same workload with rows of another length."""
        return self._with(seq_len=seq_len)

    def on(self, workload: Workload) -> "Planner":
        """Return the planner of another workload on the same GPU."""
        return Planner(workload, self.gpu, **self._options)

    def with_rows(
        self, seq_len: int, tile: int | None, *, scaled: tuple[Programs, Programs] | None = None
    ) -> "Planner":
        """Return the planner for rows of another length and tile, with programs scaled from two others if given."""
        if scaled is None:
            return self._with(seq_len=seq_len, tile=tile)
        workload = replace(self.workload, seq_len=seq_len, tile=tile)
        return Planner(workload, self.gpu, **self._options, programs=ScaledPrograms(workload, scaled))

    def _with(self, **changes: Any) -> "Planner":
        workload = replace(self.workload, **changes)
        if workload == self.workload:
            return self
        if workload not in self._variants:
            self._variants[workload] = self.on(workload)
        return self._variants[workload]

    def longest_row(self, *, host_memory: float, weights: str = AUTO) -> int | None:
        """Return the longest row that fits, in steps of 128 tokens up to the model's limit; None if no row does."""
        key = host_memory, weights
        if key not in self._longest:
            self._longest[key] = longest_row(self, host_memory, weights)
        return self._longest[key]

    def memory_share(self, host_memory: float, weights: str) -> float:
        """Return the larger share of GPU and host memory that the smallest setting takes."""
        weights = self._open(weights)
        streams = (DEVICE, HOST) if weights == AUTO else (weights,)
        policies = [PRESETS[name] for name in _SMALLEST]
        plans: list[Memory] = [self.memory(policy, weights=places) for policy in policies for places in streams]
        if weights == AUTO:
            partly = ((policy, self.candidates.places_streamed(policy)) for policy in policies)
            plans += (self.memory(policy, weights=places) for policy, places in partly if places)
            plans += (self.memory(policy, weights=MAPPED) for policy in policies if self.gpu.files)
        plans += (self.memory(grouped, weights=streams[0]) for grouped in self.candidates.smallest_groups())
        return min(
            max(plan.device_bytes / self.candidates.room, plan.host_bytes / max(host_memory, 1)) for plan in plans
        )

    def check(self, plan: Plan, *, host_memory: float) -> None:
        """Raise DoesNotFit for an explicit plan beyond the memory, naming the fastest plan that fits."""
        if plan.device_bytes > self.gpu.memory or plan.host_bytes > host_memory:
            raise DoesNotFit(self._why_not(plan, host_memory))

    def _why_not(self, plan: Plan, host_memory: float) -> str:
        if plan.device_bytes > self.candidates.room:
            need = f"{gib(plan.device_bytes)} on the GPU, of which {gib(self.candidates.room)} may be used"
        elif self.gpu.unified:
            need = f"{gib(plan.host_bytes)} of pinned host memory, which is the memory of {self.gpu.name} itself"
        else:
            may = f"{gib(host_memory)} may be used (the least of what is free and {HOST_LIMIT}, 64 if it is not set)"
            need = f"{gib(plan.host_bytes)} of pinned host memory, of which {may}"
        tokens = f"{self.workload.batch_size} × {self.workload.seq_len:,} tokens"
        mesh = f" on --mesh {self.workload.mesh}" if self.workload.mesh.devices > 1 else ""
        return f"{plan} with {tokens}{mesh} needs {need}: {self._remedy(host_memory)}"

    def _remedy(self, host_memory: float) -> str:
        """Return the fastest setting that fits, or else the longest row with which one does."""
        for plan in self.fitting_plans(host_memory):
            return f"{plan} would fit in {gib(plan.device_bytes)}"
        for flags, changes in self._lighter_optimizers():
            if self._with(**changes).memory_share(host_memory, AUTO) <= 1:
                return f"{flags} would fit"
        shorter = self.longest_row(host_memory=host_memory)
        if shorter:
            return f"--seq-len {shorter} would fit"
        lighter = "--method lora, " if self.workload.lora is None else ""
        return f"no setting fits: use {lighter}a larger GPU or a smaller model"

    def _lighter_optimizers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield flags under which all weights train in less memory, and the workload's fields that they change."""
        work = self.workload
        if work.lora is not None:
            return
        smaller = {"moment_bytes": _EIGHT_BIT} if work.moment_bytes == _FLOAT32 else {}
        at_once = {"update_in_backward": True} if work.gradient_accumulation_steps == 1 else {}
        if smaller:
            yield "--moments 8bit", smaller
        if at_once and not work.update_in_backward:
            yield "--update-in-backward --clip-norm 0", at_once
            if smaller:
                yield "--moments 8bit --update-in-backward --clip-norm 0", smaller | at_once


@without_collection()
def plan(
    workload: Workload,
    gpu: str,
    *,
    remat: str = AUTO,
    weights: str = AUTO,
    memory_limit: float | None = None,
    host_memory: float = 64.0,
) -> Plan:
    """Predict time and memory of a training step, choosing the fastest policy that fits unless `remat` names one.

    Args:
        workload: model, batch and method, as shapes.
        gpu: name of a known GPU, such as "RTX 4090"; it need not be present.
        remat: a policy as `parse_policies` reads it, or `auto`.
        weights: places of the layers' frozen weights as `parse_weights` reads them, or `auto`.
        memory_limit: usable GPU memory in GiB; nine tenths of the GPU's by default.
        host_memory: host memory that may be pinned, GiB.

    Raises:
        ValueError: an unknown GPU or policy, or nothing fits.
    """
    planner = Planner(workload, find_gpu(gpu).limited(memory_limit))
    return planner.resolve(remat, weights=weights, host_memory=planner.gpu.host_memory(host_memory * GIB))


def embedding_places(workload: Workload, embeddings: str) -> list[Workload]:
    """Return the workload, and for `auto` also that with the embeddings in host memory where they can be there."""
    places = [workload]
    if embeddings == AUTO and workload.mesh.devices == 1:
        with contextlib.suppress(ValueError):  # a tied or trained table stays on the GPU
            places.append(replace(workload, host_embeddings=True))
    return places


def fastest_place[Place](
    places: Sequence[Place], resolve: Callable[[Place], tuple[Planner, Plan]]
) -> tuple[Planner, Plan]:
    """Return the fastest of the places' plans; the first place's where it streams no layer's weights.

    Raises:
        DoesNotFit: no plan fits; names the first place's remedy.
    """
    found, refused = [], []
    for placed in places:
        try:
            found.append(resolve(placed))
        except DoesNotFit as error:
            refused.append(error)
        if found and not is_streamed(found[0][1].weights):
            break
    if not found:
        raise refused[0]
    return min(found, key=lambda planned: by_time(planned[1]))
