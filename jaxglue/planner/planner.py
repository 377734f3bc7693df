"""Prediction of a training step's time and memory under remat policies, and the choice of the fastest that fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxglue.engine.layer_groups import check_grouped
from jaxglue.engine.per_layer import interleave
from jaxglue.engine.policy import AUTO, PRESETS, RematPolicy, parse_policies, parse_policy
from jaxglue.engine.residency import DEVICE, HOST, MAPPED, is_streamed, parse_weights, stream_evenly
from jaxglue.engine.saved import check_dropped_inputs
from jaxglue.planner.candidates import candidates, tile_sizes
from jaxglue.planner.gpus import GIB, Gpu
from jaxglue.planner.groups import SIZES, group_policies
from jaxglue.planner.longest import longest_row
from jaxglue.planner.plans import HOST_LIMIT, DoesNotFit, Memory, Plan, by_time, gib
from jaxglue.planner.predictor import Predictor
from jaxglue.planner.programs import Programs
from jaxglue.planner.scaled import ScaledPrograms
from jaxglue.planner.search import fastest, most, soonest
from jaxglue.planner.workload import Workload

MARGIN = 0.05
"""Share of the GPU's memory that a plan leaves free, for the error of predictions and for fragmentation."""
_WORTH_COMPILING = 1.2 * GIB
"""Bytes of host memory whose use is as bad as a second of compilation."""
_LEAN = ("full", "offload")
"""Presets that need the least device memory, without and with host memory."""


class Planner(Predictor):
    """Chooses the fastest setting that fits the GPU and the host.

    Args:
        workload: what is trained.
        gpu: rates and memory.
        steps: of the run, whose start is weighed against them; None for so many that it does not matter.
        options: of `Predictor`.
    """

    def __init__(self, workload: Workload, gpu: Gpu, *, steps: int | None = None, **options: Any):
        super().__init__(workload, gpu, **options)
        self._steps, self._options = steps, {"steps": steps, **options}
        self._plans: dict[tuple[float, str], list[Plan]] = {}
        self._longest: dict[tuple[float, str], int | None] = {}
        self._variants: dict[Workload, Planner] = {}

    def plans(self, host_memory: float = math.inf, weights: str = AUTO) -> list[Plan]:
        """Return every setting considered, the fastest first.

        Args:
            host_memory: bytes of host memory that may be pinned; slower settings are considered where it is short.
            weights: places of the layers' weights, `auto` for several.
        """
        if (found := self._plans.get((host_memory, weights))) is None:
            found = self._plans[host_memory, weights] = sorted(self._candidates(host_memory, weights), key=by_time)
        return list(found)

    def resolve(self, remat: str, *, weights: str, host_memory: float) -> Plan:
        """Return the plan that `--remat` and `--weights` ask for, either of which may be `auto`.

        Raises:
            DoesNotFit: see `check` and `choose`.
            ValueError: a text is neither policies nor places, a dropped input cannot be computed again, or layers
                cannot share programs as they should.
        """
        plan, devices = self._find(remat, weights, host_memory), self.workload.mesh.devices
        check_dropped_inputs(plan.policies, meshed=devices > 1)
        check_grouped(self._grouped or 1, plan.policies, devices=devices, stream_weights=is_streamed(plan.weights))
        return plan

    def _find(self, remat: str, weights: str, host_memory: float) -> Plan:
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
            return self._map_least(policies, host_memory) or plan
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
        if self.least_load(host_memory, weights) <= 1 and (plan := self._choose_in_memory(host_memory, weights)):
            return plan
        found: list[Plan] = []
        for planner in self._by_tile():
            if planner.least_load(host_memory, weights) <= 1:
                found += soonest(planner.fitting_plans(host_memory, weights), self._steps)
            # Tiles leave more memory to inputs that an untiled plan drops.
            if found and (planner is not self or not any(policy.drops_input for policy in found[0].policies)):
                return min(found, key=lambda plan: (plan.run_seconds(self._steps), plan.device_bytes))
        if found:
            return found[0]
        if weights == AUTO and (mapped := self._map_lean(host_memory)):
            return mapped
        raise DoesNotFit(self._why_not(self._leanest(weights), host_memory))

    def _leanest(self, weights: str) -> Plan:
        """Return the plan that needs the least memory of the GPU."""
        policies: list[RematPolicy | Sequence[RematPolicy]] = [*(PRESETS[name] for name in _LEAN)]
        policies += self._lean_groups()
        streams = (DEVICE, HOST) if weights == AUTO else (weights,)
        plans = (self.plan(each, weights=places) for places in streams for each in policies)
        return min(plans, key=lambda plan: plan.device_bytes)

    def fitting_plans(self, host_memory: float, weights: str = AUTO) -> list[Plan]:
        """Return the plans of `plans` that fit, the fastest first."""
        if not self._may_fit(host_memory, weights):
            return []
        return [plan for plan in self.plans(host_memory, weights) if self.fits(plan, host_memory)]

    def _may_fit(self, host_memory: float, weights: str) -> bool:
        """Return whether GPU and host together hold what the leanest of `plans` need, found without most traces."""
        lean: list[RematPolicy | Sequence[RematPolicy]] = [PRESETS["full"], *self._lean_groups()]
        needed = [self.memory(policies, weights=DEVICE if weights == AUTO else weights) for policies in lean]
        return min(map(sum, needed)) <= self._room + host_memory

    def _map_lean(self, host_memory: float) -> Plan | None:
        """Return the fastest plan that fits with some layers' weights in files."""
        found = (p._map_least(PRESETS[name], host_memory) for p in self._by_tile() for name in _LEAN)
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
        return self._mix(dots, none, parse_weights(DEVICE, self._model.layers), 0) or self.plan(dots)

    def fits(self, plan: Plan | Memory, host_memory: float) -> bool:
        """Return whether the plan fits the host and leaves the margin free on the GPU."""
        return plan.device_bytes <= self._room and plan.host_bytes <= host_memory

    @property
    def _room(self) -> float:
        return (1 - MARGIN) * self.gpu.memory

    def _fits_together(self, plan: Memory, host_memory: float) -> bool:
        """Return whether the plan fits the GPU, and GPU and host together: its copies may stay on the GPU."""
        return plan.device_bytes <= min(self._room, self._room + host_memory - plan.host_bytes)

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

    def least_load(self, host_memory: float, weights: str) -> float:
        """Return the larger share of GPU and host memory that the leanest setting takes."""
        streams = (DEVICE, HOST) if weights == AUTO else (weights,)
        policies = [PRESETS[name] for name in _LEAN]
        plans: list[Memory] = [self.memory(policy, weights=places) for policy in policies for places in streams]
        if weights == AUTO:
            partly = ((policy, self._places_streamed(policy)) for policy in policies)
            plans += (self.memory(policy, weights=places) for policy, places in partly if places)
            plans += (self.memory(policy, weights=MAPPED) for policy in policies if self.gpu.files)
        plans += (self.memory(grouped, weights=streams[0]) for grouped in self._lean_groups())
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
        for plan in self.fitting_plans(host_memory):
            return f"{plan} would fit in {gib(plan.device_bytes)}"
        shorter = self.longest_row(host_memory=host_memory)
        if shorter:
            return f"--seq-len {shorter} would fit"
        lighter = "--method lora, " if self.workload.lora is None else ""
        return f"no setting fits: use {lighter}a larger GPU or a smaller model"

    def _candidates(self, host_memory: float, weights: str) -> Iterator[Plan]:
        frozen = any(self._resident.frozen_layers)
        for places in (weights,) if weights != AUTO else (DEVICE, HOST) if frozen else (DEVICE,):
            for plan in self._candidates_of(parse_weights(places, self._model.layers), host_memory):
                yield self._keep_on_device(plan, host_memory)
                if weights == AUTO and places == HOST and self.fits(plan, math.inf):
                    partly = self._stream_least(plan.policies)
                    if partly is not None:
                        yield partly

    def _candidates_of(self, places: Sequence[str], host_memory: float) -> Iterator[Plan]:
        work, keep_attention = self.workload, self._model.keeps_attention
        tiled, adapters = work.tile is not None, work.lora is not None
        policies, mixes = candidates(keep_attention=keep_attention, tiled=tiled, adapters=adapters)
        for text in policies:
            yield self.plan(parse_policy(text), weights=places)
        for lean, fast in mixes:
            if (mix := self._mix(parse_policy(lean), parse_policy(fast), places, host_memory)) is not None:
                yield mix
        for grouped in self._groups(places, host_memory):
            yield self.plan(grouped, weights=places)

    @property
    def _group_sizes(self) -> list[int]:
        """Return sizes of groups of layers that drop their inputs, where a row is long enough to need them."""
        if self.workload.mesh.devices > 1 or not (self._model.keeps_attention or self.workload.tile):
            return []
        return [size for size in SIZES if size < self._model.layers]

    def _lean_groups(self) -> list[tuple[RematPolicy, ...]]:
        """Return the policies of groups that keep the least."""
        return [group_policies(self._model.layers, size, kept_again=False) for size in self._group_sizes]

    def _groups(self, places: Sequence[str], host_memory: float) -> Iterator[tuple[RematPolicy, ...]]:
        """Yield policies of groups: attention's values stay where the GPU has room when their layer runs again."""
        if not self._model.keeps_attention:
            yield from self._lean_groups()
            return
        for size in self._group_sizes:
            for kept_again in (True, False):
                if (grouped := self._most_attention(size, places, host_memory, kept_again=kept_again)) is not None:
                    yield grouped
                    if self.fits(self.memory(grouped, weights=places), math.inf):
                        break
            else:
                yield group_policies(self._model.layers, size, kept_again=False)

    def _most_attention(
        self, size: int, places: Sequence[str], host_memory: float, *, kept_again: bool
    ) -> tuple[RematPolicy, ...] | None:
        """Return the policies of groups with attention's values of as many layers as fit the host, if any do."""
        layers = self._model.layers

        def fits(count: int) -> bool:
            grouped = group_policies(layers, size, attention=count, kept_again=kept_again)
            return self.memory(grouped, weights=places).host_bytes <= host_memory

        count = most(range(layers + 1), fits)
        return None if count is None else group_policies(layers, size, attention=count, kept_again=kept_again)

    def _stream_least(self, policies: RematPolicy | Sequence[RematPolicy]) -> Plan | None:
        """Return the plan that streams as few layers' weights as the GPU's memory allows, if some fits."""
        places = self._places_streamed(policies)
        return self.plan(policies, weights=places) if places else None

    def _map_least(self, policies: RematPolicy | Sequence[RematPolicy], host_memory: float) -> Plan | None:
        """Return that plan, with as few layers' weights in files as the host's memory allows where some do."""
        places = self._places_mapped(policies, host_memory)
        return self.plan(policies, weights=places) if places else None

    def _places_streamed(self, policies: RematPolicy | Sequence[RematPolicy]) -> tuple[str, ...] | None:
        """Return places with as few layers' weights streamed as the GPU's memory allows, if some fit."""
        layers = self._model.layers

        def fits(count: int) -> bool:
            return self.fits(self.memory(policies, weights=stream_evenly(layers, count)), math.inf)

        count = most(range(layers - 1, 0, -1), fits)
        return stream_evenly(layers, count) if count else None

    def _places_mapped(
        self, policies: RematPolicy | Sequence[RematPolicy], host_memory: float
    ) -> tuple[str, ...] | None:
        """Return those places, with as few layers' weights in files as the host's memory allows where some do."""
        places, layers = self._places_streamed(policies), self._model.layers
        if not places or not self.gpu.files or self.fits(self.memory(policies, weights=places), host_memory):
            return places
        streamed = layers - places.count(DEVICE)

        def fits(mapped: int) -> bool:
            return self.fits(self.memory(policies, weights=stream_evenly(layers, streamed, mapped)), host_memory)

        mapped = most(range(streamed, 0, -1), fits)
        return stream_evenly(layers, streamed, mapped) if mapped else places

    def _mix(self, lean: RematPolicy, fast: RematPolicy, places: Sequence[str], host_memory: float) -> Plan | None:
        """Return the fastest mix of the two policies that fits, over the numbers of fast layers."""
        layers = self._model.layers
        if not self._fits_together(self.memory(lean, weights=places), host_memory):
            return None

        def plan(count: int) -> Plan:
            return self.plan(interleave(lean, fast, layers, count), weights=places)

        def fits(count: int) -> bool:
            mixed = self.memory(interleave(lean, fast, layers, count), weights=places)
            return self._fits_together(mixed, host_memory)

        return fastest(plan, range(1, layers), fits)

    def _keep_on_device(self, plan: Plan, host_memory: float) -> Plan:
        """Return the plan with what it offloads kept on the GPU, for as many layers as fit, to pin less host memory.

        Further programs to compile take time: several policies are doubled only where host memory is short.
        """
        layers, short = self._model.layers, plan.host_bytes > host_memory
        if not self.fits(plan, math.inf) or (not short and (not plan.host_bytes or len(set(plan.policies)) > 1)):
            return plan

        on_device = {policy: policy.on_device() for policy in set(plan.policies)}

        def keep(count: int) -> tuple[RematPolicy, ...]:
            chosen = zip(plan.policies, interleave(False, True, layers, count), strict=True)
            return tuple(on_device[policy] if keeps else policy for policy, keeps in chosen)

        def fits(count: int) -> bool:
            return self.fits(self.memory(keep(count), weights=plan.weights), math.inf)

        count = most(range(1, layers + 1), fits)
        kept = self.plan(keep(count), weights=plan.weights) if count else None
        if kept is None or short:
            return kept or plan
        compiling = kept.compile_seconds - plan.compile_seconds
        return kept if plan.host_bytes - kept.host_bytes > _WORTH_COMPILING * compiling else plan
