"""Exact sampling on a CPU: log-probabilities of answers are training's to the bit, whatever is decoded together."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.engine.compiler import rounding_as_written
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.exact import obstacle
from jaxglue.generation.scheduler import Request
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops import backend
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.backend import tracing_for
from jaxglue.rl.pack import Group, TrainedAnswer, pack_groups, unpack

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
SIZES |= {"num_hidden_layers": 2}
"""Sizes at which sampling that is near changes log-probabilities."""
ONE_LAYER = {"num_hidden_layers": 1}
PROMPTS = [[5, 3, 60, 17, 17, 2, 90, 41], [int(t) for t in np.random.default_rng(0).integers(0, 97, 70)], [7]]


def adapted(model, rank=2):
    add_lora(model, LoraConfig(rank=rank, alpha=8), rngs=nnx.Rngs(1))
    parts = nnx.split(model, nnx.LoRAParam, ...)
    noisy = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(2), x.shape, x.dtype), parts[1])
    nnx.update(model, noisy)
    return model


def sample(engine, trees, prompts, count, tokens, **options):
    """Return the answers of each prompt as training reads them."""
    sampling = SamplingConfig(max_tokens=tokens, temperature=1.0, top_p=1.0, seed=3)
    requests = [Request(prompt, sampling, index, n=count) for index, prompt in enumerate(prompts)]
    answers = [[None] * count for _ in prompts]
    for done in engine.generate(*trees, requests, (1, 2), **options):
        trained = TrainedAnswer(tokens=done.tokens, log_probs=done.log_probs, counted=np.ones(len(done.tokens), bool))
        answers[done.number][done.answer] = trained
    return [Group(prompt, group) for prompt, group in zip(prompts, answers, strict=True)]


def trained_log_probs(graphdefs, config, trees, groups, dtype, tile, *, exact=True):
    """Return the log-probabilities of training of each answer's tokens."""
    objective = ObjectiveConfig(objective="grpo").make()
    packed = pack_groups(groups, seq_len=512, batch_size=1, slots=16, tile=tile)
    with rounding_as_written():
        executor = Executor(graphdefs, config, policy=PRESETS["full"], dtype=dtype, objective=objective, exact=exact)
    return unpack(packed, [np.asarray(executor.log_probs(*trees, batch)) for batch, _ in packed])


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
    "glm4_moe": {
        **{**EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
        "first_k_dense_replace": 1,
    },
    "mistral": {"sliding_window": 24},
}
"""Fields of models with experts, chosen by softmaxes and by sigmoids, and with windows."""
LATENT = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": None},
    **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
}


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        repeat("qwen3", True),
        ("gpt_oss", True),
        repeat("glm4_moe", True),
        repeat("llama", False),
        repeat("qwen2", True),
        repeat("qwen3_moe", True),
        repeat("qwen3_moe", False),
        repeat("mistral", True),
    ],
)
def test_log_probabilities_are_those_of_training_to_the_bit(tiny_model, model_type, lora):
    model = tiny_model(model_type, dtype=jnp.bfloat16, **SIZES | FAMILIES.get(model_type, {}))
    model = adapted(model) if lora else model
    assert obstacle(model.config, jnp.bfloat16) is None
    assert_exact(model, jnp.bfloat16)


def assert_exact(model, dtype, **options):
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    tile = key_tile(model.config.layer_kinds[0].head_dim)
    groups = sample(Engine(graphdefs, model.config, dtype=dtype, exact=True), trees, PROMPTS, 3, 40, **options)
    trained = trained_log_probs(graphdefs, model.config, trees, groups, dtype, tile)
    sampled = [answer.log_probs for group in groups for answer in group.answers]
    for own, other in zip(sampled, trained, strict=True):
        np.testing.assert_array_equal(own, other)


@repeats_parts_of("test_log_probabilities_are_those_of_training_to_the_bit")
def test_each_token_has_the_experts_of_training(tiny_model, monkeypatch):
    """Tokens are told by the bits of their logits, none of which may be new in training but those of padding."""
    from jaxglue.models import moe_layers

    model = adapted(tiny_model("gpt_oss", dtype=jnp.bfloat16, **SIZES | FAMILIES["gpt_oss"]))
    chosen = dict[str, dict[bytes, bytes]](sampling={}, training={})
    now, route = chosen["sampling"], moe_layers.route

    def note(logits, expert_ids):
        now.update({row.tobytes(): ids.tobytes() for row, ids in zip(logits, expert_ids, strict=True)})

    def watched(logits, *arguments, **options):
        routing = route(logits, *arguments, **options)
        jax.debug.callback(lambda *rows: note(*map(np.asarray, rows)), logits, routing.expert_ids)
        return routing

    monkeypatch.setattr(moe_layers, "route", watched)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    groups = sample(Engine(graphdefs, model.config, exact=True), trees, PROMPTS[:2], 2, 24)
    jax.effects_barrier()
    now = chosen["training"]
    trained_log_probs(graphdefs, model.config, trees, groups, jnp.bfloat16, key_tile(32))
    jax.effects_barrier()
    both = chosen["sampling"].keys() & chosen["training"].keys()
    layers, tokens = len(graphdefs.layers), sum(group.length for group in groups)
    assert len(both) >= layers * (tokens - 2)  # both answers to a prompt begin with its last token
    assert all(chosen["sampling"][key] == chosen["training"][key] for key in both)


@repeats_parts_of("test_log_probabilities_are_those_of_training_to_the_bit")
def test_sampling_that_is_near_has_other_bits(tiny_model):
    """So the comparison tells them apart; what each order of sums changes is in the tests of operations."""
    model = adapted(tiny_model("qwen3", dtype=jnp.bfloat16, **SIZES))
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    groups = sample(Engine(graphdefs, model.config, as_written=True), trees, PROMPTS[1:2], 3, 40)
    trained = trained_log_probs(graphdefs, model.config, trees, groups, jnp.bfloat16, key_tile(32))
    own = [answer.log_probs for group in groups for answer in group.answers]
    assert any((one != other).any() for one, other in zip(own, trained, strict=True))


def test_exact_training_is_training(tiny_model):
    model = adapted(tiny_model("qwen3", **SIZES | ONE_LAYER))
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    groups = sample(Engine(graphdefs, model.config, dtype=jnp.float32), trees, PROMPTS, 2, 40)
    tiles = (key_tile(32), True), (1, False)
    exact, plain = (
        trained_log_probs(graphdefs, model.config, trees, groups, jnp.float32, tile, exact=exact)
        for tile, exact in tiles
    )
    for own, other in zip(exact, plain, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


def answers_of(groups):
    return [(answer.tokens.tolist(), answer.log_probs.tolist()) for group in groups for answer in group.answers]


@repeats_parts_of("test_log_probabilities_are_those_of_training_to_the_bit")
@pytest.mark.parametrize("model_type", ["qwen3", repeat("gpt_oss")])
def test_an_answer_has_the_same_bits_in_any_company(tiny_model, model_type):
    model = adapted(tiny_model(model_type, dtype=jnp.bfloat16, **SIZES | FAMILIES.get(model_type, {}) | ONE_LAYER))
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine = Engine(graphdefs, model.config, exact=True)
    together = answers_of(sample(engine, trees, PROMPTS, 2, 12))
    assert answers_of(sample(engine, trees, PROMPTS, 2, 12, slots=1)) == together  # after pages of others
    plan = engine.plan([Request(prompt, SamplingConfig(max_tokens=12), n=2) for prompt in PROMPTS], slots=3)
    assert answers_of(sample(engine, trees, PROMPTS, 2, 12, plan=plan, whole=True)) == together


@repeats_parts_of("test_log_probabilities_are_those_of_training_to_the_bit")
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_answers_that_give_up_their_pages_have_the_same_bits(tiny_model, model_type):
    """Their tokens are then computed again as a part of a row, where others were decoded one by one."""
    model = adapted(tiny_model(model_type, dtype=jnp.bfloat16, **SIZES | FAMILIES.get(model_type, {}) | ONE_LAYER))
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine = Engine(graphdefs, model.config, exact=True)
    prompts = [PROMPTS[0], [9, 8, 7]]
    requests = [Request(prompt, SamplingConfig(max_tokens=150), n=2) for prompt in prompts]
    roomy = engine.plan(requests, slots=4)
    narrow = replace(roomy, pages=max(roomy.pages // 2, roomy.table))
    calm, pressed = (answers_of(sample(engine, trees, prompts, 2, 150, plan=plan)) for plan in (roomy, narrow))
    assert calm == pressed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "deepseek_v3", **LATENT}, "latent attention"),
        ({"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}, "layers of"),
    ],
)
def test_models_whose_sums_have_other_orders_are_refused(tiny_model, changes, reason):
    model_type = changes.pop("model_type")
    assert reason in (obstacle(tiny_model(model_type, **changes).config, jnp.bfloat16) or "")


def test_gpus_without_kernels_in_one_order_are_refused(tiny_model):
    config = tiny_model("llama").config
    with tracing_for((8, 0)):
        assert "compute capability" in (obstacle(config, jnp.bfloat16) or "")
    assert "16 bits" in (obstacle(config, jnp.float32) or "")
    with tracing_for((9, 0)):
        assert "head dim" in (obstacle(config, jnp.bfloat16) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("slots", [1, 5, 9])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "gpt_oss", "glm4_moe"])
def test_log_probabilities_are_those_of_training_to_the_bit_on_a_gpu(tiny_model, model_type, lora, slots, monkeypatch):
    monkeypatch.setattr(backend, "UNTRIED", set())  # as it is this test that tries them
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64 if model_type == "gpt_oss" else 128}
    experts = {"moe_intermediate_size": 256} if model_type in ("qwen3_moe", "glm4_moe") else {}
    model = tiny_model(model_type, dtype=jnp.bfloat16, **FAMILIES.get(model_type, {}) | sizes | experts)
    model = adapted(model, rank=16) if lora else model
    assert obstacle(model.config, jnp.bfloat16, rank=16 if lora else 0) is None
    assert_exact(model, jnp.bfloat16, slots=slots)
