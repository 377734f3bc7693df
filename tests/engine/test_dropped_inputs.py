"""Layers whose inputs are dropped: they are computed again from the last input kept, with the same gradients."""

import chex
import jax
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.engine.policy import format_policies, parse_policies, parse_policy
from jaxglue.ops import attention
from jaxglue.ops.names import LAYER_INPUT

ATTENTION = "attention_out,attention_lse"
GROUP = f"1 x offload:layer_input,{ATTENTION} + 1 x drop:layer_input; offload:{ATTENTION} + 1 x drop:layer_input"


@pytest.fixture(autouse=True, scope="module")
def exact_matmuls():
    """On GPUs too: float32 matmuls round to TF32 there."""
    with jax.default_matmul_precision("highest"):
        yield


def test_groups_are_parsed_and_formatted():
    policies = parse_policies(f"2 x [{GROUP}]", 6)
    assert [policy.drops_input for policy in policies] == [False, True, True] * 2
    assert parse_policies(format_policies(policies), 6) == policies
    assert format_policies(policies).startswith("2 x [1 x offload:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop:layer_input; offload:layer_input", "both drops and keeps layer_input"),
        ("drop:query", "drops query: only layer_input, attention_out, attention_lse can be dropped"),
        ("none; drop:attention_out", "cannot be offloaded or dropped"),
    ],
)
def test_invalid_drop_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"prefetch_depth": 1}, "1 x full + 5 x drop:layer_input"),
        repeat({"prefetch_depth": 1}, f"2 x [{GROUP}]"),
        repeat({"tile": 7}, f"2 x [{GROUP}]"),
        repeat({"prefetch_depth": 0}, "1 x full + 5 x drop:layer_input"),
        repeat({}, f"1 x drop:{ATTENTION} + 5 x drop:layer_input,{ATTENTION}"),
    ],
)
def test_dropped_inputs_change_no_gradient(split_parts, random_batch, options, policy):
    parts = split_parts("lora", num_hidden_layers=6)
    batches = [random_batch([[5, 1, 7], [12]], 14)]
    expected = parts.executor("full").loss_and_gradients(parts.trainable, parts.frozen, batches, 13.0)
    executor = parts.executor(policy, **options)
    result = executor.loss_and_gradients(parts.trainable, parts.frozen, batches, 13.0)
    chex.assert_trees_all_close(result, expected, rtol=1e-4, atol=1e-5)


@repeats_parts_of("test_dropped_inputs_change_no_gradient")
def test_attention_of_a_restored_layer_runs_once_more(split_parts, random_batch, monkeypatch):
    runs = 0

    def count():
        nonlocal runs
        runs += 1
        return np.float32(0)

    def counted(q, *args, reference=attention.reference_attention, **kwargs):
        return reference(q, *args, **kwargs) + jax.pure_callback(count, jax.ShapeDtypeStruct((), q.dtype))

    monkeypatch.setattr(attention, "reference_attention", counted)
    parts = split_parts("lora", num_hidden_layers=10)
    group = (
        f"1 x offload:layer_input,{ATTENTION} + 5 x drop:layer_input; offload:{ATTENTION} + 2 x drop:{{}} + 2 x dots"
    )
    results, counts = [], []
    for policy in (f"save:{ATTENTION}", group.format("layer_input"), group.format(f"layer_input,{ATTENTION}")):
        runs = 0
        executor = parts.executor(policy)
        result = executor.loss_and_gradients(parts.trainable, parts.frozen, [random_batch([[5, 1, 7]], 14)], 13.0)
        results.append(jax.block_until_ready(result))
        counts.append(runs)
    assert counts == [10, 10 + 3, 10 + 2]
    for result in results[1:]:
        chex.assert_trees_all_equal(result, results[0])


def test_first_layer_keeps_its_input(split_parts):
    with pytest.raises(ValueError, match="drops the first layer's input"):
        split_parts("lora").executor("drop:" + LAYER_INPUT)
