"""Programs for rows of a length, scaled from those of two others."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from jaxglue.engine.policy import RematPolicy
from jaxglue.planner.layer_programs import LayerPrograms, SizedProgram
from jaxglue.planner.programs import Programs
from jaxglue.planner.workload import Workload


class _Shape(NamedTuple):
    """Tokens of a micro-batch, those of a tile, and the number of tiles."""

    tokens: int
    tile: int
    tiles: int


def _shape(workload: Workload) -> _Shape:
    tile = workload.tile or workload.tokens
    return _Shape(workload.tokens, tile, workload.tokens // tile)


def can_scale(first: Workload, second: Workload, to: Workload) -> bool:
    """Return whether the sizes of two workloads' programs tell those of a third.

    Not where two numbers of `_Shape`, or one and a constant, grow alike between the first two but not to the third.
    """
    a, b, c = ((1, *_shape(workload)) for workload in (first, second, to))
    pairs = combinations(range(len(a)), 2)
    return all(a[i] * b[j] != b[i] * a[j] or a[i] * c[j] == c[i] * a[j] for i, j in pairs)


class ScaledPrograms(Programs):
    """Programs whose sizes follow from those of two others, within 1e-4 of the memory of traced ones.

    A size is constant or proportional to tokens, a tile's tokens or tiles; few, such as numbers of partial sums, are
    between.

    Args:
        workload: of `Programs`.
        others: traced programs of rows of other lengths and tiles.
    """

    def __init__(self, workload: Workload, others: tuple[Programs, Programs]):
        super().__init__(workload, others[0].capability)
        self._others, self._shapes = others, [_shape(programs.workload) for programs in others]

    def _trace_layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        first, second = (programs.layer(index, policy)[0] for programs in self._others)
        scaled = self._scale_layer(first, second)
        return (scaled, scaled) if scaled else super()._trace_layer(index, policy)

    def _scale_layer(self, first: LayerPrograms, second: LayerPrograms) -> LayerPrograms | None:
        """Return scaled programs; None where the two do not have the same operations."""
        pairs = (first.forward, second.forward), (first.backward, second.backward)
        if first.kept.keys() != second.kept.keys() or any(len(a.sizes) != len(b.sizes) for a, b in pairs):
            return None
        forward, backward = (SizedProgram(one.program, self._scale(one.sizes, other.sizes)) for one, other in pairs)
        kept = self._scale(tuple(first.kept.values()), tuple(second.kept.values()))
        return LayerPrograms(forward, backward, dict(zip(first.kept, kept, strict=True)))

    def _scale(self, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._scale_size, first, second))

    def _scale_size(self, first: int, second: int) -> int:
        if first == second:
            return first
        here = _shape(self.workload)
        for one, other, size in zip(*self._shapes, here, strict=True):
            if first * other == second * one:
                return first * size // one
        one, other = (shape.tokens for shape in self._shapes)
        return max(first + (second - first) * (here.tokens - one) // (other - one), 0)
