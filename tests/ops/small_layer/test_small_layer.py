"""Layers of small models: outputs and gradients against those of separate operations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.engine.layer_forms import run_layer
from jaxglue.engine.policy import parse_policy
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.context import PackedContext
from jaxglue.models.decoder import packed_context
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.attention import ATTENTION
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.equations import equations
from jaxglue.ops.projection import LowRankAdapter, Projection, StaticConditions
from jaxglue.ops.quant.fp8 import quantize_fp8
from jaxglue.ops.rope import RopeConfig, Rotary
from jaxglue.ops.segments import pack_segments
from jaxglue.ops.small_layer import SMALL_LAYER, LayerSpec, SmallLayerCall, is_small

TINY = {"vocab_size": 11, "num_hidden_layers": 1, "rope_theta": 1e4, "initializer_range": 0.2}
SIZES = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}

LARGER = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}


def random_case(kind="qwen3", rank=5, dtype=jnp.float32, lengths=((9, 1, 17), (30,)), tokens=31, sizes=SIZES):
    """Return a layer's function of its adapters and x, and these arguments; every matrix is random."""
    config = config_from_hf({"model_type": kind, **TINY, **sizes})
    model = build_model(config, dtype=dtype, rngs=nnx.Rngs(0))
    add_lora(model, LoraConfig(rank=rank, alpha=2 * rank), rngs=nnx.Rngs(1))
    graph, adapters, frozen = nnx.split(model.layers[0], nnx.LoRAParam, ...)
    rng = np.random.default_rng(0)
    scaled = lambda x: jnp.asarray(rng.standard_normal(x.shape) * x.shape[-1] ** -0.5, x.dtype)  # noqa: E731
    adapters = jax.tree.map(scaled, adapters)
    frozen = jax.tree.map(lambda x: x if x.ndim > 1 else (1 + scaled(x)).astype(x.dtype), frozen)
    context = packed_context(config, pack_segments(lengths, seq_len=tokens))
    x = jnp.asarray(rng.standard_normal((len(lengths), tokens, config.hidden_size)), dtype)

    def layer(adapters, x, frozen=frozen):
        return run_layer(nnx.merge(graph, adapters, frozen), x, context)

    return layer, (adapters, x)


def output_and_gradients(layer, arguments):
    """Return the output and the gradients to adapters and x, in float32."""
    dtype = jax.tree.leaves(arguments)[-1].dtype

    @jax.jit
    def compute(*arguments):
        y, pull = jax.vjp(layer, *arguments)
        return y, pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(dtype))

    return [x.astype(jnp.float32) for x in jax.tree.leaves(compute(*arguments))]


@pytest.fixture(scope="module")
def kernels(interpreted):
    from jaxglue.ops.small_layer.triton import LayerTiles, TritonSmallLayer

    tiles = LayerTiles(block_m=16, block_n=32, length=32, num_warps=1, num_stages=1)
    names = "extend", "add_norm", "middle", "entered", "swiglu", "swiglu_gradient", "ranks", "gradient", "weight"
    return interpreted(TritonSmallLayer)(compute_capability=90, **{f"{name}_tiles": tiles for name in names})


def interpreted_attention(interpreted):
    from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles
    from jaxglue.ops.attention.triton import TritonAttention

    tile = AttentionTiles(block_m=16, block_n=16, num_warps=1, num_stages=1)
    tiles = AttentionKernelTiles(forward=tile, dq=tile, dkdv=tile)
    return interpreted(TritonAttention)(compute_capability=80, tiles=tiles)  # without descriptors


@pytest.mark.parametrize(("kind", "joined", "policy"), [("qwen3", True, "dots"), repeat("llama", False, "none")])
def test_outputs_and_gradients_match_separate_operations(kernels, interpreted, kind, joined, policy):
    layer, arguments = random_case(kind)
    expected = output_and_gradients(layer, arguments)
    layer = parse_policy(policy).wrap(layer)
    with SMALL_LAYER.using(kernels), ATTENTION.using(interpreted_attention(interpreted) if joined else None):
        got = output_and_gradients(layer, arguments)
        program = str(jax.make_jaxpr(layer)(*arguments))
        assert program.count("pure_callback") + program.count("interpreted_kernel") == 6 + joined
    assert_close(got, expected, 1e-5)


@repeats_parts_of("test_outputs_and_gradients_match_separate_operations")
def test_adapters_learn_the_same_from_a_constant_input(kernels):
    layer, (adapters, x) = random_case(lengths=((5, 2),), tokens=8)
    with SMALL_LAYER.using(kernels):
        *expected, _ = output_and_gradients(layer, (adapters, x))
        got = output_and_gradients(lambda adapters: layer(adapters, x), (adapters,))
    assert_close(got, expected, 1e-6)


def step_on(device, policy="none"):
    """Return a step of a larger layer under a policy, and the shapes of its arguments there."""
    layer, arguments = random_case(rank=16, dtype=jnp.bfloat16, lengths=((300, 212),), tokens=512, sizes=LARGER)
    layer = parse_policy(policy).wrap(layer)

    def step(adapters, x):
        y, pull = jax.vjp(layer, adapters, x)
        return y, pull(y)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), arguments)
    return jax.jit(step, compiler_options=STEP_OPTIONS), shapes


@repeats_parts_of("test_outputs_and_gradients_match_separate_operations")
def test_few_kernels_run_between_matmuls(h200):
    step, shapes = step_on(h200)
    with tracing_for((9, 0)):
        text = step.lower(*shapes).compile().as_text()
    program = text[text.index("ENTRY") :]
    assert program.count("triton_kernel_call_ffi") == 7 + 7
    assert program.count("__cublas$lt$matmul") == 4 + 4


def test_recomputation_runs_every_kernel_again(h200):
    """Two of them write references and return nothing."""
    step, shapes = step_on(h200, "full")
    with tracing_for((9, 0)):
        calls = [call for call, _ in equations(step.trace(*shapes).jaxpr.jaxpr)]
    assert sum(call.primitive.name == "triton_kernel_call" for call in calls) == 7 + 7 + 7


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "policy"), [("qwen3", "none"), ("qwen3", "dots"), ("llama", "full")])
@pytest.mark.parametrize("rank", [16, 8, 5])
def test_bf16_matches_float32_on_a_gpu(kind, policy, rank):
    lengths, sizes = ((300, 1, 65, 100), (130, 380)), LARGER | {"num_attention_heads": 8, "num_key_value_heads": 4}
    case = {"rank": rank, "lengths": lengths, "tokens": 512, "sizes": sizes}
    with jax.default_matmul_precision("highest"), SMALL_LAYER.using(None):
        expected = output_and_gradients(*random_case(kind, **case))
        separate = output_and_gradients(*random_case(kind, **case, dtype=jnp.bfloat16))
    layer, arguments = random_case(kind, **case, dtype=jnp.bfloat16)
    got = output_and_gradients(parse_policy(policy).wrap(layer), arguments)
    for a, b, c in zip(got, separate, expected, strict=True):
        error, other = (np.linalg.norm(x - c) / np.linalg.norm(c) for x in (a, b))
        assert error <= max(1e-2, 1.1 * other)


def test_long_rows_and_large_weights_are_not_small():
    short, long, large = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 16), (2**17, 16), (2**20, 16)))
    assert is_small(short, [short, short])
    assert not is_small(long, [short, short])
    assert not is_small(short, [large, large])


def random_parts(rank=4, **changes):
    """Return seven projections, the last of them changed."""
    part = Projection(weight=jnp.ones((16, 16)), adapter=LowRankAdapter(A=jnp.ones((rank, 16)), B=jnp.ones((16, rank))))
    return [part] * 6 + [replace(part, **changes)]


WIDE = LowRankAdapter(A=jnp.ones((8, 16)), B=jnp.ones((16, 8)))
OBSTACLES = {
    "a projection has no adapter": random_parts(adapter=None),
    "dropout gives each adapter": random_parts(adapter=replace(WIDE, dropout=0.1)),
    "a projection has a bias": random_parts(bias=jnp.zeros(16)),
    "weights are quantized": random_parts(weight=quantize_fp8(jnp.ones((16, 16)))),
    "one rank, got 4, 8": random_parts(adapter=WIDE),
    "rank must be at most 32, got 64": random_parts(rank=64),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_are_named(reason):
    x, context = (
        jax.ShapeDtypeStruct((1, 8, 16), jnp.bfloat16),
        PackedContext(segments=None, rope=None, dropout_key=jax.random.key(0)),
    )
    call = SmallLayerCall(
        x=x,
        spec=LayerSpec(rotary=Rotary(RopeConfig(), 16), eps=1e-6, window=None),
        projections=OBSTACLES[reason],
        conditions=StaticConditions.of(context),
    )
    choice = SMALL_LAYER.choose((9, 0), call)
    assert choice.name == "reference" and reason in choice.reason


def test_programs_of_equal_length_fill_an_h200():
    from jaxglue.ops.small_layer.triton import even_length

    assert [even_length(rows, 48, 64) for rows in (8192, 4096, 100)] == [768, 832, 64]
