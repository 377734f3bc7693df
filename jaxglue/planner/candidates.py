"""Settings worth comparing: presets, mixes of policies, groups of layers, streamed weights, as far as memory goes."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

from jaxglue.engine.layer_settings import interleave
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policy
from jaxglue.engine.residency import DEVICE, HOST, parse_weights, stream_evenly
from jaxglue.models.family import find_family
from jaxglue.planner import calibration as fitted
from jaxglue.planner.plan import MARGIN, Memory, Plan, by_time
from jaxglue.planner.predictor import Predictor

_GROUP_SIZES = (2, 4, 8)
"""Layers in a group."""
ATTENTION = "attention_out,attention_lse"
_RANKS = "lora_hidden"
"""Few bytes a token, and they save the passes to adapters' ranks, SwiGLU's among them: kept wherever it can be."""
_OFFLOADS = (
    f"offload:layer_input,attention_residual,query,key,value,{_RANKS}",
    f"offload:layer_input,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,key,value,gate,{_RANKS}",
    f"offload:layer_input,attention_residual,query,key,value,gate,{_RANKS}",
)
"""Policies in the order of bytes offloaded, as all values save about as much recomputation per byte."""
_SMALLEST = f"save:{_RANKS}", f"offload:layer_input,{_RANKS}"
_POLICIES: tuple[str, ...] = ("none", "dots", "dots; offload:layer_input", "full", "offload", *_SMALLEST, *_OFFLOADS)
_MIXES = (
    ("dots", "none"),
    *((small, "dots") for small in (*_SMALLEST, *_OFFLOADS)),
    *pairwise(_OFFLOADS),
    *((small, f"{small}; save:up") for small in _OFFLOADS[1:]),
    *((small, f"{other}; save:up") for other, small in pairwise(_OFFLOADS[1:])),
)
_KEPT = ("full", f"save:{ATTENTION}", f"offload; save:{ATTENTION}", f"offload:layer_input,{ATTENTION}")
"""Policies of layers by tiles, in which only attention's values and the layer's input can be kept."""
_TILED_POLICIES = (*_KEPT, "offload", f"offload:layer_input,query,key,value,{ATTENTION}")
_TILED_MIXES = (
    ("offload", f"offload:layer_input,{ATTENTION}"),
    *((f"offload:layer_input,{ATTENTION}", fast) for fast in (*_KEPT[1:3], _TILED_POLICIES[-1])),
)
_TILES = (32768, 16384, 8192)
"""Most tokens of a tile, in the order in which they are tried."""
_LEAST_TILE = 1024

PoliciesAndMixes = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def policies_and_mixes(
    *, keep_attention: bool, tiled: bool, adapters: bool, normed_branch: bool = False
) -> PoliciesAndMixes:
    """Return policies, and pairs of a small and a fast one, spread among the small so that the link catches up.

    Args:
        keep_attention: attention's output and log-sum-exp are copied faster than they are recomputed.
        tiled: layers compute by tiles.
        adapters: layers have adapters.
        normed_branch: the feed-forward's output has a norm before it is added.
    """
    if tiled:
        return _TILED_POLICIES, _TILED_MIXES
    policies, mixes = _POLICIES, _MIXES
    if normed_branch:
        mixes = tuple((_with_branch(small), _with_branch(fast)) for small, fast in mixes)
        policies = tuple(dict.fromkeys((*policies, *map(_with_branch, policies))))
    if keep_attention:
        kept = _with_attention(_SMALLEST[1])
        more = (_SMALLEST[1], kept), (kept, _with_attention(_OFFLOADS[0]))
        mixes = (*more, *((_with_attention(small), _with_attention(fast)) for small, fast in mixes))
        policies = tuple(map(_with_attention, policies))
    if adapters:
        return policies, mixes
    pairs = ((_without_ranks(small), _without_ranks(fast)) for small, fast in mixes)
    return tuple(dict.fromkeys(map(_without_ranks, policies))), tuple(pairs)


def _with_branch(policy: str) -> str:
    """Add the feed-forward's output to values that are offloaded: of all, it saves most recomputation per byte."""
    head, *rest = policy.split(";")
    return ";".join([f"{head},mlp_branch" if head in _OFFLOADS else head, *rest])


def _without_ranks(policy: str) -> str:
    return policy.replace(f",{_RANKS}", "").replace(f"save:{_RANKS}", "full")


def _with_attention(policy: str) -> str:
    """Add attention's values to those offloaded, where the policy names any."""
    head, *rest = policy.split(";")
    return ";".join([f"{head},{ATTENTION}" if head.startswith("offload:") else head, *rest])


def tile_sizes(tokens: int) -> list[int]:
    """Return tiles to try for so many tokens: divisors, the largest first, multiples of 128 where there are some."""
    sizes = []
    for limit in _TILES:
        fitting = [tokens // count for count in range(2, tokens // _LEAST_TILE + 1) if tokens % count == 0]
        fitting = [size for size in fitting if size <= limit]
        if best := max((size for size in fitting if size % 128 == 0), default=max(fitting, default=0)):
            sizes.append(best)
    return list(dict.fromkeys(sizes))


def group_policies(layers: int, size: int, *, attention: int = 0, kept_again: bool = True) -> tuple[RematPolicy, ...]:
    """Return policies of layers in groups of one size.

    Args:
        layers: of the model.
        size: of a group.
        attention: layers that keep attention's values; all others compute them again. They are the last of the model,
            whose values stay on the device, and in each group those that run most often.
        kept_again: attention's values are kept when the layer runs again.
    """
    computing = set(_order_to_drop(layers, size)[: layers - attention])

    def policy(index: int) -> RematPolicy:
        of_input = "drop" if index % size else "offload"
        of_attention = "offload" if index not in computing else "drop" if kept_again else ""
        return parse_policy(f"{of_input}:layer_input" + (f"; {of_attention}:{ATTENTION}" if of_attention else ""))

    return tuple(map(policy, range(layers)))


def _order_to_drop(layers: int, size: int) -> list[int]:
    """Return the layers in the order in which they should compute attention again, evenly over the groups.

    The last but one of a group is first: it runs again once, and keeps attention's values as the last one's go.
    """
    places = [*range(size - 2, -1, -1), size - 1]
    order = [first + place for place in places for first in range(0, layers, size) if first + place < layers]
    ends = {layers - 1, layers - 2}
    return [index for index in order if index not in ends] + sorted(ends & set(order))


class Candidates:
    """Settings worth comparing for the memory of a GPU and its host.

    Args:
        predictor: of the settings' time and memory.
    """

    def __init__(self, predictor: Predictor):
        self._model, self._workload, self._gpu = predictor.model, predictor.workload, predictor.gpu
        self._plan, self._memory = predictor.plan, predictor.memory
        self._layers, self._frozen = predictor.model.layers, any(predictor.resident.frozen_layers)

    def fits(self, plan: Plan | Memory, host_memory: float) -> bool:
        """Return whether the plan fits the host and leaves the margin free on the GPU."""
        return plan.device_bytes <= self.room and plan.host_bytes <= host_memory

    @property
    def room(self) -> float:
        """Return the bytes of the GPU's memory that a plan may take."""
        return (1 - MARGIN) * self._gpu.memory

    def _fits_together(self, plan: Memory, host_memory: float) -> bool:
        """Return whether the plan fits the GPU, and GPU and host together: its copies may stay on the GPU."""
        return plan.device_bytes <= min(self.room, self.room + host_memory - plan.host_bytes)

    def propose(self, host_memory: float, weights: str) -> Iterator[Plan]:
        """Yield the plans to compare, for host memory of so many bytes and places of the layers' weights."""
        for places in (weights,) if weights != AUTO else (DEVICE, HOST) if self._frozen else (DEVICE,):
            for plan in self._candidates_of(parse_weights(places, self._layers), host_memory):
                yield self.keep_on_device(plan, host_memory)
                if weights == AUTO and places == HOST and self.fits(plan, math.inf):
                    partly = self._stream_least(plan.policies)
                    if partly is not None:
                        yield partly

    def _candidates_of(self, places: Sequence[str], host_memory: float) -> Iterator[Plan]:
        work, keep_attention = self._workload, self._model.keeps_attention
        tiled, adapters = work.tile is not None, work.lora is not None
        normed = find_family(work.config.model_type).parts.norms.after_mlp is not None
        policies, mixes = policies_and_mixes(
            keep_attention=keep_attention, tiled=tiled, adapters=adapters, normed_branch=normed
        )
        for text in policies:
            yield self._plan(parse_policy(text), weights=places)
        for small, fast in mixes:
            if (mix := self.mix(parse_policy(small), parse_policy(fast), places, host_memory)) is not None:
                yield mix
        for grouped in self._groups(places, host_memory):
            yield self._plan(grouped, weights=places)

    @property
    def _group_sizes(self) -> list[int]:
        """Return sizes of groups of layers that drop their inputs, where a row is long enough to need them."""
        if not (self._model.keeps_attention or self._workload.tile):
            return []
        return [size for size in _GROUP_SIZES if size < self._layers]

    def smallest_groups(self) -> list[tuple[RematPolicy, ...]]:
        """Return the policies of groups that keep the least."""
        return [group_policies(self._layers, size, kept_again=False) for size in self._group_sizes]

    def _groups(self, places: Sequence[str], host_memory: float) -> Iterator[tuple[RematPolicy, ...]]:
        """Yield policies of groups: attention's values stay where the GPU has room when their layer runs again."""
        if not self._model.keeps_attention:
            yield from self.smallest_groups()
            return
        for size in self._group_sizes:
            for kept_again in (True, False):
                if (grouped := self._most_attention(size, places, host_memory, kept_again=kept_again)) is not None:
                    yield grouped
                    if self.fits(self._memory(grouped, weights=places), math.inf):
                        break
            else:
                yield group_policies(self._layers, size, kept_again=False)

    def _most_attention(
        self, size: int, places: Sequence[str], host_memory: float, *, kept_again: bool
    ) -> tuple[RematPolicy, ...] | None:
        """Return the policies of groups with attention's values of as many layers as fit the host, if any do."""
        layers = self._layers

        def fits(count: int) -> bool:
            grouped = group_policies(layers, size, attention=count, kept_again=kept_again)
            return self._memory(grouped, weights=places).host_bytes <= host_memory

        count = most(range(layers + 1), fits)
        return None if count is None else group_policies(layers, size, attention=count, kept_again=kept_again)

    def _stream_least(self, policies: RematPolicy | Sequence[RematPolicy]) -> Plan | None:
        """Return the plan that streams as few layers' weights as the GPU's memory allows, if some fits."""
        places = self.places_streamed(policies)
        return self._plan(policies, weights=places) if places else None

    def map_least(self, policies: RematPolicy | Sequence[RematPolicy], host_memory: float) -> Plan | None:
        """Return that plan, with as few layers' weights in files as the host's memory allows where some do."""
        places = self._places_mapped(policies, host_memory)
        return self._plan(policies, weights=places) if places else None

    def places_streamed(self, policies: RematPolicy | Sequence[RematPolicy]) -> tuple[str, ...] | None:
        """Return places with as few layers' weights streamed as the GPU's memory allows, if some fit."""
        layers = self._layers

        def fits(count: int) -> bool:
            return self.fits(self._memory(policies, weights=stream_evenly(layers, count)), math.inf)

        count = most(range(layers - 1, 0, -1), fits)
        return stream_evenly(layers, count) if count else None

    def _places_mapped(
        self, policies: RematPolicy | Sequence[RematPolicy], host_memory: float
    ) -> tuple[str, ...] | None:
        """Return those places, with as few layers' weights in files as the host's memory allows where some do."""
        places, layers = self.places_streamed(policies), self._layers
        if not places or not self._gpu.files or self.fits(self._memory(policies, weights=places), host_memory):
            return places
        streamed = layers - places.count(DEVICE)

        def fits(mapped: int) -> bool:
            return self.fits(self._memory(policies, weights=stream_evenly(layers, streamed, mapped)), host_memory)

        mapped = most(range(streamed, 0, -1), fits)
        return stream_evenly(layers, streamed, mapped) if mapped else places

    def mix(self, small: RematPolicy, fast: RematPolicy, places: Sequence[str], host_memory: float) -> Plan | None:
        """Return the fastest mix of the two policies that fits, over the numbers of fast layers."""
        layers = self._layers
        if not self._fits_together(self._memory(small, weights=places), host_memory):
            return None

        def plan(count: int) -> Plan:
            return self._plan(interleave(small, fast, layers, count), weights=places)

        def fits(count: int) -> bool:
            mixed = self._memory(interleave(small, fast, layers, count), weights=places)
            return self._fits_together(mixed, host_memory)

        return fastest(plan, range(1, layers), fits)

    def keep_on_device(self, plan: Plan, host_memory: float) -> Plan:
        """Return the plan with offloaded values kept on the GPU, for as many layers as fit, to pin less host memory.

        Further programs to compile take time: several policies are doubled only where host memory is short.
        """
        layers, short = self._layers, plan.host_bytes > host_memory
        if not self.fits(plan, math.inf) or (not short and (not plan.host_bytes or len(set(plan.policies)) > 1)):
            return plan

        on_device = {policy: policy.on_device() for policy in set(plan.policies)}

        def keep(count: int) -> tuple[RematPolicy, ...]:
            chosen = zip(plan.policies, interleave(False, True, layers, count), strict=True)
            return tuple(on_device[policy] if keeps else policy for policy, keeps in chosen)

        def fits(count: int) -> bool:
            return self.fits(self._memory(keep(count), weights=plan.weights), math.inf)

        count = most(range(1, layers + 1), fits)
        kept = self._plan(keep(count), weights=plan.weights) if count else None
        if kept is None or short:
            return kept or plan
        compiling = kept.compile_seconds - plan.compile_seconds
        return kept if plan.host_bytes - kept.host_bytes > fitted.WORTH_COMPILING * compiling else plan


def most(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the last count that fits, if one does; all counts before it fit, too."""
    fitting = _fitting(counts, fits)
    return fitting[-1] if fitting else None


def fastest(plan: Callable[[int], Plan], counts: Sequence[int], fits: Callable[[int], bool]) -> Plan | None:
    """Return the fastest plan of some count that fits, if one does.

    Memory grows with the count; time falls, and rises again where the link is full.
    """
    plan = cache(plan)
    fitting = _fitting(counts, fits)
    low, high = 0, len(fitting) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if plan(fitting[left]).seconds <= plan(fitting[right]).seconds:
            high = right - 1
        else:
            low = left + 1
    return min(map(plan, filter(fits, fitting[low : high + 1])), key=by_time, default=None)


def _fitting(counts: Sequence[int], fits: Callable[[int], bool]) -> Sequence[int]:
    return counts[: bisect_left(counts, True, key=lambda count: not fits(count))]
