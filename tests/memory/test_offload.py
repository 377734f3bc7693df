"""Activations and weights on the host change neither loss nor gradients, only where things are and when they move."""

import chex
import jax
import pytest

from jaxglue.memory import transfer
from jaxglue.memory.executor import Executor, frozen_to_host
from jaxglue.memory.policy import parse_policy
from jaxglue.memory.transfer import PINNED, prefetch

LENGTHS = [[5, 1, 7], [12]]
INPUT = 2 * 14 * 32 * 4
"""Bytes of a layer's input in the tiny model."""


@pytest.fixture
def run(split_parts, random_batch):
    """Loss and gradients of the tiny model under a policy: run(kind, policy, micro_batches=…, **executor options)."""

    def make(kind, policy, micro_batches=1, **options):
        parts = split_parts(kind)
        frozen = frozen_to_host(parts.frozen) if options.get("stream_weights") else parts.frozen
        batches = [random_batch(LENGTHS, 14, seed=seed) for seed in range(micro_batches)]
        return parts.executor(policy, **options).loss_and_gradients(parts.trainable, frozen, batches, 30.0)

    return make


@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    [
        ("lora", "offload", {"micro_batches": 2}),
        ("lora", "offload:layer_input,attention_out,up; save:query,key", {"prefetch_depth": 2}),
        ("full", "dots; offload:layer_input,gate", {"prefetch_depth": 0}),
        ("lora", "offload", {"stream_weights": True}),
    ],
)
def test_gradients_do_not_depend_on_the_policy(run, kind, policy, options):
    expected = run(kind, "none", options.get("micro_batches", 1))
    chex.assert_trees_all_close(run(kind, policy, **options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "per_layer"),
    [("full", 0), ("offload", INPUT), ("offload:layer_input,gate,up", INPUT + 2 * 2 * 14 * 48 * 4)],
)
def test_bytes_on_the_host(run, monkeypatch, policy, per_layer):
    sent = []
    monkeypatch.setattr(transfer, "to_host", _recorded(transfer.to_host, sent.append))
    run("lora", policy)
    arrays = [leaf for tree in sent for leaf in jax.tree.leaves(tree)]
    assert all(array.sharding.memory_kind == PINNED for array in arrays)
    assert sum(array.nbytes for array in arrays) == 2 * per_layer  # the last of three layers stays on the device


def _recorded(function, record):
    def wrapper(*arguments):
        result = function(*arguments)
        record(result)
        return result

    return wrapper


@pytest.fixture
def events(split_parts, random_batch, monkeypatch):
    """What an executor dispatches, in order: F0, to_host, B2, …"""

    def make(policy, **options):
        parts, log = split_parts("lora", num_hidden_layers=4), []
        executor = parts.executor(policy, **options)
        layer = executor._layers[0]
        layer.forward = _recorded(layer.forward, lambda _: log.append("F"))
        layer.backward = _recorded(layer.backward, lambda _: log.append("B"))
        for name in ("to_host", "to_device"):
            moves = getattr(transfer, name)
            monkeypatch.setattr(transfer, name, lambda tree, name=name, moves=moves: _move(log, name, moves, tree))
        frozen = frozen_to_host(parts.frozen) if options.get("stream_weights") else parts.frozen
        log.clear()
        executor.loss_and_gradients(parts.trainable, frozen, [random_batch(LENGTHS, 14)], 10.0)
        return " ".join(log)

    return make


def _move(log, name, moves, tree):
    """Logs a copy where there is something to copy."""
    result = moves(tree)
    if any(a is not b for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(result), strict=True)):
        log.append({"to_host": "out", "to_device": "in"}[name])
    return result


def test_copies_are_asked_for_before_the_work_that_hides_them(events):
    forward = "F out F out F out F"
    assert events("offload") == f"{forward} in B in B in B B"
    assert events("offload", prefetch_depth=2) == f"{forward} in in B in B B B"
    assert events("offload", prefetch_depth=0) == f"{forward} B in B in B in B"


def test_weights_are_asked_for_one_layer_ahead(events):
    assert events("full", stream_weights=True) == "in in F in F in F F in B in B in B B"


def test_prefetch_hands_out_results_in_order():
    assert list(prefetch([lambda i=i: i for i in range(5)], 2)) == [0, 1, 2, 3, 4]


def test_weights_on_the_host_need_frozen_weights(split_parts):
    with pytest.raises(ValueError, match="need frozen weights"):
        frozen_to_host(split_parts("full").frozen)


def test_a_policy_for_each_layer(split_parts, random_batch, run):
    parts = split_parts("lora")
    policies = [parse_policy(text) for text in ("offload", "dots", "none")]
    executor = Executor(parts.structure, parts.config, policy=policies, dtype="float32")
    result = executor.loss_and_gradients(parts.trainable, parts.frozen, [random_batch(LENGTHS, 14)], 30.0)
    chex.assert_trees_all_close(result, run("lora", "none"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="2 remat policies for 3 layers"):
        Executor(parts.structure, parts.config, policy=policies[:2])


def test_a_device_without_pinned_memory_is_refused():
    class Memory:
        kind = "device"

    class Device:
        device_kind = "Toaster"

        def addressable_memories(self):
            return [Memory()]

    with pytest.raises(ValueError, match="Toaster has no pinned host memory"):
        transfer.check_pinned_memory(Device())
