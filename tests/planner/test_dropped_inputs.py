"""Groups of layers of which only the first keeps its input."""

from types import SimpleNamespace

import pytest

from jaxglue.engine.policy import format_policies, parse_policies
from jaxglue.planner.candidates import group_policies
from jaxglue.planner.step import replayed_bytes, restorations

ATTENTION = "attention_out,attention_lse"


def test_groups_restore_dropped_inputs():
    policies = parse_policies("1 x full + 2 x drop:layer_input + 1 x offload + 1 x full + 1 x drop:layer_input", 6)
    # the last layer's input stays on the device
    assert [(each.layers, each.inputs) for each in restorations(policies, 0)] == [(range(2), range(1, 3))]


def test_long_groups_are_restored_in_parts():
    policies = parse_policies(f"1 x full + 7 x drop:layer_input,{ATTENTION} + 2 x full", 10)
    later, earlier, first = restorations(policies, 1)
    assert (later.layers, later.inputs, later.values) == (range(7), range(5, 8), {5, 6})
    assert (earlier.layers, earlier.inputs, earlier.values) == (range(4), range(2, 5), {2, 3})
    assert (first.layers, first.inputs, first.values) == (range(1), range(1, 2), set())


@pytest.mark.parametrize("attention", [0, 3, 10])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_layer_has_a_policy_and_the_first_keeps_its_input(size, attention):
    policies = group_policies(10, size, attention=attention)
    assert [policy.drops_input for policy in policies] == [index % size > 0 for index in range(10)]
    assert sum(policy.keeps_attention for policy in policies) == attention
    assert parse_policies(format_policies(policies), 10) == policies


def test_layers_that_run_again_fetch_their_weights_once_more():
    policies = parse_policies("1 x full + 3 x drop:layer_input + 3 x full", 7)
    replay = SimpleNamespace(temporary=7, matmul=3)
    model = SimpleNamespace(attention_bytes=100, replay=lambda index, policy: replay)
    # Before the backward pass of layer 3 layers 0 to 2 run again, with two layers' weights at a time.
    assert replayed_bytes(policies, 1, model, [0, 10, 20, 30, 40, 50, 60]) == [0, 0, 0, 30 + 7, 0, 0, 0]
