"""Peak memory of a step from its layers' costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxglue.planner.cost import Cost
from jaxglue.planner.gpus import GIB
from jaxglue.planner.layer_costs import LayerCost
from jaxglue.planner.memory import PeakMemory

NOTHING = Cost(seconds=0.0, temporary=0, results=0)


def layer(saved: float, temporary: float) -> LayerCost:
    """Return a layer that saves some GiB, with other GiB of temporary memory in its backward pass."""
    backward = Cost(seconds=0.0, temporary=int(temporary * GIB), results=0)
    return LayerCost(forward=NOTHING, backward=backward, saved=int(saved * GIB), offloaded=0, offloaded_names=0)


def peak_gib(*costs: LayerCost, **options) -> float:
    return peak_memory(*costs, **options).total() / GIB


def peak_memory(
    *costs: LayerCost,
    one_program: bool = False,
    table: float = 0,
    tied: bool = False,
    steps: int = 1,
    streamed: float = 0,
    replayed: float = 0,
    run_ahead: int = 1,
    head: float = 0,
    compared: float = 0,
    ahead: bool = False,
) -> PeakMemory:
    """Return the memory of layers, each with some GiB of streamed weights, the last after others that run again.

    The head has some GiB of temporary memory, and compares matmuls of others.
    """
    layers, ends = len(costs), [int(table * GIB)] * (1 if tied else 2)
    resident = SimpleNamespace(moments=0, trainable=sum(ends), gradients=0, host_head=0, trainable_ends=ends)
    resident.frozen, resident.trainable_layers = lambda: 0, [0] * layers
    config = SimpleNamespace(tie_word_embeddings=tied, per_layer=None, vision=None)
    work = {"gradient_accumulation_steps": steps, "other_models": 0}
    work |= dict.fromkeys(("reference", "update_in_backward", "host_tower"), False)
    output = Cost(seconds=0.0, temporary=int(head * GIB), results=ends[0], matmul=int(compared * GIB))
    return PeakMemory(
        workload=SimpleNamespace(config=config, **work),
        model=SimpleNamespace(gathered=0, scattered=0, input_bytes=0, head=output),
        resident=resident,
        costs=costs,
        streamed=[int(streamed * GIB)] * layers,
        depth=1,
        run_ahead=run_ahead,
        restored=[0] * layers,
        replayed=[*[0] * (layers - 1), int(replayed * GIB)],
        one_program=one_program,
        scattered=False,
        compiled_ahead=ahead,
    )


def test_temporary_memory_finds_no_room_in_the_smaller_gap_of_freed_values():
    kept, recomputed = layer(4, 1), layer(1, 10)
    lean = peak_gib(recomputed, recomputed)
    assert peak_gib(recomputed, kept) == pytest.approx(0.95 * (0.3 + 1 + 1.1 * 10.3 + 4), rel=1e-3)
    assert peak_gib(recomputed, kept, one_program=True) < lean < peak_gib(recomputed, kept)
    assert peak_gib(kept, kept) == pytest.approx(0.3 + 8 + 1.03, rel=1e-2)  # the last layer needs most


def test_a_tables_gradient_is_made_beside_the_sum_it_is_added_to():
    assert peak_gib(layer(0, 0), table=1) == pytest.approx(0.3 + 2 + 2, rel=1e-3)  # two tables, and their gradients
    assert peak_gib(layer(0, 0), table=1, tied=True) == pytest.approx(0.3 + 1 + 2, rel=1e-3)
    assert peak_gib(layer(0, 0), table=1, steps=2) == pytest.approx(0.3 + 2 + 2 + 1, rel=1e-3)


def test_a_trained_heads_gradient_and_temporary_memory_need_two_large_blocks():
    """A pool of 8.5 GiB of which 8.0 were counted had no block of 2 GiB left (SmolLM3, all weights)."""
    trained, frozen = (peak_gib(layer(0, 0), table=table, tied=True, head=2) for table in (1, 0))
    assert trained - frozen == pytest.approx(1 + 1 + 0.35 * 2 - 0.05 * 4.3, abs=0.01)  # table, gradient, lost


def forward_gib(*costs: LayerCost, **options) -> float:
    return peak_memory(*costs, **options)._forward() / GIB


def test_last_layers_weights_stay_for_the_backward_pass():
    """At the forward pass's end all values and the weights of two layers are on the device."""
    assert forward_gib(*[layer(3, 0)] * 4, streamed=2) == pytest.approx(4 * 3 + 2 * 2)


def test_matmuls_are_compared_at_the_first_layer_of_a_type():
    kept, other = layer(1, 0), replace(layer(1, 0), forward=replace(NOTHING, matmul=3 * GIB))
    assert forward_gib(other, kept, kept, kept, kept) == pytest.approx(5)
    assert forward_gib(kept, other, kept, kept, kept) == pytest.approx(5)
    assert forward_gib(kept, kept, kept, kept, other) == pytest.approx(5 + 3)


def test_streamed_weights_leave_blocks_that_other_arrays_do_not_fill():
    """Gemma-3-12B took 27.6 GiB of a pool, planned 25.9: 22.2 of arrays lay in blocks of 24.8."""
    resident, streamed = (peak_gib(*[layer(3, 0.5)] * 8, streamed=weights) for weights in (0, 1e-6))
    assert streamed == pytest.approx(1.05 * resident, rel=1e-3)


@pytest.mark.parametrize(("compared", "peak"), [(1, 4.5), (4, 4.5), (7, 7.3)])
def test_programs_that_are_compiled_ahead_compare_matmuls_beside_the_weights_alone(compared, peak):
    """Four layers' values and the head's temporary memory come later."""
    layers = [replace(layer(1, 0), backward=replace(NOTHING, matmul=GIB // 2))] * 4
    assert peak_gib(*layers, head=0.2, compared=compared, ahead=True) == pytest.approx(peak, abs=0.01)
    assert peak_gib(*layers, head=0.2, compared=compared) == pytest.approx(4.3 + max(compared, 0.2, 0.5), abs=0.01)


def test_layers_that_run_again_take_memory_before_a_backward_pass():
    layers = [layer(1, 1)] * 3
    assert peak_gib(*layers, replayed=0.5) == peak_gib(*layers)
    assert peak_gib(*layers, replayed=4) - peak_gib(*layers) == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize(("run_ahead", "leaving"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_values_leave_under_the_head_of_layers_that_neither_stay_nor_were_waited_for(run_ahead, leaving):
    """With a depth of 1 the last two layers' values stay on the device."""
    layers = [replace(layer(0, 0), offloaded=GIB)] * 6
    assert peak_memory(*layers, run_ahead=run_ahead)._leaving() == leaving * GIB
