from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats

from jaxglue.generation.cache import plan_cache
from jaxglue.generation.config import GREEDY, SamplingConfig
from jaxglue.generation.generator import Generator, Request
from jaxglue.generation.programs import sample_token
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments

CASES = {
    "qwen3_window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "llama_tied": {"tie_word_embeddings": True},
}
PROMPT = [5, 3, 60, 17, 17, 2, 90, 41]


def generator_of(model, lora: bool):
    if lora:
        add_lora(model, LoraConfig(rank=2, alpha=8), rngs=nnx.Rngs(1))
        for layer in model.layers:
            b = layer.self_attn.q_proj.lora_B
            b[...] = jax.random.normal(jax.random.key(2), b.shape)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    return Generator(graphdefs, model.config, dtype=jnp.float32), trees


def likeliest_next(model, tokens):
    """Return every token's most likely successor, from one uncached forward pass."""
    tokens = np.array(tokens, np.int32)[None]
    segments = pack_segments([[tokens.shape[1]]], seq_len=tokens.shape[1])
    return jax.jit(lambda: model(tokens, segments)[0].argmax(-1))().tolist()


@pytest.fixture
def llama(tiny_model):
    model = tiny_model("llama")
    return generator_of(model, lora=False), model


@pytest.mark.parametrize("lora", [repeat(False), True])
@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_full_forward_passes(tiny_model, case, lora):
    model = tiny_model(case.split("_")[0], **CASES[case])
    generator, trees = generator_of(model, lora)
    tokens = list(islice(generator.stream(*trees, PROMPT, GREEDY), 10))
    assert tokens == likeliest_next(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert len(set(tokens)) > 3, "repetition would hide a mistake in the positions"


def test_cache_grows_across_its_smallest_bucket(llama):
    (generator, trees), model = llama
    prompt = list(np.random.default_rng(0).integers(0, 97, 126))
    tokens = list(generator.stream(*trees, prompt, SamplingConfig(temperature=0, max_tokens=5)))
    assert tokens == likeliest_next(model, prompt + tokens)[125:-1]


PARTS = {
    "gemma2": {"sliding_window": 70, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "phi3": {"num_key_value_heads": 2},
    "ministral3": {"rope_parameters": {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5}},
}


@pytest.mark.parametrize("model_type", PARTS)
def test_parts_of_families_decode_beyond_a_page(tiny_model, model_type):
    model = tiny_model(model_type, **PARTS[model_type])
    generator, trees = generator_of(model, lora=False)
    prompt = list(np.random.default_rng(0).integers(0, 97, 61))
    tokens = list(generator.stream(*trees, prompt, SamplingConfig(temperature=0, max_tokens=8)))
    assert tokens == likeliest_next(model, prompt + tokens)[60:-1]


def test_texts_end_where_longrope_would_turn_them_otherwise(tiny_model):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_model("phi3", head_dim=8, original_max_position_embeddings=12, rope_scaling={"type": "su", **factors})
    generator, trees = generator_of(model, lora=False)
    assert len(PROMPT) + len(list(generator.stream(*trees, PROMPT, GREEDY))) == 12


def test_stops_at_stop_tokens_and_at_both_limits(tiny_model):
    generator, trees = generator_of(tiny_model("llama", max_position_embeddings=12), lora=False)
    tokens = list(generator.stream(*trees, PROMPT, GREEDY))
    assert len(PROMPT) + len(tokens) == 12
    assert list(generator.stream(*trees, PROMPT, GREEDY, stop={tokens[2]})) == tokens[: tokens.index(tokens[2])]
    assert list(generator.stream(*trees, PROMPT, SamplingConfig(temperature=0, max_tokens=2))) == tokens[:2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 has 0 tokens"),
        ([1] * 2048, "1 to 2,047"),
        ([1, 97], "token id 97, but the model's .* has 97"),
    ],
)
def test_unfit_prompts_are_refused(llama, prompt, message):
    (generator, trees), _ = llama
    with pytest.raises(ValueError, match=message):
        next(generator.stream(*trees, prompt, GREEDY))


def test_sampling_is_seeded(llama):
    (generator, trees), _ = llama
    drawn = [
        list(generator.stream(*trees, PROMPT, SamplingConfig(max_tokens=12, temperature=1.5, top_p=1.0, seed=seed)))
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_second_prompt_of_the_same_bucket_compiles_nothing(llama):
    (generator, trees), _ = llama
    sampling = SamplingConfig(temperature=0, max_tokens=3)
    list(generator.stream(*trees, PROMPT, sampling))
    before = generator.compilations()
    list(generator.stream(*trees, PROMPT * 3, sampling))
    assert generator.compilations() == before


LENGTHS = [3, 62, 9, 1, 33]
"""Of prompts, in a cache of pages of 64 tokens."""


def requests_of(temperature: float, **options) -> list[Request]:
    rng = np.random.default_rng(3)
    sampling = [SamplingConfig(temperature=temperature, max_tokens=4 + 5 * (i % 3), **options) for i in range(5)]
    return [Request(rng.integers(0, 97, n).tolist(), sampling[i], i) for i, n in enumerate(LENGTHS)]


def one_by_one(generator, trees, requests, plan, stop=()):
    return {i: next(generator.answers(*trees, [r], stop, plan=plan))[1] for i, r in enumerate(requests)}


FAMILIES = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 20},
}


@pytest.mark.parametrize("family", repeats(FAMILIES, "llama", "qwen3_moe"))
def test_batched_greedy_answers_equal_those_one_by_one(tiny_model, family):
    generator, trees = generator_of(tiny_model(family, initializer_range=0.3, **FAMILIES[family]), lora=True)
    requests = requests_of(0.0)
    plan = generator.plan(requests, batch_size=2)  # fewer slots than requests: freed ones are filled again
    answers = dict(generator.answers(*trees, requests, plan=plan, whole=True))
    assert answers == one_by_one(generator, trees, requests, plan)
    assert len({tuple(answer[:4]) for answer in answers.values()}) > 3


def test_sampled_answers_depend_on_neither_neighbors_nor_order(llama):
    (generator, trees), _ = llama
    requests = requests_of(1.5, seed=4)
    answers = dict(generator.answers(*trees, requests, plan=generator.plan(requests, 2)))
    backwards = dict(generator.answers(*trees, requests[::-1], plan=generator.plan(requests, 3)))
    assert answers == {4 - number: answer for number, answer in backwards.items()}
    last = requests[2]
    assert answers[2] == list(generator.stream(*trees, last.prompt, last.sampling, index=2))
    assert answers[2] != list(generator.stream(*trees, last.prompt, last.sampling, index=3))


def test_batched_answers_end_at_stop_tokens_and_limits(tiny_model):
    generator, trees = generator_of(tiny_model("llama", max_position_embeddings=65), lora=False)
    requests = requests_of(0.0)
    plan = generator.plan(requests, 2)
    answers = dict(generator.answers(*trees, requests, plan=plan))
    assert len(answers[1]) == 3 and len(answers[2]) == 14
    stop = {answers[2][2], answers[4][0]}
    stopped = dict(generator.answers(*trees, requests, stop, plan=plan))
    cut = {i: next((answer[:j] for j, t in enumerate(answer) if t in stop), answer) for i, answer in answers.items()}
    assert stopped == cut and stopped[4] == []


def test_requests_wait_for_pages(llama):
    (generator, trees), _ = llama
    requests = requests_of(0.0)
    plan = generator.plan(requests, 2)
    answers = dict(generator.answers(*trees, requests, plan=plan))
    assert answers == dict(generator.answers(*trees, requests, plan=replace(plan, pages=2)))
    with pytest.raises(ValueError, match=r"needs .* GiB of cache, but 0\.0 GiB of memory are free"):
        plan_cache([100], generator.config, jnp.float32, free=1e4)


def test_samples_follow_nucleus_probabilities():
    probabilities = np.array([0.05, 0.5, 0.15, 0.3], np.float32)
    keys = jax.random.split(jax.random.key(0), 2000)

    def frequencies(temperature, top_p):
        draw = jax.vmap(lambda key: sample_token(jnp.log(probabilities), key, temperature, top_p))
        return np.bincount(draw(keys), minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0, 1.0), probabilities, atol=0.04)
    np.testing.assert_allclose(frequencies(1.0, 0.7), [0, 0.5 / 0.8, 0, 0.3 / 0.8], atol=0.04)
    np.testing.assert_allclose(frequencies(1.0, 0.01), [0, 1, 0, 0])
    flat = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    np.testing.assert_allclose(frequencies(2.0, 1.0), flat, atol=0.04)


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.1)])
def test_invalid_sampling_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected .*, got {value}"):
        SamplingConfig(**{field: value})


@pytest.mark.parametrize("whole", [False, True])
def test_logits_that_are_not_finite_are_refused(llama, whole):
    (generator, (trainable, frozen)), _ = llama
    frozen = {**frozen, "norm": jax.tree.map(lambda weight: weight * jnp.nan, frozen["norm"])}
    with pytest.raises(ValueError, match="logits are not finite"):
        list(generator.answers(trainable, frozen, [Request(PROMPT, GREEDY)], whole=whole))
