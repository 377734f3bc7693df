"""Search for the longest row that fits."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from jaxglue.planner.candidates import tile_sizes
from jaxglue.planner.programs import Programs
from jaxglue.planner.scaled import can_scale
from jaxglue.planner.search import interpolate

if TYPE_CHECKING:
    from jaxglue.planner.planner import Planner

_ROW_STEP = 128
_SCALING_ERROR = 3e-4
"""Share of the memory by which scaled programs may differ from traced ones."""


def longest_row(planner: "Planner", host_memory: float, weights: str) -> int | None:
    """Return the longest row that fits, in steps of 128 tokens up to the model's limit; None if no row does.

    Memory grows almost linearly with the row, so interpolation needs few lengths. The one found is traced
    where it fits narrowly.
    """
    loads = RowLoads(planner, host_memory, weights)
    found = _search(loads, planner)
    if found is None or loads.confirms(found):
        return found
    return _search(RowLoads(planner, host_memory, weights, scales=False), planner)


def _search(load: Callable[[int], float], planner: "Planner") -> int | None:
    limit = planner.workload.config.max_position_embeddings
    loads = {seq_len: load(seq_len) for seq_len in {min(planner.workload.seq_len, limit), limit}}
    if min(loads.values()) > 1:
        loads[_ROW_STEP] = load(_ROW_STEP)
    while (guess := interpolate(loads, limit, _ROW_STEP)) not in loads:
        loads[guess] = load(guess)
    return max((seq_len for seq_len, needed in loads.items() if needed <= 1), default=None)


class RowLoads:
    """Shares of GPU and host memory that the leanest settings take, by the row's length.

    Args:
        planner: of any length.
        host_memory: bytes of host memory that may be pinned.
        weights: places of the layers' weights.
        scales: trace the programs of a few lengths, whole and by tiles, and scale the others.
    """

    def __init__(self, planner: "Planner", host_memory: float, weights: str, *, scales: bool = True):
        self._planner, self._limits = planner, (host_memory, weights)
        self._scales = scales and planner.workload.mesh.devices == 1
        self._traced: dict[bool, list[Programs]] = {False: [], True: []}
        self._scaled: dict[int, tuple[int | None, float]] = {}
        self._tiled_from = math.inf

    def __call__(self, seq_len: int) -> float:
        """Return the larger share, of whole rows or, where these do not fit, of the smallest tiles."""
        work = self._planner.workload
        tiles = [] if work.tile else tile_sizes(work.batch_size * seq_len)
        if seq_len < self._tiled_from or not tiles:
            if (needed := self._load(seq_len, work.tile)) <= 1 or not tiles:
                return needed
            self._tiled_from = seq_len
        return self._load(seq_len, tiles[-1])

    def confirms(self, seq_len: int) -> bool:
        """Return whether a length fits beyond doubt, or when its programs are traced, too."""
        tile, load = self._scaled.get(seq_len, (None, 0.0))
        return load <= 1 - _SCALING_ERROR or self._planner.with_rows(seq_len, tile).least_load(*self._limits) <= 1

    def _load(self, seq_len: int, tile: int | None) -> float:
        traced = self._traced[tile is not None]
        workload = replace(self._planner.workload, seq_len=seq_len, tile=tile)
        pairs = (pair for pair in combinations(traced, 2) if can_scale(pair[0].workload, pair[1].workload, workload))
        if not self._scales or (pair := next(pairs, None)) is None:
            planner = self._planner.with_rows(seq_len, tile)
            traced.append(planner.programs)
            self._scaled.pop(seq_len, None)
            return planner.least_load(*self._limits)
        planner = self._planner.with_rows(seq_len, tile, scaled=pair)
        self._scaled[seq_len] = tile, planner.least_load(*self._limits)
        return self._scaled[seq_len][1]
