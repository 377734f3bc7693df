import threading
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats, repeats_parts_of

from jaxglue.generation import engine as engine_module
from jaxglue.generation import programs
from jaxglue.generation.config import GREEDY, SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.pages import PREFILL_TOKENS, make_caches, plan_cache
from jaxglue.generation.programs import CacheCopies
from jaxglue.generation.prompt_programs import PromptPrograms
from jaxglue.generation.sampling import Features
from jaxglue.generation.scheduler import Request
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments

CASES = {
    "qwen3_window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "llama_tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
}
PROMPT = [5, 3, 60, 17, 17, 2, 90, 41]


def engine_of(model, lora: bool, **options):
    if lora:
        add_lora(model, LoraConfig(rank=2, alpha=8), rngs=nnx.Rngs(1))
        for layer in model.layers:
            b = layer.self_attn.q_proj.lora_B
            b[...] = jax.random.normal(jax.random.key(2), b.shape)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    return Engine(graphdefs, model.config, dtype=jnp.float32, **options), trees


@pytest.fixture(scope="module")
def tiny_model(tiny_model):
    """Build a small model of as many layers as most have kinds."""
    return lambda *args, **changes: tiny_model(*args, **{"num_hidden_layers": 2, **changes})


def likeliest_next(model, *texts):
    """Return the most likely successors of every token of a text, or of each text, from one uncached forward pass."""
    lengths = [len(text) for text in texts]
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    segments = pack_segments([[length] for length in lengths], seq_len=max(lengths))
    likeliest = jax.jit(lambda: model(tokens, segments).argmax(-1))().tolist()
    found = [row[:length] for row, length in zip(likeliest, lengths, strict=True)]
    return found if len(found) > 1 else found[0]


@pytest.fixture(scope="module")
def llama(tiny_model):
    """An engine, whose programs serve several tests, and its weights; the model."""
    model = tiny_model("llama")
    return engine_of(model, lora=False), model


@pytest.mark.parametrize("lora", [repeat(False), True])
@pytest.mark.parametrize("case", repeats(CASES, "qwen3_window"))
def test_greedy_decoding_equals_full_forward_passes(tiny_model, case, lora):
    model = tiny_model(case.split("_")[0], **CASES[case])
    engine, trees = engine_of(model, lora)
    tokens = list(islice(engine.stream(*trees, PROMPT, GREEDY), 10))
    assert tokens == likeliest_next(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert len(set(tokens)) > 3, "repetition would hide a mistake in the positions"


def test_cache_grows_across_its_smallest_bucket(llama):
    (engine, trees), model = llama
    prompt = list(np.random.default_rng(0).integers(0, 97, 126))
    tokens = list(engine.stream(*trees, prompt, SamplingConfig(temperature=0, max_tokens=5)))
    assert tokens == likeliest_next(model, prompt + tokens)[125:-1]


PARTS = {
    "gemma2": {"sliding_window": 70, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "gemma4_text": {
        **{"num_hidden_layers": 3, "global_head_dim": 24, "num_kv_shared_layers": 1, "sliding_window": 5},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "phi3": {"num_key_value_heads": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "mistral": {"sliding_window": 5},
    "granite": {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "olmo3": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "ministral3": {"rope_parameters": {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5}},
    "qwen3_5_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PARTS["qwen3_5_moe_text"] = {**PARTS["qwen3_5_text"], **EXPERTS, "shared_expert_intermediate_size": 16}


@pytest.mark.parametrize(
    "model_type",
    repeats(PARTS, *(name for name in PARTS if name not in ("gemma2", "gemma4_text"))),
)
def test_parts_of_families_decode_beyond_a_page(tiny_model, model_type):
    model = tiny_model(model_type, **PARTS[model_type])
    engine, trees = engine_of(model, lora=False)
    prompt = list(np.random.default_rng(0).integers(0, 97, 61))
    tokens = list(engine.stream(*trees, prompt, SamplingConfig(temperature=0, max_tokens=8)))
    assert tokens == likeliest_next(model, prompt + tokens)[60:-1]


@repeats_parts_of("test_answers_are_the_likeliest_that_a_grammar_takes")
def test_states_belong_to_answers_and_not_to_slots(tiny_model):
    """More answers than slots: some share a prompt, some begin with their first token."""
    model = tiny_model("qwen3_5_text", **PARTS["qwen3_5_text"])
    engine, trees = engine_of(model, lora=False)
    rng = np.random.default_rng(1)
    prompts = [list(rng.integers(0, 97, length)) for length in (9, 1, 70, 1, 2)]
    requests = [Request(prompt, replace(GREEDY, max_tokens=6 + 3 * i), n=2 - i % 2) for i, prompt in enumerate(prompts)]
    answers = list(engine.generate(*trees, requests, slots=3))
    assert len(answers) == 8
    texts = [prompts[answer.number] + answer.tokens.tolist() for answer in answers]
    for answer, text, likeliest in zip(answers, texts, likeliest_next(model, *texts), strict=True):
        start = len(prompts[answer.number])
        assert text[start:] == likeliest[start - 1 : -1]


def test_texts_end_where_longrope_would_turn_them_otherwise(tiny_model):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_model("phi3", head_dim=8, original_max_position_embeddings=12, rope_scaling={"type": "su", **factors})
    engine, trees = engine_of(model, lora=False)
    assert len(PROMPT) + len(list(engine.stream(*trees, PROMPT, GREEDY))) == 12


def test_a_stream_that_is_left_waits_for_its_windows_under_way(llama, monkeypatch):
    """At the end of a process, computations under way would abort it."""
    (engine, trees), _ = llama
    awaited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: awaited.extend(jax.tree.leaves(tree)))
    stream, kept = (engine.stream(*trees, PROMPT, replace(GREEDY, max_tokens=60)) for _ in range(2))
    next(stream)
    stream.close()
    assert awaited
    awaited.clear()
    next(kept)
    engine_module._wait_at_exit()
    assert awaited


def test_stops_at_stop_tokens_and_at_both_limits(tiny_model):
    engine, trees = engine_of(tiny_model("llama", max_position_embeddings=12), lora=False)
    tokens = list(engine.stream(*trees, PROMPT, GREEDY))
    assert len(PROMPT) + len(tokens) == 12
    assert list(engine.stream(*trees, PROMPT, GREEDY, stop={tokens[2]})) == tokens[: tokens.index(tokens[2])]
    assert list(engine.stream(*trees, PROMPT, SamplingConfig(temperature=0, max_tokens=2))) == tokens[:2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 has 0 tokens"),
        ([1] * 2048, "1 to 2,047"),
        ([1, 97], "token id 97, but the model's .* has 97"),
    ],
)
def test_unfit_prompts_are_refused(llama, prompt, message):
    (engine, trees), _ = llama
    with pytest.raises(ValueError, match=message):
        next(engine.stream(*trees, prompt, GREEDY))


def test_sampling_is_seeded(llama):
    (engine, trees), _ = llama
    drawn = [
        list(engine.stream(*trees, PROMPT, SamplingConfig(max_tokens=12, temperature=1.5, top_p=1.0, seed=seed)))
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_second_prompt_of_the_same_bucket_compiles_nothing(tiny_model):
    engine, trees = engine_of(tiny_model("llama"), lora=False)
    sampling = SamplingConfig(temperature=0, max_tokens=3)
    list(engine.stream(*trees, PROMPT, sampling))
    before = engine.compilations()
    list(engine.stream(*trees, PROMPT * 3, sampling))
    assert engine.compilations() == before


LENGTHS = [3, 62, 9, 1, 33]
"""Of prompts, in a cache of pages of 64 tokens."""


def requests_of(temperature: float, **options) -> list[Request]:
    rng = np.random.default_rng(3)
    sampling = [SamplingConfig(temperature=temperature, max_tokens=4 + 5 * (i % 3), **options) for i in range(5)]
    return [Request(rng.integers(0, 97, n).tolist(), sampling[i], i) for i, n in enumerate(LENGTHS)]


def answers_of(engine, trees, requests, stop=(), **options) -> dict[int, list[int]]:
    """Return the only answer to each request, without stop tokens."""
    found = engine.generate(*trees, requests, stop, **options)
    return {c.number: [token for token in c.tokens.tolist() if token not in stop] for c in found}


def one_by_one(engine, trees, requests, plan):
    return {i: answers_of(engine, trees, [r], plan=plan)[0] for i, r in enumerate(requests)}


FAMILIES = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": 20},
}


@pytest.mark.parametrize("family", repeats(FAMILIES, "llama", "qwen3", "qwen3_moe"))
def test_batched_greedy_answers_equal_those_one_by_one(tiny_model, family):
    engine, trees = engine_of(tiny_model(family, initializer_range=0.3, **FAMILIES[family]), lora=True)
    requests = requests_of(0.0)
    plan = engine.plan(requests, slots=2)  # fewer slots than requests: freed ones are filled again
    answers = answers_of(engine, trees, requests, plan=plan, whole=True)
    assert answers == one_by_one(engine, trees, requests, plan)
    assert len({tuple(answer[:4]) for answer in answers.values()}) > 3


def test_sampled_answers_depend_on_neither_neighbors_nor_order(llama):
    (engine, trees), _ = llama
    requests = requests_of(1.5, seed=4)
    answers = answers_of(engine, trees, requests, slots=2)
    backwards = answers_of(engine, trees, requests[::-1], slots=3)
    assert answers == {4 - number: answer for number, answer in backwards.items()}
    last = requests[2]
    assert answers[2] == list(engine.stream(*trees, last.prompt, last.sampling, index=2))
    assert answers[2] != list(engine.stream(*trees, last.prompt, last.sampling, index=3))


def test_batched_answers_end_at_stop_tokens_and_limits(tiny_model):
    engine, trees = engine_of(tiny_model("llama", max_position_embeddings=65), lora=False)
    requests = requests_of(0.0)
    answers = answers_of(engine, trees, requests, slots=2)
    assert len(answers[1]) == 3 and len(answers[2]) == 14
    stop = {answers[2][2], answers[4][0]}
    stopped = answers_of(engine, trees, requests, stop, slots=2)
    cut = {i: next((answer[:j] for j, t in enumerate(answer) if t in stop), answer) for i, answer in answers.items()}
    assert stopped == cut and stopped[4] == []


def test_requests_wait_for_pages(llama):
    (engine, trees), _ = llama
    requests = requests_of(0.0)
    plan = engine.plan(requests, slots=2)
    answers = answers_of(engine, trees, requests, plan=plan)
    assert answers == answers_of(engine, trees, requests, plan=replace(plan, pages=2))
    with pytest.raises(ValueError, match=r"needs .* GiB of cache, but 0\.0 GiB of memory are free"):
        plan_cache([(50, 100)], engine.config, jnp.float32, free=1e4)


def test_answers_of_one_prompt_need_pages_for_it_once(llama):
    (engine, _), _ = llama
    lengths, options = [(600, 700)] * 32, {"config": engine.config, "dtype": jnp.float32}
    page = plan_cache([(1, 128)], **options).bytes // 3  # two pages and nobody's
    free = 0.9 * page * 200 + 1e7
    alone = plan_cache(lengths, **options, free=free)
    together = plan_cache(lengths, **options, free=free, siblings=8)
    assert together.slots == 32 and alone.slots < 32
    assert together.pages == 32 * (11 - 9) + 4 * 9 + 12  # rounded up to an eighth of a power of two
    with pytest.raises(ValueError, match="lower --max-completion-length"):
        plan_cache([(50, 100)], **options, free=1e4, limit="--max-completion-length")


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.1)])
def test_invalid_sampling_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected .*, got {value}"):
        SamplingConfig(**{field: value})
    with pytest.raises(ValueError, match="stop: every text holds the empty one"):
        SamplingConfig(stop=("a", ""))


@pytest.mark.parametrize("whole", [False, True])
def test_logits_that_are_not_finite_are_refused(llama, whole):
    (engine, (trainable, frozen)), _ = llama
    frozen = {**frozen, "norm": jax.tree.map(lambda weight: weight * jnp.nan, frozen["norm"])}
    with pytest.raises(ValueError, match="logits are not finite"):
        list(engine.generate(trainable, frozen, [Request(PROMPT, GREEDY)], whole=whole))


SAMPLED = SamplingConfig(temperature=1.3, top_p=1.0, max_tokens=20, seed=5)


def test_answers_of_one_prompt_share_pages_and_equal_those_alone(llama):
    (engine, trees), _ = llama
    prompt = list(np.random.default_rng(1).integers(0, 97, 130))  # two full pages, and a part of a third
    requests = [Request(prompt, SAMPLED, 0, n=3), Request(PROMPT, SAMPLED, 1, n=2)]
    together = {(c.number, c.answer): c.tokens.tolist() for c in engine.generate(*trees, requests)}
    plan = engine.plan(requests, slots=1)
    alone = {(c.number, c.answer): c.tokens.tolist() for c in engine.generate(*trees, requests, plan=plan)}
    assert together == alone and len(together) == 5
    assert len({tuple(tokens) for tokens in together.values()}) == 5


def test_states_of_many_answers_are_copied_some_at_a_time(tiny_model, h200, monkeypatch):
    monkeypatch.setattr(programs, "_COPIED", 8192)
    engine, _ = engine_of(tiny_model("qwen3_5_text", **PARTS["qwen3_5_text"]), lora=False)
    plan = plan_cache([(4, 8)] * 64, engine.config, jnp.float32, free=1e9)
    caches = make_caches(plan, engine.config, jnp.float32, jnp.float32)
    caches = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), caches)
    rows = np.random.default_rng(0).permutation(64).reshape(2, 32).astype(np.int32)
    copies = CacheCopies((rows[0],), (rows[1],), tuple(rows))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200), (caches, copies))
    expected = jax.tree.map(lambda x: np.asarray(x.at[rows[1]].set(x[rows[0]])), caches)
    chex.assert_trees_all_equal(engine._programs.copy(caches, copies), expected)
    temporary = engine._programs._copy.lower(*abstract).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.5 * sum(x[rows[0]].nbytes for x in jax.tree.leaves(expected))


@repeats_parts_of("test_requests_wait_for_pages")
@pytest.mark.parametrize("family", [repeat("llama"), "qwen3"])
def test_answers_that_give_their_pages_up_go_on_unchanged(tiny_model, family):
    engine, trees = engine_of(tiny_model(family, **FAMILIES[family]), lora=False)
    sampling = replace(SAMPLED, max_tokens=150, frequency_penalty=0.5, repetition_penalty=1.2)
    requests = [Request(prompt, sampling, i, n=2) for i, prompt in enumerate([PROMPT * 9, PROMPT, PROMPT * 2])]
    plan = engine.plan(requests)
    answers = {(c.number, c.answer): c.tokens.tolist() for c in engine.generate(*trees, requests, plan=plan)}
    few = replace(plan, pages=8)
    assert answers == {(c.number, c.answer): c.tokens.tolist() for c in engine.generate(*trees, requests, plan=few)}


@pytest.mark.parametrize("whole", [False, repeat(True)])
def test_log_probabilities_equal_those_of_a_forward_pass(tiny_model, whole):
    model = tiny_model("qwen3", initializer_range=0.3, **FAMILIES["qwen3"])
    engine, trees = engine_of(model, lora=True)
    sampling = replace(SAMPLED, max_tokens=60)  # crosses a page; the window of attention begins in the one before
    request = Request(PROMPT * 9, sampling, top_log_probs=2)
    (found,) = engine.generate(*trees, [request], whole=whole)
    tokens = np.concatenate([request.prompt, found.tokens])[None].astype(np.int32)
    logits = jax.jit(lambda: model(tokens, pack_segments([[tokens.size]], seq_len=tokens.size)))()
    logits = logits[0, len(request.prompt) - 1 : -1]
    rows, wanted = np.arange(len(logits)), jax.nn.log_softmax(logits)
    np.testing.assert_allclose(found.model_log_probs, wanted[rows, found.tokens], atol=1e-5)
    warm = jax.nn.log_softmax(logits / SAMPLED.temperature)
    np.testing.assert_allclose(found.log_probs, warm[rows, found.tokens], atol=1e-5)
    np.testing.assert_allclose(found.top[1], np.sort(wanted)[:, :-3:-1], atol=1e-5)
    assert found.finish == "length" and len(found.tokens) == 60


def test_penalties_count_the_prompt_and_earlier_windows(llama):
    (engine, trees), _ = llama
    sampling = SamplingConfig(temperature=0, max_tokens=20, repetition_penalty=1e9, frequency_penalty=0.1)
    requests = [Request(PROMPT, sampling, n=2), Request(PROMPT[:3], sampling)]
    for plan in (engine.plan(requests), replace(engine.plan(requests, slots=2), pages=2)):
        for found in engine.generate(*trees, requests, plan=plan):
            text = [*requests[found.number].prompt, *found.tokens.tolist()]
            assert len(set(text)) == len(set(requests[found.number].prompt)) + 20  # nothing is said twice


def test_requests_have_own_stop_tokens_biases_and_ends(llama):
    (engine, trees), _ = llama
    plain = answers_of(engine, trees, [Request(PROMPT, GREEDY)])[0][:12]
    requests = [
        Request(PROMPT, GREEDY, stop={plain[3]}),
        Request(PROMPT, replace(GREEDY, max_tokens=3), logit_bias={11: 1e9}),
        Request(PROMPT, GREEDY),
    ]
    found = {c.number: c for c in engine.generate(*trees, requests, until=lambda number, _, tokens: len(tokens) > 9)}
    assert found[0].tokens.tolist() == plain[: plain.index(plain[3]) + 1] and found[0].finish == "stop"
    assert found[1].tokens.tolist() == [11] * 3 and found[1].finish == "length"
    assert found[2].tokens.tolist()[:10] == plain[:10] and found[2].finish == "until"


@pytest.mark.parametrize("family", repeats(FAMILIES, "llama", "qwen3_moe", "gpt_oss"))
def test_long_prompts_pass_in_pieces(tiny_model, family, monkeypatch):
    model = tiny_model(family, initializer_range=0.3, **FAMILIES[family])
    prompt = np.random.default_rng(2).integers(0, 97, 200).tolist()
    request, answers = Request(prompt, replace(SAMPLED, max_tokens=9)), []
    for piece in (PREFILL_TOKENS, 64):
        monkeypatch.setattr(programs, "PREFILL_TOKENS", piece)
        engine, trees = engine_of(model, lora=False)
        answers.append(answers_of(engine, trees, [request])[0])
    assert answers[0] == answers[1] and len(set(answers[0])) > 3


def test_a_cache_in_float8_changes_log_probabilities_little(tiny_model):
    model = tiny_model("qwen3", initializer_range=0.1)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    request = Request(PROMPT * 9, SamplingConfig(temperature=0, max_tokens=20))
    engines = [Engine(graphdefs, model.config, dtype=jnp.float32, kv_cache=kind) for kind in ("auto", "fp8")]
    (exact,), (rounded,) = (list(engine.generate(*trees, [request])) for engine in engines)
    np.testing.assert_allclose(exact.model_log_probs, rounded.model_log_probs, atol=0.05)
    assert (exact.model_log_probs != rounded.model_log_probs).any()
    plans = [engine.plan([Request(PROMPT, replace(GREEDY, max_tokens=1000))]) for engine in engines]
    assert plans[1].pages == plans[0].pages and plans[1].bytes < 0.6 * plans[0].bytes


def test_the_last_of_many_answers_are_decoded_by_a_smaller_program(tiny_model):
    engine, trees = engine_of(tiny_model("llama"), lora=False)
    requests = [Request(PROMPT, replace(SAMPLED, max_tokens=4 + 30 * (i % 3 == 0)), i) for i in range(16)]
    first = answers_of(engine, trees, requests, whole=True)
    engine.wait()
    sizes = []
    ((windows,),) = (kind.sizes.values() for kind in engine._kinds.values())
    take = windows.take
    windows.take = lambda *settings: sizes.append(take(*settings)) or sizes[-1]
    assert answers_of(engine, trees, requests, whole=True) == first
    assert [size for size, _ in sizes] == [16] + [8] * 4


@pytest.fixture
def compiled_rows(monkeypatch):
    """Threads that had XLA compile programs of prompts' rows, with their names, and sizes whose compilation began."""
    found, sizes, compile_row = [], [], programs.EnginePrograms.compile_prefill
    names = {"jit(_embed_packed)", "jit(_prefill)", "jit(<lambda>)"}

    def noted(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name in names:
            found.append((threading.current_thread().name.partition("_")[0], fun_name))

    def begun(own, place, trees, tokens, *rest):
        sizes.append(tokens.shape[1])
        compile_row(own, place, trees, tokens, *rest)

    monkeypatch.setattr(programs.EnginePrograms, "compile_prefill", begun)
    jax.monitoring.register_event_duration_secs_listener(noted)
    yield found, sizes
    jax.monitoring.unregister_event_duration_listener(noted)


@pytest.mark.parametrize(
    ("family", "options", "prompts", "slots", "wanted"),
    [
        ("llama", {}, [100] * 8, 3, {128, 256, 512}),  # any of the five that wait may begin together
        repeat("qwen3_5_text", {}, [100] * 8, 3, {128, 256, 512}),
        repeat("qwen3_5_text", {}, [100] * 8, 8, {1024}),  # all begin at once
        repeat("llama", {}, [30, 2000, 2100], 1, {128, 2048, 4096}),  # the second and third fill rows of their own
        repeat("llama", {"exact": True}, [100] * 3, 1, {128, 256}),
    ],
)
def test_programs_of_prompts_are_compiled_beside_one_another(
    tiny_model, compiled_rows, family, options, prompts, slots, wanted
):
    """Sizes of rows that prompts can need, each once, by threads, whose programs calls find."""
    model = tiny_model(family, **FAMILIES.get(family, {}), max_position_embeddings=8192)
    engine, trees = engine_of(model, lora=False, **options)
    trees = jax.device_put(trees, jax.local_devices()[0])
    requests = [
        Request([n + 1] * length, replace(SAMPLED, max_tokens=4 + 2 * n), n) for n, length in enumerate(prompts)
    ]
    plan = engine.plan(requests, slots=slots, memory=1e9)
    found, sizes = compiled_rows
    with patch.object(PromptPrograms, "give_up", lambda programs: None):
        first = answers_of(engine, trees, requests, plan=plan, whole=True)
    assert {thread for thread, _ in found} == {"windows"} and sorted(sizes) == sorted(wanted)
    assert answers_of(engine, trees, requests, plan=plan, whole=True) == first
    assert {thread for thread, _ in found} == {"windows"} and sorted(sizes) == sorted(wanted)
    alone, _ = engine_of(model, lora=False, **options)
    assert answers_of(alone, trees, requests, plan=plan, whole=False) == first


@repeats_parts_of("test_programs_of_prompts_are_compiled_beside_one_another")
def test_an_answer_goes_on_in_a_program_that_was_compiled_meanwhile(tiny_model):
    model = tiny_model("qwen3", **FAMILIES["qwen3"])
    engine, trees = engine_of(model, lora=False)
    staying, _ = engine_of(model, lora=False, ahead=True)
    wanted = list(engine.stream(*trees, PROMPT, replace(SAMPLED, max_tokens=60)))
    stream = staying.stream(*trees, PROMPT, replace(SAMPLED, max_tokens=60))
    found = [next(stream)]
    staying.wait()
    before = staying.compilations()
    assert found + list(stream) == wanted and staying.compilations() == before
    assert list(staying.stream(*trees, PROMPT, replace(SAMPLED, max_tokens=30))) == wanted[:30]


def test_answers_that_use_more_than_most_have_programs_of_their_own(llama):
    engine, trees = llama[0]
    some = {"top_k": 3, "repetition_penalty": 3.0}
    settings = [{"max_tokens": 40}, {"max_tokens": 4, **some}, {"max_tokens": 30, **some}]
    requests = [Request(PROMPT, replace(SAMPLED, **each), i) for i, each in enumerate(settings)]
    plan = engine.plan(requests)
    wanted = one_by_one(engine, trees, requests, plan)
    rare = Features(draws=True, top_k=True, penalties=True)
    batch = engine.open(*trees, plan, ProgramKind(Features(draws=True), 8, 8, rare=rare), whole=False)
    choose, used = batch._choose, []
    batch._choose = lambda work: used.append(choose(work)) or used[-1]
    answers = [engine.answers(request, i)[0] for i, request in enumerate(requests)]
    batch.add(answers[:2], ())
    for _ in range(3):
        list(batch.advance())
    batch.add(answers[2:], ())
    while batch.is_busy:
        list(batch.advance())
    assert {answer.number: answer.new for answer in answers} == wanted
    assert [features == rare for features, *_ in used] == [True, False, False] + [True] * 4
    assert wanted[2][:4] != wanted[0][:4], "some should change the answer"


def follow(engine, trees, prompts, **options):
    """Return the batch's greedy answers to prompts, given one after the other, and the tokens that each wrote anew."""
    requests = [Request(prompt, SamplingConfig(temperature=0, max_tokens=70)) for prompt in prompts]
    batch = engine.open(*trees, engine.plan(requests, slots=2), ProgramKind.of(requests, ()), whole=False)
    written, found = [], []
    for name in ("row", "suffixes"):
        run = getattr(batch._prompts, name)
        counted = lambda row, run=run: written.append(sum(len(p.tokens) - p.begin for p in row)) or run(row)  # noqa: E731
        setattr(batch._prompts, name, counted)
    for number, request in enumerate(requests):
        answers = engine.answers(request, number)
        batch.add(answers, ())
        while batch.is_busy:
            list(batch.advance())
        found.append(answers[0].new)
    return found, written


def test_texts_that_begin_alike_share_pages_also_after_they_ended(llama):
    engine, trees = llama[0]
    first, *ends = (np.random.default_rng(seed).integers(0, 97, 150).tolist() for seed in range(3))
    alone = list(engine.stream(*trees, first, SamplingConfig(temperature=0, max_tokens=70)))
    goes_on = first + alone + ends[1][:9]
    prompts = [first, first[:140] + ends[0][:20], first, goes_on, ends[0], first[:70] + ends[1][:70]]
    found, written = follow(engine, trees, prompts)
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer == list(engine.stream(*trees, prompt, SamplingConfig(temperature=0, max_tokens=70)))
    # but for full pages of 64: of the prompt, and of prompt and answer; and not where more than half is new
    assert written == [149, 159 - 128, 149 - 128, len(goes_on) - 1 - 192, 149, 139]


def test_prompts_of_one_call_share_what_they_begin_with(llama):
    engine, trees = llama[0]
    shared, *ends = (np.random.default_rng(seed).integers(0, 97, 130).tolist() for seed in range(3))
    greedy = SamplingConfig(temperature=0, max_tokens=5)
    requests = [Request(shared + end[: 3 + 2 * i], greedy, i, n=2) for i, end in enumerate(ends)]
    together = {(c.number, c.answer): c.tokens.tolist() for c in engine.generate(*trees, requests)}
    for number, request in enumerate(requests):
        assert together[number, 0] == together[number, 1] == list(engine.stream(*trees, request.prompt, greedy))
