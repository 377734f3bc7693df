"""Memory of a program's kernels: arrays are in memory from the kernel that writes them to the last that reads them.

XLA keeps the best of several orders; here those of the trace, and of what each result needs, result by result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_


@dataclass(eq=False)
class Value:
    """One array, and the values in memory that it is computed from."""

    bytes: int
    is_argument: bool = False
    roots: frozenset["Value"] = field(default_factory=frozenset)
    in_memory: bool = False
    from_matmul: bool = False
    from_loop: bool = False
    """Written by a loop a part at a time."""
    of_arguments: bool = False
    """An argument, or converted from some."""
    is_slice: bool = False
    """A loop's part of an array."""

    @property
    def may_become_result(self) -> bool:
        """Return whether a result computed from the array may be written over it."""
        return not self.is_argument and not self.from_loop


@dataclass(frozen=True)
class Kernel:
    """One kernel."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    seconds: float
    inner: int = 0
    """Temporary bytes inside: a workspace's, or those of a loop's body."""
    fused: bool = False
    """Writes one value that is computed element by element."""


def peak_bytes(kernels: Sequence[Kernel], *, without: set[Value]) -> int:
    """Return the most bytes of values in memory at once, without arguments and results, in the better order."""
    return min(_peak_bytes(order, without) for order in (kernels, _by_result(kernels)))


def _by_result(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels in the order of results, each after those that it needs and that no earlier one needs."""
    writers: dict[Value, int] = {}
    needs: list[set[int]] = []
    for index, kernel in enumerate(kernels):
        needs.append({writers[value] for value in kernel.inputs if value in writers})
        writers |= dict.fromkeys(kernel.outputs or kernel.inputs[:1], index)  # those without outputs add to the first
    order: dict[int, None] = {}
    last = set(range(len(kernels))).difference(*needs)
    for result in sorted(last):
        waiting = [result]
        while waiting:
            if missing := [index for index in sorted(needs[waiting[-1]]) if index not in order]:
                waiting.append(missing[0])
            else:
                order[waiting.pop()] = None
    return [kernels[index] for index in order]


def _peak_bytes(kernels: Sequence[Kernel], without: set[Value]) -> int:
    last: dict[Value, int] = {}
    for index, kernel in enumerate(kernels):
        for value in (*kernel.inputs, *kernel.outputs):
            last[value] = max(last.get(value, index), index)
    for value, index in _joined(kernels):
        last[value] = max(last[value], index)
    live, peak = 0, 0
    dying: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        for value in kernel.outputs:
            size = 0 if value in without else value.bytes
            live += size
            dying[last[value]] = dying.get(last[value], 0) + size
        peak = max(peak, live + kernel.inner)
        live -= dying.get(index, 0)
    return peak


def _joined(kernels: Sequence[Kernel]) -> Iterator[tuple[Value, int]]:
    """Yield values that XLA forms in a later kernel, which reads the same array to form one as large, and its index."""
    before: dict[Value, int] = {}
    fused: list[tuple[int, Kernel]] = []
    for index, kernel in enumerate(kernels):
        needed = reduce(or_, (before.get(value, 0) for value in kernel.inputs), 0)
        before |= dict.fromkeys(kernel.outputs, needed | 1 << index)
        if kernel.fused:
            yield from ((k.outputs[0], index) for at, k in fused if not needed >> at & 1 and _read_alike(k, kernel))
            fused.append((index, kernel))


def _read_alike(one: Kernel, other: Kernel) -> bool:
    """Return whether both form a value of the same size from the same one of that size."""
    size = one.outputs[0].bytes
    return size == other.outputs[0].bytes and any(value.bytes == size for value in {*one.inputs} & {*other.inputs})
