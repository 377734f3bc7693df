"""The layer-by-layer executor computes the loss and gradients of the whole model."""

import dataclasses
import weakref
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.engine import transfer
from jaxglue.models.decoder import packed_context
from jaxglue.models.parameters import merge_module
from jaxglue.ops.projection import project

LENGTHS = [[5, 1, 7], [12]]


def whole_model_loss(graphdefs, config, trainable, frozen, batches):
    """The definition: log-softmax of the model's logits, in one program."""

    def module(name):
        return merge_module(getattr(graphdefs, name), trainable[name], frozen[name])

    def one(batch):
        x, context = module("embed_tokens")(batch.tokens, jnp.float32), packed_context(config, batch.segments)
        inputs = module("embed_tokens").layer_inputs(batch.tokens, x)
        contexts = context.each(inputs, [batch.segments] * len(graphdefs.layers))
        for i, graph in enumerate(graphdefs.layers):
            x = merge_module(graph, trainable["layers"][i], frozen["layers"][i])(x, contexts[i])
        output = module("embed_tokens" if graphdefs.lm_head is None else "lm_head").weight[...]
        log_probs = jax.nn.log_softmax(project(module("norm")(x), output))
        picked = jnp.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(batch.loss_weights * picked)

    return sum(one(batch) for batch in batches) / sum(batch.loss_weights.sum() for batch in batches)


def total_weight(batches):
    return float(sum(batch.loss_weights.sum() for batch in batches))


GEMMA4 = {
    **{"model_type": "gemma4_text", "global_head_dim": 8, "num_kv_shared_layers": 1, "sliding_window": 4},
    "layer_types": ["full_attention"] * 2,
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
}
"""Keys and values that layers share, and embeddings for each layer."""


@pytest.mark.parametrize(
    ("kind", "changes", "policy"),
    [
        repeat("lora", {}, "none"),
        ("full", {"tie_word_embeddings": True}, "dots"),
        repeat("lora", GEMMA4, "full"),
        repeat("full", {**GEMMA4, "hidden_size_per_layer_input": 0}, "dots"),
    ],
)
def test_loss_and_gradients_match_the_whole_model(split_parts, random_batch, kind, changes, policy):
    parts = split_parts(kind, num_hidden_layers=2, **changes)
    batches = [random_batch(LENGTHS, 14, seed=seed) for seed in range(2)]
    executor = parts.executor(policy)
    loss, gradients = executor.loss_and_gradients(parts.trainable, parts.frozen, batches, total_weight(batches))
    whole = partial(whole_model_loss, parts.graphdefs, parts.config)
    expected = jax.jit(jax.value_and_grad(whole))(parts.trainable, parts.frozen, batches)
    # Sums of Gemma 4's layers are in another order in the two: a few float32 steps of gradients of 0.1.
    chex.assert_trees_all_close((loss, gradients), expected, rtol=1e-5, atol=3e-6)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients["layers"])) > 1e-4


def test_accumulation_equals_the_large_batch(split_parts, random_batch):
    parts = split_parts("lora")
    executor = parts.executor("dots")
    halves = [random_batch([row], 14, seed=seed) for seed, row in enumerate(LENGTHS)]
    whole = jax.tree.map(lambda *rows: np.concatenate(rows), *(_same_slots(half) for half in halves))
    together = executor.loss_and_gradients(parts.trainable, parts.frozen, [whole], total_weight([whole]))
    apart = executor.loss_and_gradients(parts.trainable, parts.frozen, halves, total_weight(halves))
    chex.assert_trees_all_close(together, apart, rtol=1e-5, atol=1e-6)


def _same_slots(batch, slots=5):
    cu_seqlens = np.pad(
        batch.segments.cu_seqlens, [(0, 0), (0, slots - batch.segments.cu_seqlens.shape[1])], mode="edge"
    )
    return dataclasses.replace(batch, segments=dataclasses.replace(batch.segments, cu_seqlens=cu_seqlens))


def test_compilations_do_not_depend_on_depth(split_parts, random_batch):
    counts = []
    for depth in (2, 4):
        parts = split_parts("lora", num_hidden_layers=depth)
        executor = parts.executor("offload:layer_input,gate; save:query")
        trainable = parts.trainable
        for seed in range(2):
            batch = random_batch(LENGTHS, 14, seed=seed)
            _, trainable = executor.loss_and_gradients(trainable, parts.frozen, [batch], total_weight([batch]))
        counts.append(executor.compilations())
    assert counts[0] == counts[1]


def test_update_gets_every_gradient_last_layer_first(split_parts, random_batch):
    parts = split_parts("full", tie_word_embeddings=True)
    executor, batch = parts.executor("full"), random_batch(LENGTHS, 14)
    arguments = (parts.trainable, parts.frozen, [batch], total_weight([batch]))
    loss, gradients = executor.loss_and_gradients(*arguments)
    seen = []
    assert loss == executor.loss_and_update(*arguments, lambda part, tree: seen.append((part, tree)))
    assert [part for part, _ in seen] == ["norm", 2, 1, 0, "embed_tokens"]
    for part, tree in seen:
        chex.assert_trees_all_equal(tree, gradients["layers"][part] if isinstance(part, int) else gradients[part])


def test_gradient_of_the_last_output_is_freed(split_parts, random_batch, monkeypatch):
    parts = split_parts("lora")
    executor, batch, seen = parts.executor("full"), random_batch(LENGTHS, 14), []
    head_backward = executor.entry_head.head_backward

    def watched(*arguments):
        loss, dx, head = head_backward(*arguments)
        seen.append(weakref.ref(dx))
        return loss, dx, head

    monkeypatch.setattr(executor.entry_head, "head_backward", watched)
    freed = {}
    arguments = (parts.trainable, parts.frozen, [batch], total_weight([batch]))
    executor.loss_and_update(*arguments, lambda part, _: freed.update({part: seen[0]() is None}))
    assert freed[0]


def test_dropout_follows_its_key(split_parts, random_batch):
    parts = split_parts("lora", dropout=0.5)
    executor, batch = parts.executor("full"), random_batch(LENGTHS, 14)

    def loss(seed):
        key = jax.random.key(seed)
        return float(executor.loss_and_gradients(parts.trainable, parts.frozen, [batch], 1.0, key)[0])

    assert loss(0) == loss(0) != loss(1)


def test_programs_are_compiled_while_no_other_runs(split_parts, random_batch, monkeypatch):
    """XLA compares algorithms in memory of their own, which nobody plans beside that of a program under way."""
    limits = []

    class Recorded(transfer.RunAhead):
        def __init__(self, layers):
            super().__init__(layers)
            self.limit = layers

        def add(self, result):
            limits.append(self.limit)
            super().add(result)
            assert self.limit or not self._dispatched

    monkeypatch.setattr(transfer, "RunAhead", Recorded)
    parts = split_parts("lora", num_hidden_layers=2)
    executor, batch = parts.executor("dots"), random_batch(LENGTHS, 14)
    other = random_batch([[2] * 6, [12]], 14)  # more segment slots are another program
    counts = []
    for one in (batch, batch, other, other):
        executor.loss_and_gradients(parts.trainable, parts.frozen, [one], total_weight([one]))
        counts.append(limits.count(0))
    assert counts[0] == counts[1] == 2 + 1 + 2  # each layer's forward pass, the head, each backward pass
    assert counts[2] == counts[3] == 2 * counts[0]
