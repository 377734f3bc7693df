"""Offloading changes neither loss nor gradients, only where arrays are and when they are copied."""

import ctypes
from functools import cache, partial

import chex
import jax
import pytest
from selection import repeat

from jaxglue.engine import transfer
from jaxglue.engine.executor import Executor
from jaxglue.engine.host_buffers import HostBuffers, HostValue
from jaxglue.engine.policy import parse_policy
from jaxglue.engine.transfer import PINNED, prefetch

LENGTHS = [[5, 1, 7], [12]]
INPUT, OUT, UP = (2 * 14 * size * 4 for size in (32, 64, 48))
"""Bytes of a layer's input, of attention's output and of the up projection in the tiny model."""


def layers_on_host(frozen):
    return {**frozen, "layers": transfer.to_host(frozen["layers"])}


@pytest.fixture(autouse=True, scope="module")
def exact_matmuls():
    """On GPUs too: float32 matmuls round to TF32 there."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def batches(random_batch):
    return [random_batch(LENGTHS, 14, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def expected(split_parts, batches):
    """Loss and gradients without any policy: expected(kind)."""

    @cache
    def make(kind):
        parts = split_parts(kind)
        return parts.executor("none").loss_and_gradients(parts.trainable, parts.frozen, batches, 30.0)

    return make


@pytest.mark.parametrize(
    ("kind", "policy", "options", "host_bytes"),
    [
        ("lora", "offload:layer_input,attention_out,up; save:query,key", {"prefetch_depth": 1}, INPUT + OUT + UP),
        ("full", "dots; offload:layer_input,up", {"prefetch_depth": 0}, 2 * (INPUT + UP)),
        ("lora", "offload", {"stream_weights": True, "prefetch_depth": 1}, INPUT),
        ("lora", "offload", {"stream_weights": True}, 0),
    ],
)
def test_offload_changes_no_gradient(split_parts, batches, expected, monkeypatch, kind, policy, options, host_bytes):
    parts, sent = split_parts(kind), []
    frozen = layers_on_host(parts.frozen) if options.get("stream_weights") else parts.frozen
    monkeypatch.setattr(transfer, "to_host", _recorded(transfer.to_host, sent.append))
    executor = parts.executor(policy, **options)
    result = executor.loss_and_gradients(parts.trainable, frozen, batches, 30.0)
    chex.assert_trees_all_close(result, expected(kind), rtol=1e-5, atol=1e-6)
    arrays = jax.tree.leaves(sent)
    assert all(array.sharding.memory_kind == PINNED for array in arrays)
    # The last layers, one per prefetch buffer and one more, stay on the device.
    assert sum(array.nbytes for array in arrays) == len(batches) * host_bytes


@pytest.fixture
def host_buffers(monkeypatch):
    """Buffers that have to grow."""
    device, content = jax.local_devices()[0], HostValue.content.fget
    on_gpu = device.platform == "gpu"
    if not on_gpu:  # where JAX would go on with the buffer itself
        monkeypatch.setattr(HostValue, "content", property(lambda value: content(value).copy()))
    with HostBuffers(device, 2**20, None if on_gpu else ctypes.memmove) as buffers:
        yield buffers


@pytest.mark.parametrize("policy", [repeat("offload:layer_input,up"), "1 x offload + 2 x drop:layer_input; offload:up"])
def test_own_buffers_change_no_bit(split_parts, batches, host_buffers, policy):
    parts = split_parts("lora")
    pooled = parts.executor(policy, prefetch_depth=0).loss_and_gradients(parts.trainable, parts.frozen, batches, 30.0)
    executor = parts.executor(policy, prefetch_depth=0, host_buffers=host_buffers)
    list(executor.trace_step(parts.trainable, parts.frozen, batches))
    prepared = {size: list(free) for size, free in host_buffers._free.items()}
    assert prepared
    for _ in range(2):
        own = executor.loss_and_gradients(parts.trainable, parts.frozen, batches, 30.0)
        chex.assert_trees_all_equal(own, pooled)
    assert {size: set(map(id, free)) for size, free in host_buffers._free.items()} == {
        size: set(map(id, free)) for size, free in prepared.items()
    }


def _recorded(function, record):
    def wrapper(*arguments):
        result = function(*arguments)
        record(result)
        return result

    return wrapper


@pytest.fixture(scope="module")
def four_layers(split_parts):
    parts = split_parts("lora", num_hidden_layers=4)
    return parts, parts.executor("offload")


@pytest.fixture
def events(four_layers, batches, monkeypatch):
    """Return the order of dispatch: F and B for a layer's passes, out and in for copies."""

    def make(prefetch_depth=1, stream_weights=False):
        (parts, executor), log = four_layers, []
        monkeypatch.setattr(executor._passes, "_prefetch_depth", prefetch_depth)
        monkeypatch.setattr(executor._passes, "_stream_weights", stream_weights)
        with monkeypatch.context() as patch:
            layer = executor.layers[0]
            patch.setattr(layer, "forward", _recorded(layer.forward, lambda _: log.append("F")))
            patch.setattr(layer, "backward", _recorded(layer.backward, lambda _: log.append("B")))
            frozen = layers_on_host(parts.frozen) if stream_weights else parts.frozen
            for name in ("to_host", "request"):
                patch.setattr(transfer, name, partial(_move, log, name, getattr(transfer, name)))
            executor.loss_and_gradients(parts.trainable, frozen, batches[:1], 10.0)
        return " ".join(log)

    return make


def _move(log, name, moves, tree, *options):
    """Log a copy if any array moves."""
    result = moves(tree, *options)
    if any(a is not b for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(result), strict=True)):
        log.append({"to_host": "out", "request": "in"}[name])
    return result


def test_copies_are_requested_before_the_layers_that_hide_them(events):
    assert events() == "F out F out F F B in B in B B"
    assert events(prefetch_depth=2) == "F out F F F B in B B B"
    assert events(prefetch_depth=0) == "F out F out F out F B in B in B in B"


def test_weights_are_requested_further_ahead(events):
    assert events(stream_weights=True) == "in in in in F out F out F F B in in B in in B B"


def test_prefetch_keeps_order():
    assert list(prefetch([lambda i=i: i for i in range(5)], 2)) == [0, 1, 2, 3, 4]


def test_policy_per_layer(split_parts, batches, expected):
    parts = split_parts("lora")
    policies = [parse_policy(text) for text in ("offload", "none", "none")]
    executor = Executor(parts.graphdefs, parts.config, policy=policies, dtype="float32")
    result = executor.loss_and_gradients(parts.trainable, parts.frozen, batches, 30.0)
    chex.assert_trees_all_close(result, expected("lora"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="2 remat policies for 3 layers"):
        Executor(parts.graphdefs, parts.config, policy=policies[:2])


def test_device_without_pinned_memory_is_refused():
    class Memory:
        kind = "device"

    class Device:
        device_kind = "Toaster"

        def addressable_memories(self):
            return [Memory()]

    with pytest.raises(ValueError, match="Toaster has no pinned host memory"):
        transfer.check_pinned_memory(Device())
