"""Generation of latent attention, whose cache holds latent vectors in place of keys and values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.generation import programs
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import PAGE, make_caches, plan_cache, token_bytes
from jaxglue.generation.scheduler import Request
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments

RANK, TURNING = 12, 8
FIELDS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": TURNING, "v_head_dim": 10, "head_dim": None},
    **{
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "initializer_range": 0.3,
        "num_hidden_layers": 2,
    },
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "mscale": 1.0},
}
PROMPT = np.random.default_rng(0).integers(0, 97, 61).tolist()
SAMPLING = SamplingConfig(temperature=1.3, top_p=1.0, max_tokens=20, seed=5)


@pytest.fixture
def latent_model(tiny_model):
    """Build a model, with random adapters in every projection unless `lora` is None."""

    def make(lora=None, **changes):
        model = tiny_model("deepseek_v3", **{**FIELDS, **changes})
        if lora is not None:
            add_lora(model, lora, rngs=nnx.Rngs(1))
            for key, (_, leaf) in enumerate(nnx.iter_graph(model)):
                if isinstance(leaf, nnx.LoRAParam):
                    leaf[...] += 0.2 * jax.random.normal(jax.random.key(key), leaf.shape)
        return model

    return make


def engine_of(model, **options):
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    return Engine(graphdefs, model.config, dtype=jnp.float32, **options), trees


def log_probs_of(model, documents):
    """Return the log-probabilities of each answer after its prompt by one forward pass, which knows whole keys."""
    lengths = [len(prompt) + len(answer) for prompt, answer in documents]
    tokens = np.zeros((len(documents), max(lengths)), np.int32)
    for row, document, length in zip(tokens, documents, lengths, strict=True):
        row[:length] = np.concatenate(document)
    segments = pack_segments([[length] for length in lengths], seq_len=tokens.shape[1])
    rows = jax.jit(lambda: jax.nn.log_softmax(model(tokens, segments)))()
    return [
        row[np.arange(len(prompt) - 1, length - 1), answer]
        for row, (prompt, answer), length in zip(np.asarray(rows), documents, lengths, strict=True)
    ]


ADAPTERS = {"none": None, "lora": LoraConfig(rank=2, alpha=8)}
ADAPTERS["dora"] = LoraConfig(rank=2, alpha=8, dora=True, targets="q_proj,kv_b_proj,o_proj")


@pytest.mark.parametrize("adapters", [repeat("none"), repeat("lora"), "dora"])
def test_log_probabilities_equal_those_of_a_forward_pass(latent_model, adapters):
    model = latent_model(ADAPTERS[adapters], q_lora_rank=20 if adapters == "lora" else None)
    engine, trees = engine_of(model)
    requests = [Request(PROMPT, SAMPLING, n=2), Request(PROMPT[:5], SAMPLING)]  # one shares a page, all cross one
    answers = list(engine.generate(*trees, requests))
    wanted = log_probs_of(model, [(requests[found.number].prompt, found.tokens) for found in answers])
    for found, log_probs in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(found.model_log_probs, log_probs, atol=3e-5)
    assert len({tuple(found.tokens.tolist()) for found in answers}) == 3


@repeats_parts_of("test_log_probabilities_equal_those_of_a_forward_pass")
def test_long_prompts_pass_in_pieces(latent_model, monkeypatch):
    monkeypatch.setattr(programs, "PREFILL_TOKENS", 16)
    model = latent_model()
    engine, trees = engine_of(model)
    (found,) = engine.generate(*trees, [Request(PROMPT, SAMPLING)])
    (wanted,) = log_probs_of(model, [(PROMPT, found.tokens)])
    np.testing.assert_allclose(found.model_log_probs, wanted, atol=3e-5)


def test_the_cache_holds_latents_and_one_key(latent_model):
    config = latent_model().config
    assert token_bytes(config, jnp.bfloat16) == config.num_hidden_layers * 2 * (RANK + TURNING)
    plan = plan_cache([(100, 200)], config, jnp.float32, free=2**30)
    size = sum(cache.nbytes for cache in jax.tree.leaves(make_caches(plan, config, jnp.bfloat16, jnp.float32)))
    assert size == (plan.pages + 1) * PAGE * token_bytes(config, jnp.bfloat16)


@repeats_parts_of("test_log_probabilities_equal_those_of_a_forward_pass")
def test_a_cache_in_float8_changes_log_probabilities_little(latent_model):
    engines = [engine_of(latent_model(initializer_range=0.1), kv_cache=kind) for kind in ("auto", "fp8")]
    request = Request(PROMPT, replace(SAMPLING, temperature=0))
    (exact,), (rounded,) = (list(engine.generate(*trees, [request])) for engine, trees in engines)
    np.testing.assert_allclose(exact.model_log_probs, rounded.model_log_probs, atol=0.05)
    assert (exact.model_log_probs != rounded.model_log_probs).any()
