"""The longest row that fits the GPU and the host, found by few traces."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Protocol, Self

from jaxglue.planner import calibration as fitted
from jaxglue.planner.candidates import tile_sizes
from jaxglue.planner.predictor import Predictor
from jaxglue.planner.programs import Programs, can_scale
from jaxglue.planner.workload import Workload

_ROW_STEP = 128
"""Tokens by which rows differ in length."""


class RowPlanner(Protocol):
    """A planner for rows of any length."""

    predictor: Predictor

    @property
    def workload(self) -> Workload:
        """Return the workload."""

    def with_rows(self, seq_len: int, tile: int | None, *, scaled: tuple[Programs, Programs] | None = None) -> Self:
        """Return the planner for rows of another length and tile, with programs scaled from two others if given."""

    def memory_share(self, host_memory: float, weights: str) -> float:
        """Return the larger share of GPU and host memory that the smallest setting takes."""


def longest_row(planner: RowPlanner, host_memory: float, weights: str) -> int | None:
    """Return the longest row that fits, in steps of 128 tokens up to the model's limit; None if no row does.

    Memory grows almost linearly with the row, so interpolation needs few lengths. The one found is traced
    where it fits narrowly.
    """
    loads = _RowLoads(planner, host_memory, weights)
    found = _search(loads, planner)
    if found is None or loads.confirms(found):
        return found
    return _search(_RowLoads(planner, host_memory, weights, scales=False), planner)


def _search(load: Callable[[int], float], planner: RowPlanner) -> int | None:
    limit = planner.workload.config.max_position_embeddings
    loads = {seq_len: load(seq_len) for seq_len in {min(planner.workload.seq_len, limit), limit}}
    if min(loads.values()) > 1:
        loads[_ROW_STEP] = load(_ROW_STEP)
    while (guess := _interpolate(loads, limit, _ROW_STEP)) not in loads:
        loads[guess] = load(guess)
    return max((seq_len for seq_len, needed in loads.items() if needed <= 1), default=None)


def _interpolate(loads: dict[int, float], limit: int, step: int) -> int:
    """Return the next row length to try, or a known one at the end of the search."""
    fitting = max((seq_len for seq_len, load in loads.items() if load <= 1), default=0)
    above = min((seq_len for seq_len, load in loads.items() if load > 1), default=limit)
    if not fitting or above - fitting <= step:
        return fitting or min(loads)
    free, excess = 1 - loads[fitting], loads[above] - 1
    latest = [load <= 1 for load in reversed(loads.values())]
    stale = 0.5 ** (latest.index(not latest[0]) - 1)  # both ends move, as in the Illinois algorithm
    free, excess = (free, excess * stale) if latest[0] else (free * stale, excess)
    guess = int(fitting + (above - fitting) * free / (free + excess)) // step * step
    return min(max(guess, fitting), above - step)


class _RowLoads:
    """Shares of GPU and host memory that the smallest settings take, by the row's length.

    Args:
        planner: of any length.
        host_memory: bytes of host memory that may be pinned.
        weights: places of the layers' weights.
        scales: trace the programs of a few lengths, whole and by tiles, and scale the others.
    """

    def __init__(self, planner: RowPlanner, host_memory: float, weights: str, *, scales: bool = True):
        self._planner, self._limits = planner, (host_memory, weights)
        mesh = planner.workload.mesh
        self._scales = scales and mesh.expert == mesh.context == 1  # whose programs exchange rows
        self._traced: dict[bool, list[Programs]] = {False: [], True: []}
        self._scaled: dict[int, tuple[int | None, float]] = {}
        self._tiled_from = math.inf

    def __call__(self, seq_len: int) -> float:
        """Return the larger share, of whole rows or, where these do not fit, of the smallest tiles."""
        work = self._planner.workload
        tiles = [] if work.tile else tile_sizes(replace(work, seq_len=seq_len).tokens)
        if seq_len < self._tiled_from or not tiles:
            if (needed := self._load(seq_len, work.tile)) <= 1 or not tiles:
                return needed
            self._tiled_from = seq_len
        return self._load(seq_len, tiles[-1])

    def confirms(self, seq_len: int) -> bool:
        """Return whether a length fits beyond doubt, or when its programs are traced, too."""
        tile, load = self._scaled.get(seq_len, (None, 0.0))
        return (
            load <= 1 - fitted.SCALING_ERROR or self._planner.with_rows(seq_len, tile).memory_share(*self._limits) <= 1
        )

    def _load(self, seq_len: int, tile: int | None) -> float:
        traced = self._traced[tile is not None]
        workload = replace(self._planner.workload, seq_len=seq_len, tile=tile)
        pairs = (pair for pair in combinations(traced, 2) if can_scale(pair[0].workload, pair[1].workload, workload))
        if not self._scales or (pair := next(pairs, None)) is None:
            planner = self._planner.with_rows(seq_len, tile)
            traced.append(planner.predictor.programs)
            self._scaled.pop(seq_len, None)
            return planner.memory_share(*self._limits)
        planner = self._planner.with_rows(seq_len, tile, scaled=pair)
        self._scaled[seq_len] = tile, planner.memory_share(*self._limits)
        return self._scaled[seq_len][1]
