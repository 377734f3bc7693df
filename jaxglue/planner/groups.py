"""Groups of layers of which only the first keeps its input: the others' are computed again, a group at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from jaxglue.engine.policy import RematPolicy, parse_policy
from jaxglue.planner.candidates import ATTENTION
from jaxglue.planner.schedule import Work
from jaxglue.planner.traced import TracedModel

_SIZES = (2, 4, 8)


def group_policies(layers: int, *, keep_attention: bool, leanest: bool = False) -> Iterator[tuple[RematPolicy, ...]]:
    """Yield policies of every layer by the size of the groups, and by how many layers compute attention again.

    A group's last one or two do: the output of the last, the next group's input, is not computed again.

    Args:
        layers: of the model.
        keep_attention: attention's output is copied faster than it is recomputed.
        leanest: yield only those of each size that keep the least.
    """
    without = parse_policy("drop:layer_input")
    for size in _SIZES:
        if size >= layers:
            continue
        if not keep_attention:
            yield _join([[parse_policy("offload"), *[without] * (size - 1)]] * layers, layers)
            continue
        one, two = (_group(size, count, without) for count in (1, min(2, size - 1)))
        groups = -(-layers // size)
        for lean in [groups] if leanest else range(groups + 1 if one != two else 1):
            yield _join([two] * lean + [one] * (groups - lean), layers)


def _group(size: int, count: int, without: RematPolicy) -> list[RematPolicy]:
    """Return policies of a group whose last `count` layers keep nothing, and the others attention's output."""
    kept, inner = f"offload:layer_input,{ATTENTION}", f"drop:layer_input; offload:{ATTENTION}"
    return [parse_policy(kept), *[parse_policy(inner)] * (size - 1 - count), *[without] * count]


def _join(groups: Iterable[Sequence[RematPolicy]], layers: int) -> tuple[RematPolicy, ...]:
    return tuple(islice(chain.from_iterable(groups), layers))


def restored_groups(policies: Sequence[RematPolicy]) -> list[range]:
    """Return the layers that run again to restore dropped inputs: a range for each group, up to its last layer."""
    groups, first = [], 0
    for index, policy in enumerate(policies):
        ends = index + 1 == len(policies) or not policies[index + 1].drops_input
        first = index if not policy.drops_input else first
        if ends and index > first:
            groups.append(range(first, index))
    return groups


def restored_inputs(policies: Sequence[RematPolicy], depth: int) -> list[int]:
    """Return for each layer's backward pass how many dropped inputs are on the device.

    Args:
        policies: of all layers.
        depth: a group is restored so many layers ahead of its last.
    """
    counts = [0] * len(policies)
    for group in restored_groups(policies):
        last = group.stop
        for index in range(group.start + 1, min(last + depth, len(policies) - 1) + 1):
            counts[index] += min(index, last) - group.start
    return counts


def restore_work(
    group: range, policies: Sequence[RematPolicy], model: TracedModel, streamed: Sequence[int], *, link: float
) -> Work:
    """Return the work of running a group again.

    Args:
        group: layers that run.
        policies: of all layers.
        model: gives the costs.
        streamed: bytes of each layer's weights in host memory.
        link: bytes/s from the host.
    """
    kernels = sum(model.replay(index, policies[index]).seconds for index in group)
    attention = sum(model.attention_bytes for index in group if policies[index].keeps_attention)
    arriving = model.input_bytes + attention + sum(streamed[index] for index in group)
    return Work(kernels, arriving=arriving / link)
