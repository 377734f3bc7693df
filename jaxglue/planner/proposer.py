"""Settings worth comparing: presets, mixes of policies, groups of layers, streamed weights, as far as memory goes."""

import math
from collections.abc import Iterator, Sequence

from jaxglue.engine.per_layer import interleave
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policy
from jaxglue.engine.residency import DEVICE, HOST, parse_weights, stream_evenly
from jaxglue.planner.candidates import candidates, fastest, most
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plan import MARGIN, Memory, Plan
from jaxglue.planner.predictor import Predictor
from jaxglue.planner.step import SIZES, group_policies

_WORTH_COMPILING = 1.2 * GIB
"""Bytes of host memory whose use is as bad as a second of compilation."""


class Proposer(Predictor):
    """Proposes settings for the memory of a GPU and its host."""

    def fits(self, plan: Plan | Memory, host_memory: float) -> bool:
        """Return whether the plan fits the host and leaves the margin free on the GPU."""
        return plan.device_bytes <= self._room and plan.host_bytes <= host_memory

    @property
    def _room(self) -> float:
        return (1 - MARGIN) * self.gpu.memory

    def _fits_together(self, plan: Memory, host_memory: float) -> bool:
        """Return whether the plan fits the GPU, and GPU and host together: its copies may stay on the GPU."""
        return plan.device_bytes <= min(self._room, self._room + host_memory - plan.host_bytes)

    def propose(self, host_memory: float, weights: str) -> Iterator[Plan]:
        """Yield the plans to compare, for host memory of so many bytes and places of the layers' weights."""
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
        """Return the plan with offloaded values kept on the GPU, for as many layers as fit, to pin less host memory.

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
