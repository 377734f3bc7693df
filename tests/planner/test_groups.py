"""Groups of layers of which only the first keeps its input."""

from jaxglue.engine.policy import format_policies, parse_policies
from jaxglue.planner.groups import group_policies, restored_groups, restored_inputs


def test_groups_restore_dropped_inputs():
    policies = parse_policies("1 x full + 2 x drop:layer_input + 1 x offload + 1 x full + 1 x drop:layer_input", 6)
    assert restored_groups(policies) == [range(0, 2), range(4, 5)]
    # a group is restored one layer ahead of its last, and the last inputs are used first
    assert restored_inputs(policies, 1) == [0, 1, 2, 2, 0, 1]


def test_every_layer_has_a_policy_and_the_first_keeps_its_input():
    for keep_attention in (False, True):
        found = list(group_policies(10, keep_attention=keep_attention))
        assert found
        for policies in found:
            assert len(policies) == 10
            assert not policies[0].drops_input
            assert any(policy.drops_input for policy in policies)
            assert parse_policies(format_policies(policies), 10) == policies
