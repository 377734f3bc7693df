"""Peak memory of a step from its layers' costs."""

from types import SimpleNamespace

import pytest

from jaxglue.planner.cost import Cost
from jaxglue.planner.gpus import GIB
from jaxglue.planner.peak import PeakMemory
from jaxglue.planner.traced import LayerCost

NOTHING = Cost(seconds=0.0, temporary=0, results=0)


def layer(saved: float, temporary: float) -> LayerCost:
    """Return a layer that saves some GiB, with other GiB of temporary memory in its backward pass."""
    backward = Cost(seconds=0.0, temporary=int(temporary * GIB), results=0)
    return LayerCost(forward=NOTHING, backward=backward, saved=int(saved * GIB), offloaded=0, offloaded_names=0)


def peak_gib(*costs: LayerCost, whole: bool = False) -> float:
    layers = len(costs)
    resident = SimpleNamespace(moments=0, trainable=0, host_head=0, trainable_ends=[0], trainable_layers=[0] * layers)
    resident.frozen = lambda: 0
    peak = PeakMemory(
        workload=SimpleNamespace(gradient_accumulation_steps=1, reference=False, update_in_backward=False),
        model=SimpleNamespace(gathered=0, scattered=0, input_bytes=0, head=NOTHING),
        resident=resident,
        costs=costs,
        streamed=[0] * layers,
        depth=1,
        run_ahead=1,
        restored=[0] * layers,
        whole=whole,
        scattered=False,
    )
    return peak.total() / GIB


def test_temporary_memory_finds_no_room_in_the_smaller_gap_of_freed_values():
    kept, recomputed = layer(4, 1), layer(1, 10)
    lean = peak_gib(recomputed, recomputed)
    assert peak_gib(recomputed, kept) == pytest.approx(0.95 * (0.3 + 1 + 10.3 + 4), rel=1e-3)
    assert peak_gib(recomputed, kept, whole=True) < lean < peak_gib(recomputed, kept)
    assert peak_gib(kept, kept) == pytest.approx(0.3 + 8 + 1.03, rel=1e-2)  # the last layer needs most
