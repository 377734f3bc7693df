"""Several layers in a program: values and gradients of one program a layer."""

import chex
import jax
import jax.numpy as jnp
import pytest
from selection import repeat, repeats_parts_of

from jaxglue import LayerStack
from jaxglue.engine import layer_groups
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import parse_policy
from jaxglue.models.context import PackedContext
from jaxglue.ops.rope import RopeTables
from jaxglue.ops.segments import pack_segments

LAYERS = 5
"""Two groups of two and one layer; fewer where groups are larger or slow to compile."""


def results(parts, batches, key=None, **options):
    """Loss, gradients and the loss without gradients."""
    executor = parts.executor(options.pop("policy", "none"), **options)
    arguments = parts.trainable, parts.frozen
    gradients = executor.loss_and_gradients(*arguments, batches, 13.0, key)
    return *gradients, executor.loss(*arguments, batches[0])


@repeats_parts_of("test_one_program_trains_as_several_do")
@pytest.mark.parametrize(
    ("kind", "layers", "size", "options"),
    [
        repeat("lora", LAYERS, 2, {}),
        repeat("lora", 3, 9, {"policy": "2 x full + 1 x dots", "dropout": 0.5, "batches": 2}),
        repeat("full", LAYERS, 3, {"policy": "2 x none + 3 x full"}),
        ("lora", 2, 2, {"dropout": 0.5, "tile": 7}),
        repeat("lora", 3, 2, {"dropout": 0.5, "tile": 7}),
    ],
)
def test_groups_change_no_value(split_parts, random_batch, kind, layers, size, options):
    batches = [random_batch([[5, 1, 7], [12]], 14, seed=seed) for seed in range(options.pop("batches", 1))]
    dropout = options.pop("dropout", 0.0)
    parts = split_parts(kind, dropout=dropout, num_hidden_layers=layers)
    key = jax.random.key(3) if dropout else None
    expected = results(parts, batches, key, **options)
    chex.assert_trees_all_equal(results(parts, batches, key, **options, layers_per_program=size), expected)


def test_a_program_of_all_layers_is_a_micro_batchs_only_one(split_parts, random_batch):
    parts = split_parts("lora", num_hidden_layers=2)
    executor, batch = parts.executor("none", layers_per_program=2), random_batch([[5, 1, 7], [12]], 14)
    visited: list = []
    for batches, programs in (([batch], 1), ([batch, batch], 2), ([batch], 2)):  # without and with sums of gradients
        visited.clear()
        update = lambda key, _: visited.append(key)  # noqa: E731
        executor.loss_and_update(parts.trainable, parts.frozen, batches, 13.0, update)
        assert executor.compilations() == programs
    assert visited == ["lm_head", "norm", 1, 0, "embed_tokens"]


@pytest.mark.parametrize(("kind", "micro_batches"), [repeat("lora", 1), ("full", 2)])
def test_gradients_of_one_program_take_the_place_of_earlier_ones(split_parts, random_batch, kind, micro_batches):
    parts = split_parts(kind, num_hidden_layers=2)
    executor = parts.executor("none", layers_per_program=2)
    assert executor.reuses_gradients
    first, second = ([random_batch([[5, 1, 7]], 14, seed=seed)] * micro_batches for seed in (0, 1))
    arguments = parts.trainable, parts.frozen
    expected = executor.loss_and_gradients(*arguments, second, 13.0)
    earlier_loss, earlier = executor.loss_and_gradients(*arguments, first, 13.0)
    places = jax.tree.map(lambda array: array.unsafe_buffer_pointer(), earlier)
    copies, compiled = jax.tree.map(jnp.copy, (earlier_loss, earlier)), executor.compilations()
    loss, gradients = executor.loss_and_gradients(*arguments, second, 13.0, into=earlier)
    chex.assert_trees_all_equal((loss, gradients), expected)
    assert jax.tree.map(lambda array: array.unsafe_buffer_pointer(), gradients) == places
    assert all(array.is_deleted() for array in jax.tree.leaves(earlier))
    chex.assert_trees_all_equal(earlier_loss, copies[0])
    chex.assert_trees_all_equal(executor.loss_and_gradients(*arguments, first, 13.0, into=gradients), copies)
    assert executor.compilations() == compiled


@pytest.mark.parametrize("entry_learns", [True, False])
def test_one_program_of_all_layers_skips_the_gradient_to_frozen_inputs(entry_learns):
    learns = set()

    @jax.custom_vjp
    def scale(w, x):
        return w * x

    def forward(w, x):
        learns.add(x.perturbed)
        return w.value * x.value, (w.value, x.value)

    scale.defvjp(forward, lambda saved, dy: (jnp.sum(saved[1] * dy), saved[0] * dy), symbolic_zeros=True)
    params = {"entry": {"w": jnp.ones(3)}, "layers": [{"w": jnp.float32(2)}] * 3, "head": {}}
    frozen = {} if entry_learns else {"entry": params["entry"]}
    gradients = []
    for size in (1, 2, 3):
        learns.clear()
        stack = LayerStack(
            lambda params, batch, key: (batch * params["w"], None),
            [lambda params, x, context, key: scale(params["w"], x)] * 3,
            lambda params, x, batch: jnp.sum(x**2),
            policy="none",
            layers_per_program=size,
        )
        trained = params if entry_learns else params | {"entry": {}}
        gradients.append(stack.loss_and_gradients(trained, [jnp.ones((1, 2, 3))], 1.0, frozen=frozen))
        assert (False in learns) == (size == 3 and not entry_learns)
    chex.assert_trees_all_equal(*gradients)


def test_layers_of_a_group_keep_their_own_choice_of_fp8():
    contexts = [PackedContext(segments=None, rope=1.0, fp8=fp8) for fp8 in (True, False)]
    assert contexts == layer_groups._contexts(*layer_groups._share(contexts))


@pytest.mark.parametrize(("dtype", "again"), [("uint8", True), ("bfloat16", False)])
def test_quantized_weights_are_converted_again_backward(dtype, again):
    weights = {"codes": jax.numpy.zeros(4, dtype), "scales": jax.numpy.zeros(2)}
    program = jax.make_jaxpr(layer_groups._convert_again)(weights, jax.numpy.zeros(3))
    assert ("optimization_barrier" in str(program)) == again


def test_equal_groups_share_programs(split_parts, random_batch):
    parts = split_parts("lora", num_hidden_layers=LAYERS)
    executor, batch = parts.executor("none", layers_per_program=2), random_batch([[5, 1, 7], [12]], 14)
    arguments = parts.trainable, parts.frozen, [batch], 13.0
    for _ in range(2):
        executor.loss_and_gradients(*arguments)
        programs = executor.compilations()
    assert programs == parts.executor("none").compilations() + 7  # three around the layers, two groups' passes


@pytest.mark.parametrize("policy", ["offload", "1 x full + 4 x drop:layer_input"])
def test_layers_that_need_programs_of_their_own_are_refused(split_parts, policy):
    with pytest.raises(ValueError, match=r"--layers-per-program 2 is for GPUs that keep everything.*: use 1"):
        split_parts("lora", num_hidden_layers=LAYERS).executor(policy, layers_per_program=2)


@pytest.mark.parametrize("inputs", [3, 2])
def test_layers_of_a_group_have_inputs_of_their_own(inputs):
    """All of them, as embeddings of Gemma 4's layers, or the first alone, as features of images in Qwen3-VL."""

    def layer(trainable, frozen, x, context):
        x = x * trainable["weight"]
        return x if context.layer_input is None else x + context.layer_input

    segments = pack_segments([[3]], seq_len=3)
    base = PackedContext(segments=segments, rope=RopeTables((), ()))
    contexts = base.each([jnp.full((1, 3, 2), 10.0**i) for i in range(inputs)], [segments] * 3)
    functions = [LayerFunctions(layer, parse_policy("none"))] * 3
    groups = layer_groups.LayerGroups(functions, None, 2)
    trainable, frozen, x = [{"weight": jnp.float32(2 + i)} for i in range(3)], [{}] * 3, jnp.ones((1, 3, 2))
    expected = x
    for weights, context in zip(trainable, contexts, strict=True):
        expected = layer(weights, {}, expected, context)
    y, saved, _ = groups.forward(trainable, frozen, x, contexts, None, constant=False)
    chex.assert_trees_all_equal(y, expected)
    found: dict = {}
    dx = groups.backward(saved, trainable, frozen, contexts, [jnp.ones_like(y)], [None] * 3, found.__setitem__)
    chex.assert_trees_all_equal(dx, jnp.full_like(x, 2.0 * 3 * 4))
    assert float(found[1]["weight"]) == 4 * 6 * 3 and float(found[2]["weight"]) == 6 * (3 * 3 + 10)
