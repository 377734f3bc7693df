"""Memory of a program's kernels: arrays are in memory from the kernel that writes them to the last that reads them.

XLA keeps the better of two orders: of what each result needs, result by result, and of the kernel that adds least. The
bodies of loops keep the order of the trace.
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
    is_codes: bool = False
    """Holds 8-bit integers."""
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


def peak_bytes(
    kernels: Sequence[Kernel], *, without: set[Value], results: Sequence[Value], in_order: bool = False
) -> int:
    """Return the most bytes of values in memory at once, without arguments and results.

    Args:
        kernels: in the order of the trace.
        without: values that are not counted.
        results: of the program, in order.
        in_order: the kernels run in the order of the trace.
    """
    joined, needs = list(_joined(kernels)), _needs(kernels)
    orders: Sequence[Sequence[int]] = [range(len(kernels))]
    if not in_order:
        orders = _by_result(kernels, needs, results), _by_growth(kernels, needs, without)
    return min(_peak_bytes([kernels[index] for index in order], without, joined) for order in orders)


def _needs(kernels: Sequence[Kernel]) -> list[set[int]]:
    """Return for each kernel those that must run before it."""
    writers: dict[Value, int] = {}
    needs = []
    for index, kernel in enumerate(kernels):
        needs.append({writers[value] for value in kernel.inputs if value in writers})
        writers |= dict.fromkeys(kernel.outputs or kernel.inputs[:1], index)  # those without outputs add to the first
    return needs


def _by_result(kernels: Sequence[Kernel], needs: Sequence[set[int]], results: Sequence[Value]) -> list[int]:
    """Return the kernels in the order of results, each after those that it needs and that no earlier one needs."""
    writers = {value: index for index, kernel in enumerate(kernels) for value in kernel.outputs or kernel.inputs[:1]}
    others = sorted(set(range(len(needs))).difference(*needs))
    order: dict[int, None] = {}
    for result in dict.fromkeys([*(writers[value] for value in results if value in writers), *others]):
        waiting = [result] if result not in order else []
        while waiting:
            if missing := [index for index in sorted(needs[waiting[-1]]) if index not in order]:
                waiting.append(missing[0])
            else:
                order[waiting.pop()] = None
    return list(order)


def _by_growth(kernels: Sequence[Kernel], needs: Sequence[set[int]], without: set[Value]) -> list[int]:
    """Return the kernels in an order in which the next one adds least to the values in memory."""
    readers: dict[Value, set[int]] = {}
    followers: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        for value in kernel.inputs:
            readers.setdefault(value, set()).add(index)
        for earlier in needs[index]:
            followers.setdefault(earlier, []).append(index)
    made = {value for kernel in kernels for value in kernel.outputs} - without
    read = [made.intersection(kernel.inputs) for kernel in kernels]
    written = [sum(value.bytes for value in made.intersection(kernel.outputs)) for kernel in kernels]
    missing = [len(earlier) for earlier in needs]

    def growth(index: int) -> tuple[int, int]:
        return written[index] - sum(value.bytes for value in read[index] if len(readers[value]) == 1), index

    order, ready = [], {index for index, count in enumerate(missing) if not count}
    while ready:
        index = min(ready, key=growth)
        ready.remove(index)
        order.append(index)
        for value in read[index]:
            readers[value].discard(index)
        for follower in followers.get(index, ()):
            missing[follower] -= 1
            if not missing[follower]:
                ready.add(follower)
    return order


def _peak_bytes(kernels: Sequence[Kernel], without: set[Value], joined: Sequence[tuple[Value, Value]]) -> int:
    last: dict[Value, int] = {}
    written: dict[Value, int] = {}
    for index, kernel in enumerate(kernels):
        for value in (*kernel.inputs, *kernel.outputs):
            last[value] = max(last.get(value, index), index)
        written |= dict.fromkeys(kernel.outputs, index)
    for one, other in joined:
        last[one], last[other] = max(last[one], written[other]), max(last[other], written[one])
        at = max(written[one], written[other])  # of the kernel that forms both
        for value in (*kernels[written[one]].inputs, *kernels[written[other]].inputs):
            last[value] = max(last[value], at)
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


def _joined(kernels: Sequence[Kernel]) -> Iterator[tuple[Value, Value]]:
    """Yield values of the same size that XLA forms in one kernel, since it reads the same array for both."""
    before: dict[Value, int] = {}
    fused: list[tuple[int, Kernel]] = []
    for index, kernel in enumerate(kernels):
        needed = reduce(or_, (before.get(value, 0) for value in kernel.inputs), 0)
        before |= dict.fromkeys(kernel.outputs, needed | 1 << index)
        if kernel.fused:
            (own,) = kernel.outputs
            yield from ((k.outputs[0], own) for at, k in fused if not needed >> at & 1 and _read_alike(k, kernel))
            fused.append((index, kernel))


def _read_alike(one: Kernel, other: Kernel) -> bool:
    """Return whether both form a value of the same size from the same one of that size."""
    size = one.outputs[0].bytes
    return size == other.outputs[0].bytes and any(value.bytes == size for value in {*one.inputs} & {*other.inputs})
