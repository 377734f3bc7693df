"""AdamW part by part against optax on the whole tree."""

from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from selection import repeat

from jaxglue.models.parameters import get_part
from jaxglue.ops.adam import ADAM, AdamW, EightBit
from jaxglue.ops.backend import tracing_for
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.optax_optimizer import Lion
from jaxglue.training.partwise import decays, learning_rate_schedule, param_keys


def random_tree(seed, layers=10):
    rng = np.random.default_rng(seed)

    def part():
        return {"proj": {"lora_A": jnp.asarray(rng.normal(size=(2, 5)))}, "norm": jnp.asarray(rng.normal(size=5))}

    return {"embed_tokens": part(), "norm": {}, "layers": [{} if i == 3 else part() for i in range(layers)]}


@pytest.fixture
def on_kernels(interpreted, monkeypatch):
    """Run our kernels on the CPU."""
    from jaxglue.ops.adam import triton as adam_triton

    adam_class = interpreted(adam_triton.TritonAdam)
    monkeypatch.setattr(adam_triton, "_TILE", 4)  # several tiles in a tensor, the last not full
    monkeypatch.setattr(adam_triton, "_ADDRESSES", 20)  # several launches
    monkeypatch.setattr(adam_triton, "TritonAdam", adam_class)
    with tracing_for((9, 0)):
        yield


@pytest.fixture(params=["xla", "kernels"])
def backend(request):
    """Update by XLA, then by kernels."""
    if request.param == "kernels":
        request.getfixturevalue("on_kernels")


@pytest.mark.parametrize("clip_norm", [repeat(0.0), 0.5])
def test_updates_equal_optax_adamw(backend, clip_norm):
    config = OptimizerConfig(clip_norm=clip_norm, weight_decay=0.1, learning_rate=0.01, warmup_ratio=0.5)
    optimizer, trainable = AdamWOptimizer(config, total_steps=4), random_tree(0)
    whole = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, 4),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=0.1,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )
    expected = jax.tree.map(jnp.copy, trainable)
    state, expected_state = optimizer.init(trainable), whole.init(expected)
    for step in range(3):
        gradients = random_tree(step + 1)
        norm = optax.tree.norm(gradients)
        changes, expected_state = whole.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, changes)
        trainable, state, values = optimizer.update(trainable, state, gradients, step)
        chex.assert_trees_all_close(trainable, expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(values["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(values["learning_rate"], learning_rate_schedule(config, 4)(step), rtol=1e-6)


def test_part_by_part_updates_equal_a_whole_update(backend):
    config = OptimizerConfig(clip_norm=0, weight_decay=0.1)
    optimizer, gradients = AdamWOptimizer(config, total_steps=4), random_tree(1)
    expected = optimizer.update(random_tree(0), optimizer.init(random_tree(0)), gradients, 2)[:2]
    trainable = random_tree(0)
    state = optimizer.init(trainable)
    for key in param_keys(trainable):
        gradient = get_part(gradients, key)
        trainable, state = optimizer.update_part(trainable, state, key, gradient, 2)
    chex.assert_trees_all_equal((trainable, state), expected)


@pytest.mark.parametrize("make", [AdamWOptimizer, Lion])
def test_learning_rates_of_b_and_of_embeddings_are_their_own(request, make):
    """As in PEFT's LoRA+ and in axolotl's embedding_lr: an adapter of the head is one as any other."""
    if make is AdamWOptimizer:
        request.getfixturevalue("on_kernels")
    adapter = {"lora_A": np.full((2, 5), 0.5, np.float32), "lora_B": np.full((5, 2), 0.5, np.float32)}
    tree = {"embed_tokens": adapter, "lm_head": adapter, "norm": {}, "layers": [{"proj": adapter}] * 3}
    settings = {"clip_norm": 0.0, "learning_rate": 0.01, "warmup_ratio": 0.0, "schedule": "constant"}

    def change(**rates):
        optimizer, trainable = make(OptimizerConfig(**settings, **rates), 4), jax.tree.map(jnp.asarray, tree)
        new = optimizer.update(trainable, optimizer.init(trainable), jax.tree.map(jnp.copy, trainable), 0)[0]
        return jax.tree.map(lambda after, before: np.asarray(after - before).mean(), new, tree)

    usual = change()
    changed = jax.tree.map(
        lambda a, b: round(float(a / b), 4), change(lora_plus_ratio=4.0, embedding_learning_rate=0.001), usual
    )
    plus = {"lora_A": 1.0, "lora_B": 4.0}
    assert changed == {
        "embed_tokens": {"lora_A": 0.1, "lora_B": 0.1},
        "lm_head": plus,
        "norm": {},
        "layers": [{"proj": plus}] * 3,
    }


def test_8bit_moments_equal_bitsandbytes():
    """A few codes lie between two values, and rounding decides. Full blocks come six times: few stay in 32 bits."""
    golden = load_file(Path(__file__).parents[1] / "goldens/adam8bit.safetensors")
    golden = {name: np.concatenate([*[x[: 3 if "absmax" in name else 3 * 256]] * 5, x]) for name, x in golden.items()}
    adam = AdamW(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, moments="8bit")
    parameter = jnp.asarray(golden["parameter"])
    mu, nu = adam.init(parameter)
    update = jax.jit(partial(adam.update, decays=True))
    for step in range(3):
        scalars = adam.scalars(jnp.float32(1), jnp.float32(0.01), jnp.int32(step))
        parameter, mu, nu = update(parameter, mu, nu, golden[f"gradient{step}"], scalars)
        np.testing.assert_allclose(parameter, golden[f"parameter{step}"], rtol=1e-5, atol=1e-6)
        for name, moment in (("mean", mu), ("square", nu)):
            np.testing.assert_allclose(moment.absmax, golden[f"{name}_absmax{step}"], rtol=1e-5)
            assert np.mean(moment.codes != golden[f"{name}{step}"]) < 1e-3


@pytest.fixture
def large_tiles(on_kernels, monkeypatch):
    """Give tiles several blocks of 8-bit moments."""
    from jaxglue.ops.adam import triton as adam_triton

    monkeypatch.setattr(adam_triton, "_TILE", 1024)


def test_8bit_kernels_equal_the_reference(large_tiles):
    shapes = [(40, 130), (5,), (64, 64), (4096,), (3, 1500)]  # last blocks that are not full; one too small for 8 bits

    def tree(seed):
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return {"norm": {}, "layers": [{"w": jax.random.normal(*pair)} for pair in zip(keys, shapes, strict=True)]}

    def two_steps():
        optimizer, trainable = AdamWOptimizer(OptimizerConfig(moments="8bit", weight_decay=0.1), total_steps=9), tree(0)
        state = optimizer.init(trainable)
        for step in range(2):
            trainable, state, _ = optimizer.update(trainable, state, tree(step + 1), step)
        return trainable, jax.tree.leaves(state)

    trainable, state = two_steps()
    with ADAM.using(None):
        expected_trainable, expected_state = two_steps()
    chex.assert_trees_all_close(trainable, expected_trainable, rtol=1e-4, atol=1e-5)
    for got, expected in zip(state, expected_state, strict=True):
        if got.dtype == jnp.uint8:
            assert np.mean(got != expected) < 1e-3
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("moments", "bytes_each"), [("float32", 8), ("bfloat16", 6), ("8bit", 2 + 8 / 256)])
def test_moment_formats_have_their_size_and_learn(moments, bytes_each):
    optimizer = AdamWOptimizer(OptimizerConfig(moments=moments, learning_rate=0.1, schedule="constant"), total_steps=30)
    trainable = {"norm": {}, "layers": [{"weight": jax.random.normal(jax.random.key(0), (64, 128))}]}
    state = optimizer.init(trainable)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == 64 * 128 * bytes_each
    for step in range(30):
        trainable, state, _ = optimizer.update(trainable, state, jax.tree.map(jnp.copy, trainable), step)
    assert float(jnp.abs(trainable["layers"][0]["weight"]).mean()) < 0.2


def test_small_tensors_keep_float32():
    small, large = (
        AdamW(beta1=0.9, beta2=0.99, epsilon=0, weight_decay=0, moments="8bit").init(jnp.zeros(n)) for n in (4095, 4096)
    )
    assert not any(isinstance(moment, EightBit) for moment in small)
    assert all(isinstance(moment, EightBit) for moment in large)


@pytest.mark.parametrize("moments", [repeat("float32"), repeat("bfloat16"), "8bit"])
def test_gpu_step_is_few_launches_in_place(h200, moments):
    from jaxglue.ops.adam.triton import TritonAdam

    optimizer = AdamWOptimizer(OptimizerConfig(moments=moments), total_steps=30)
    parts = [{"lora_A": jnp.zeros((16, 256)), "lora_B": jnp.zeros((512, 16))} for _ in range(8)]
    states = [optimizer._init(part) for part in parts]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200), (parts, states, parts))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=h200)
    kernels = TritonAdam(adam=optimizer._adam, compute_capability=90)
    static = {"kernels": kernels, "prefixes": ("",) * 8, "factors": (1.0,) * 16}
    compiled = optimizer._update_fused.lower(*abstract, step, **static).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call') == 2
    assert " copy(" not in compiled.as_text()
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves((parts, states)))
    assert compiled.memory_analysis().alias_size_in_bytes == kept


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_gpu_kernels_equal_the_reference(moments):
    config = OptimizerConfig(moments=moments, weight_decay=0.1, learning_rate=0.01)
    shapes = [(16, 4096), (12288, 16), (5,), (3, 1000)] * 40  # several launches, tensors of several tiles

    def tree(seed):
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return {"norm": {}, "layers": [{"w": jax.random.normal(*pair)} for pair in zip(keys, shapes, strict=True)]}

    def three_steps():
        optimizer, trainable = AdamWOptimizer(config, total_steps=9), tree(0)
        state = optimizer.init(trainable)
        for step in range(3):
            trainable, state, values = optimizer.update(trainable, state, tree(step + 1), step)
        return trainable, values["grad_norm"]

    got = three_steps()
    with ADAM.using(None):
        expected = three_steps()
    # A moment between two stored values may round to either, which moves an update by a part of the learning rate.
    atol = 1e-5 if moments == "float32" else 0.1 * config.learning_rate
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize(
    ("schedule", "last"), [("constant", 1.0), ("linear", 0.1 + 0.9 / 90), ("cosine", 0.1 + 0.9 * 0.000305)]
)
def test_schedules_start_and_end_at_their_rates(schedule, last):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [float(learning_rate_schedule(config, 100)(step)) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[-1], last, rtol=1e-3)


def test_wsd_is_constant_up_to_its_decay():
    config = OptimizerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=10, decay_ratio=0.2, min_lr_ratio=0.1)
    rates = [float(learning_rate_schedule(config, 100)(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[10:81], 1.0)
    np.testing.assert_allclose(rates[80:], 1 - 0.9 * np.arange(21) / 20, rtol=1e-5)


@pytest.mark.parametrize("decay_ratio", [0.0, 1.0])
def test_wsd_takes_any_share(decay_ratio):
    config = OptimizerConfig(learning_rate=1.0, schedule="wsd", decay_ratio=decay_ratio)
    rates = [float(learning_rate_schedule(config, 3)(step)) for step in range(3)]
    assert all(0 < rate <= 1 for rate in rates)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"learning_rate: expected float > 0 \| none, got 0"):
        OptimizerConfig(learning_rate=0)
    with pytest.raises(ValueError, match=r"beta2: expected float >= 0 and < 1, got 1\.5"):
        OptimizerConfig(beta2=1.5)
    with pytest.raises(ValueError, match="--update-in-backward needs --clip-norm 0"):
        OptimizerConfig(update_in_backward=True)


@pytest.mark.parametrize("beta2", [0.999, 0.99999, 0.9999999])
def test_bias_correction_is_exact_near_one(beta2):
    adam = AdamW(beta1=0.9, beta2=beta2, epsilon=0.0, weight_decay=0.0, moments="float32")
    for step in (0, 1, 99, 10_000):
        correction = jax.jit(adam.scalars)(jnp.float32(1), jnp.float32(1), jnp.int32(step)).nu_correction
        assert float(correction) == pytest.approx(-np.expm1((step + 1) * np.log(beta2)), rel=1e-6)


def test_update_near_one_equals_the_formula():
    beta1, beta2, rate, epsilon = 0.9, 0.99999, 0.01, 1e-8
    adam = AdamW(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=0.0, moments="float32")
    rng = np.random.default_rng(0)
    parameter = expected = rng.standard_normal(64)
    mu, nu = adam.init(jnp.asarray(parameter, jnp.float32))
    ours, m, v = jnp.asarray(parameter, jnp.float32), np.zeros(64), np.zeros(64)
    for step in range(20):
        gradient = rng.standard_normal(64)
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        corrected = m / (1 - beta1 ** (step + 1)) / (np.sqrt(v / (1 - beta2 ** (step + 1))) + epsilon)
        expected = expected - rate * corrected
        scalars = adam.scalars(jnp.float32(1), jnp.float32(rate), jnp.int32(step))
        ours, mu, nu = adam.update(ours, mu, nu, jnp.asarray(gradient, jnp.float32), scalars, decays=False)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_a_decay_of_one_is_refused():
    with pytest.raises(ValueError, match=r"beta2: expected float >= 0 and < 1, got 1\.0"):
        OptimizerConfig(beta2=1.0)


def test_matrices_decay_and_norms_and_experts_biases_do_not():
    leaves = {"down_proj": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 3))}, {"weight": jnp.ones((3, 4))}, jnp.ones(3)
    experts, linear, norm = leaves
    assert decays([{"a_experts": experts, "b_linear": linear, "c_norm": norm}]) == [False, True, True, False]
