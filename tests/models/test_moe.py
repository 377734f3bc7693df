"""Mixture-of-experts models: layer types, skewed routing, router losses, MXFP4, generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats, repeats_parts_of

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.models import build_model
from jaxglue.models.context import RouterLosses
from jaxglue.models.decoder import packed_context
from jaxglue.models.lora import add_lora, linear_layers
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, flatten_names, set_parameters, split_model
from jaxglue.ops.moe import ROUTE, auxiliary_loss, route, z_loss
from jaxglue.ops.quant.mxfp4 import MXFP4, dequantize_mxfp4
from jaxglue.ops.segments import pack_segments
from jaxglue.planner.flops import matmul_parameters

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 3}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
QWEN2_MOE = {**QWEN3_MOE, "norm_topk_prob": False, "shared_expert_intermediate_size": 40}
GLM4_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": None}
DEEPSEEK = {**GLM4_MOE, **LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
FAMILIES = {"gpt_oss": GPT_OSS, "qwen3_moe": QWEN3_MOE, "qwen2_moe": QWEN2_MOE, "glm4_moe": GLM4_MOE}
FAMILIES |= {"deepseek_v3": DEEPSEEK}
LENGTHS = [[5, 3, 6], [9, 2]]
ONE_TYPE = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


@pytest.fixture
def moe_model(tiny_model):
    """Build a tiny model whose router is balanced, or prefers two experts with `skew`."""

    def make(family="gpt_oss", skew=False, **changes):
        model = tiny_model(family, **{**FAMILIES[family], **changes})
        for layer in model.layers if skew else ():
            router = layer.mlp.router if family == "gpt_oss" else layer.mlp.gate
            router.weight[...] = router.weight[...].at[:2].set(1.0)
            layer.post_attention_layernorm.weight[...] = jnp.abs(layer.post_attention_layernorm.weight[...])
        return model

    return make


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_tokens_are_multiplied_with_their_experts_and_shared_ones(moe_model, family):
    model = moe_model(family, mlp_only_layers=[1], first_k_dense_replace=1)
    shapes = abstract_parameters(model)
    counted = {name: spec.size for name, spec in shapes.items() if len(spec.shape) > 1 and "embed" not in name}
    served = 2 / 4  # of the experts
    expected = sum(size * (served if ".experts." in name else 1) for name, size in counted.items())
    assert matmul_parameters(model.config) == expected


def add_random_lora(model):
    """Add adapters with a non-zero product."""
    add_lora(model, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_B":
            variable.set_value(jax.random.normal(jax.random.key(len(path)), variable.shape) * 0.1)


def objective(model, batch, router_losses):
    """Return (total objective, cross-entropy per target), with router losses written out."""
    context = packed_context(model.config, batch.segments)
    mask = batch.segments.segment_ids.reshape(-1) > 0
    x, extra = model.embed_tokens(batch.tokens, jnp.float32), 0.0
    for layer in model.layers:
        inner = x + layer.self_attn(layer.input_layernorm(x), context)
        logits = layer.mlp.router(layer.post_attention_layernorm(inner).reshape(-1, x.shape[-1]))
        balance = auxiliary_loss(logits, route(logits, 2, order="topk_softmax"), mask)
        extra += (router_losses.balance * balance + router_losses.z * z_loss(logits, mask)) / len(model.layers)
        x = layer(x, context)
    logits = jax.nn.log_softmax(model.norm(x) @ model.output_weight.T)
    picked = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    loss = -(picked * batch.loss_weights).sum() / batch.loss_weights.sum()
    return loss + extra, loss


def run_executor(model, batch, policy="full", **options):
    """Return (loss, adapter gradients by layer)."""
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    executor = Executor(graphdefs, model.config, policy=parse_policy(policy), dtype=jnp.float32, **options)
    loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(batch.loss_weights.sum()))
    return loss, gradients["layers"]


def assert_close(ours, expected, tolerance=1e-4):
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-6)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_router_losses_enter_gradients_but_not_the_loss(moe_model, random_batch):
    losses = RouterLosses(balance=0.5, z=0.2)
    model, batch = moe_model(**ONE_TYPE), random_batch(LENGTHS, seq_len=16)
    add_random_lora(model)
    loss, gradients = run_executor(model, batch, router_losses=losses)
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    grad = nnx.jit(nnx.value_and_grad(objective, argnums=adapters, has_aux=True))
    (_, expected_loss), expected = grad(model, batch, losses)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    expected = nnx.to_pure_dict(expected)["layers"]
    assert_close(gradients, [expected[i] for i in range(2)])


def test_windows_and_full_attention_compile_two_programs(moe_model):
    model = moe_model(num_hidden_layers=6)
    graphdefs, *_ = split_model(model, nnx.LoRAParam)
    assert len(set(graphdefs.layers)) == 2
    assert [layer.self_attn.window for layer in model.layers] == [3, None] * 3


def test_dense_and_sparse_layers_compile_two_programs(moe_model):
    graphdefs, *_ = split_model(moe_model("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=3), nnx.LoRAParam)
    assert len(set(graphdefs.layers)) == 2


@pytest.mark.parametrize("family", repeats(FAMILIES, "glm4_moe", "qwen2_moe", "qwen3_moe"))
@pytest.mark.parametrize("skew", [repeat(False, id="even"), pytest.param(True, id="skewed")])
def test_packed_rows_equal_documents_one_by_one(moe_model, family, skew):
    model = moe_model(family, skew)
    run = nnx.jit(lambda model, *batch: model(*batch))
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, model.config.vocab_size)
    packed = run(model, tokens, pack_segments([[7, 4, 3]], seq_len=16))
    for start, length in ((0, 7), (7, 4), (11, 3)):
        alone = jnp.zeros_like(tokens).at[:, :length].set(tokens[:, start : start + length])
        logits = run(model, alone, pack_segments([[length]], seq_len=16))
        np.testing.assert_allclose(packed[0, start : start + length], logits[0, :length], rtol=0, atol=1e-5)


def expand(model, config):
    """Return the model with experts expanded to float32."""
    parameters = flatten_names(split_model(model, nnx.Param)[1])
    for name in [name for name in parameters if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        packed = MXFP4(blocks=parameters.pop(name), scales=parameters.pop(f"{stem}_scales"))
        parameters[stem] = dequantize_mxfp4(packed, jnp.float32).mT
    abstract = nnx.eval_shape(lambda: build_model(config.expanded, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return set_parameters(abstract, parameters)


@repeats_parts_of("test_mxfp4_matches_transformers_in_blocks_and_expanded")
def test_adapters_train_alike_on_blocks_and_expanded_weights(moe_model, random_batch):
    blocks = moe_model(**ONE_TYPE, quantization_config={"quant_method": "mxfp4"})
    batch, models = random_batch(LENGTHS, seq_len=16), (blocks, expand(blocks, blocks.config))
    for model in models:
        add_random_lora(model)
    (loss, gradients), (expected_loss, expected) = (run_executor(model, batch, "dots") for model in models)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(gradients, expected)


def test_each_adapter_of_experts_has_its_own_scale(tiny_model):
    """Patterns, and square roots of ranks that differ, give PEFT one for gate and up and another for down."""
    patterns = {"rank_pattern": ("experts.gate_up_proj=3",), "alpha_pattern": ("experts.down_proj=7",)}
    targets = "experts.gate_up_proj", "experts.down_proj"
    lora, models = LoraConfig(rank=2, alpha=3.0, rslora=True, targets=targets, **patterns), []
    for merged in (False, True):
        model = tiny_model("qwen3_moe", **QWEN3_MOE)
        add_lora(model, lora, rngs=nnx.Rngs(1))
        for number, layer in enumerate(model.layers):
            for kind in ("gate_up_proj", "down_proj"):
                linear = getattr(layer.mlp.experts, kind)
                B = jax.random.normal(jax.random.key(number), linear.lora_B[...].shape)
                linear.lora_B[...] = 0 * B if merged else B
                scale = lora.scale_of(f"model.layers.{number}.mlp.experts.{kind}")
                linear.weight[...] += scale * (B @ linear.lora_A[...]) if merged else 0
        models.append(model)
    run = nnx.jit(lambda model: model(jnp.array([[3, 1, 4, 1, 5]])))
    logits = [run(model) for model in models]
    np.testing.assert_allclose(*logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("family", "options"), [("qwen3_moe", QWEN3_MOE), ("qwen3", {})])
def test_experts_are_left_out_of_adapters_where_there_are_any(tiny_model, family, options):
    model = tiny_model(family, **options)
    add_lora(model, LoraConfig(rank=2, exclude=("experts",)), rngs=nnx.Rngs(1))
    adapted = {path for path, linear in linear_layers(model) if linear.lora_A is not None}
    assert adapted == {path for path, _ in linear_layers(model) if ".experts." not in path} and adapted


@repeats_parts_of("test_log_probabilities_are_those_of_training_to_the_bit")
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_matches_full_forward_passes(moe_model, family):
    model = moe_model(family)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine = Engine(graphdefs, model.config, dtype=jnp.float32)
    prompt = [3, 14, 15, 92, 65]
    tokens = list(engine.stream(*trees, prompt, SamplingConfig(max_tokens=6, temperature=0.0)))
    text = np.array([prompt + tokens])
    logits = nnx.jit(lambda model, *batch: model(*batch))(model, text, pack_segments([[text.size]], seq_len=text.size))
    assert tokens == jnp.argmax(logits[0, len(prompt) - 1 : -1], axis=-1).tolist()


def test_generation_routes_few_tokens_by_kernels(moe_model):
    class Kernels:
        routed = 0

        def route(self, logits, k, **options):
            self.routed += len(logits)
            return route(logits, k, **options)

    model, kernels = moe_model("qwen3_moe"), Kernels()
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    with ROUTE.using(kernels):
        list(Engine(graphdefs, model.config, dtype=jnp.float32).stream(*trees, [3], SamplingConfig(max_tokens=1)))
    assert kernels.routed > 0


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt_oss", {"num_local_experts": None}, r"config\.json lacks num_local_experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, r"config\.json lacks moe_intermediate_size"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be between 1 and num_experts=4"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit=5\.0 in config\.json is not supported: only 7\.0 is"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'.* is not supported"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
    ],
)
def test_impossible_configs_are_refused(tiny_model, family, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(family, **{**FAMILIES[family], **fields})


def test_mxfp4_sizes_must_be_multiples_of_the_block(moe_model):
    with pytest.raises(ValueError, match="MXFP4 experts need sizes that are multiples of 32, got 40"):
        moe_model(intermediate_size=40, quantization_config={"quant_method": "mxfp4"})
