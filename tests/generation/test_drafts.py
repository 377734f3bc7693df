"""Drafts: answers with them are those without, token by token, whatever decides a token."""

from dataclasses import dataclass, replace
from itertools import cycle

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.draft_rule import DraftChoice, DraftRule, StepBytes
from jaxglue.generation.drafts import Drafting, DraftPrograms, LoadedHead, accepted, why_no_drafts, words_of
from jaxglue.generation.engine import Engine
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.programs import EnginePrograms
from jaxglue.generation.scheduler import Request
from jaxglue.hf.draft import frequent_tokens, read_draft_tokens, write_draft_tokens
from jaxglue.models.draft import build_draft
from jaxglue.models.parameters import split_model

HYBRID = {
    **{"model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"first_k_dense_replace": 0, "num_hidden_layers": 1}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 1}
WINDOWS = {"model_type": "mistral", "sliding_window": 16}
LATENT = {
    **{"model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
MAMBA = {
    **{"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
    **{"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
    **{"shared_intermediate_size": 32, "num_local_experts": 0},
}
CONVOLUTIONS = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.7, "repetition_penalty": 1.2},
}


MADE: dict[str, tuple] = {}


def made(family, tiny_model, **fields):
    """A small model's modules and parameters, without a head and with a drawn one; made once."""
    fields = {"num_hidden_layers": 2, "initializer_range": 0.3, **family, **fields}
    if (key := repr(fields)) not in MADE:
        model = tiny_model(fields.pop("model_type"), **fields)
        graphdef, state = nnx.split(build_draft(model.config, dtype=jnp.float32, rngs=nnx.Rngs(1)))
        graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
        drafted = {**trainable, "draft": {}}, {**frozen, "draft": nnx.to_pure_dict(state)}
        MADE[key] = (graphdefs, model.config), (trainable, frozen), graphdef, drafted
    return MADE[key]


ENGINES: dict[tuple, Engine] = {}


def engine_of(model, head=None, drafts=0, **options):
    """An engine of a model of `made`, whose programs serve several tests, with a head for so many drafts."""
    key = id(model), drafts, *options
    if key not in ENGINES:
        drafting = Drafting(head, drafts, **options) if drafts else None
        ENGINES[key] = Engine(*model, dtype=jnp.float32, drafting=drafting)
    return ENGINES[key]


def requests(kinds=tuple(SETTINGS)):
    """Prompts of several lengths with settings of several kinds, one of which has two answers."""
    rng = np.random.default_rng(0)
    for index, (length, kind) in enumerate(zip((1, 2, 5, 40), cycle(kinds), strict=False)):
        sampling = SamplingConfig(max_tokens=30 + index, seed=3, **{"top_p": 1.0} | SETTINGS[kind])
        prompt = rng.integers(0, 6, length).tolist()
        biased = index == 1 and kinds == tuple(SETTINGS)
        yield Request(prompt, sampling, index, n=1 + (index == 2), logit_bias={4: 0.5} if biased else {})


PLAIN = "greedy", "drawn"
"""Kinds whose settings change no probabilities: their programs are small."""


def answers(engine, trees, asked, **options):
    """Return tokens and log-probabilities of all answers."""
    done = engine.generate(*trees, list(asked), stop=(5,), **options)
    return {(each.number, each.answer): (each.tokens, each.log_probs, each.finish) for each in done}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, (tokens, log_probs, finish) in expected.items():
        np.testing.assert_array_equal(found[name][0], tokens)
        np.testing.assert_allclose(found[name][1], log_probs, rtol=0, atol=1e-4)
        assert found[name][2] == finish


@pytest.mark.parametrize(
    ("family", "drafts", "whole"),
    [
        (HYBRID, 2, False),
        repeat(HYBRID, 1, True),
        repeat(EXPERTS, 3, False),
        repeat(WINDOWS, 2, False),
        repeat(LATENT, 2, False),
        repeat(MAMBA, 2, False),
        repeat(CONVOLUTIONS, 2, False),
    ],
)
def test_answers_are_those_without_drafts(family, drafts, whole, tiny_model):
    model, trees, head, drafted = made(family, tiny_model, vocab_size=6)
    expected = answers(engine_of(model), trees, requests(), slots=3)
    engine = engine_of(model, head, drafts)
    check_equal(answers(engine, drafted, requests(), slots=3, whole=whole), expected)
    assert 0 < engine.drafts.accepted < engine.drafts.made


@repeats_parts_of("test_answers_are_those_without_drafts")
@pytest.mark.parametrize("words", [[2], repeat([0, 1, 2, 3, 4, 5])])
def test_drafts_among_frequent_words_change_no_answer(words, tiny_model):
    model, trees, head, drafted = made(EXPERTS, tiny_model, vocab_size=6)
    expected = answers(engine_of(model), trees, requests(PLAIN), slots=3)
    weights = {"draft": drafted[1]["draft"], "draft_words": words_of(model[0], trees, words)}
    loaded = LoadedHead(Drafting(head, 2), weights)
    engine = Engine(*model, dtype=jnp.float32, drafting=loaded.drafting)
    check_equal(answers(engine, loaded.beside(trees), requests(PLAIN), slots=3), expected)
    assert 0 < engine.drafts.accepted < engine.drafts.made
    if len(words) == model[1].vocab_size:
        whole = Engine(*model, dtype=jnp.float32, drafting=Drafting(head, 2))
        answers(whole, drafted, requests(PLAIN), slots=3)
        assert whole.drafts.accepted == engine.drafts.accepted


def test_frequent_words_are_those_of_the_texts_and_then_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxglue.hf.draft.MOST_TOKENS", 4)
    tokens = frequent_tokens(np.array([0, 3, 0, 0, 0, 9, 0, 1, 0]))
    assert tokens == [0, 1, 5, 7] and frequent_tokens(np.ones(8, int)) is None
    write_draft_tokens(tmp_path, tokens)
    assert read_draft_tokens(tmp_path, None, 9) == tokens
    with pytest.raises(ValueError, match=r"draft_tokens.json: expected rising `tokens` below 7: delete it"):
        read_draft_tokens(tmp_path, None, 7)


class Alternating(DraftRule):
    """A rule that has its own way."""

    turns = 2, 0

    def choose(self, *_):
        self.turn = (getattr(self, "turn", -1) + 1) % len(self.turns)
        return DraftChoice(self.turns[self.turn], "by turns")


@pytest.mark.parametrize(
    ("family", "turns"), [(DENSE, (2, 0)), repeat(HYBRID, (2, 0, 1, 3)), repeat(MAMBA, (2, 0, 1, 3))]
)
def test_the_number_of_drafts_may_change_with_each_window(family, turns, tiny_model, monkeypatch):
    model, trees, head, drafted = made(family, tiny_model, vocab_size=6)
    asked = [replace(each, sampling=replace(each.sampling, max_tokens=70)) for each in requests(PLAIN)]
    expected = answers(engine_of(model), trees, asked, slots=3)
    monkeypatch.setattr("jaxglue.generation.engine.DraftRule", Alternating)
    monkeypatch.setattr(Alternating, "turns", turns)
    engine = engine_of(model, head, max(turns), auto=True)
    check_equal(answers(engine, drafted, asked, slots=3), expected)
    assert 0 < engine.drafts.accepted < engine.drafts.made


def check_read(engine, trees):
    """Compare the head's keys of a decoded text with those of the same text as a prompt."""
    prompt, sampling = [1, 3, 0, 2], SamplingConfig(max_tokens=60, temperature=1.0, top_p=1.0)
    plan = engine.plan([Request(prompt, replace(sampling, max_tokens=80))])

    def keys(prompt, sampling):
        """Return the text behind a prompt, and the head's keys of its tokens."""
        request, pages = Request(prompt, sampling), []
        batch = engine.open(*trees, plan, ProgramKind.of([request], ()), whole=False)
        batch.add([sequence := engine.answer(request, 0)], ())
        while batch.is_busy:
            list(batch.advance())
            pages = [*sequence.pages] or pages  # it gives them back at its end
        batch.close()
        stored = np.asarray(batch._caches[-1].keys)[pages].swapaxes(1, 2)
        return [*prompt, *sequence.new], stored.reshape(-1, *stored.shape[2:])

    text, decoded = keys(prompt, sampling)
    _, whole = keys(text, SamplingConfig(max_tokens=9))
    known = len(text) - 2 - engine.window_tokens  # what ends within a window is not read there
    assert len(decoded) >= known and np.abs(whole[:known]).min(axis=(1, 2)).all()
    np.testing.assert_allclose(decoded[:known], whole[:known], atol=1e-5)


@repeats_parts_of("test_the_number_of_drafts_may_change_with_each_window")
@pytest.mark.parametrize("family", [DENSE, repeat(HYBRID)])
@pytest.mark.parametrize("turns", [(2, 0), repeat((0,)), repeat((2,))])
def test_a_head_has_read_what_it_reads_of_a_whole_text(family, turns, tiny_model, monkeypatch):
    model, _, head, drafted = made(family, tiny_model, vocab_size=6)
    monkeypatch.setattr("jaxglue.generation.engine.DraftRule", Alternating)
    monkeypatch.setattr(Alternating, "turns", turns)
    engine = engine_of(model, head, 2, auto=True)
    check_read(engine, drafted)


@repeats_parts_of("test_the_last_of_many_answers_are_decoded_by_a_smaller_program")
def test_windows_of_all_drafts_are_compiled_once(tiny_model, monkeypatch):
    model, _, head, drafted = made(DENSE, tiny_model, vocab_size=6)
    sampling, sizes = SamplingConfig(max_tokens=70, temperature=1.0, top_p=1.0), list[tuple[int, int]]()
    asked = [Request([1, 2, 3], replace(sampling, max_tokens=length)) for length in (40, *[70] * 3)]
    compile_window = EnginePrograms.compile_window

    def noted(self, *arguments, size, **options):
        sizes.append((size, options["drafts"]))
        return compile_window(self, *arguments, size=size, **options)

    monkeypatch.setattr(EnginePrograms, "compile_window", noted)
    monkeypatch.setattr("jaxglue.generation.window_sizes._SMALLEST_SIZE", 2)
    monkeypatch.setattr("jaxglue.generation.engine.DraftRule", Alternating)
    monkeypatch.setattr(Alternating, "turns", (1, 0))
    engine = Engine(*model, dtype=jnp.float32, drafting=Drafting(head, 1, auto=True))
    for _ in range(2):
        answers(engine, drafted, asked, whole=True)
    assert sizes and len(set(sizes)) == len(sizes)


@dataclass
class Falling:
    """A grammar whose tokens never rise but after a zero."""

    last: int = 4

    def start(self):
        return Falling()

    def mask(self):
        allowed = range(5) if not self.last else range(self.last + 1)
        return np.array([sum(1 << token for token in allowed)], np.uint32)

    def take(self, tokens):
        for index, token in enumerate(tokens):
            if not self.mask()[0] >> token & 1:
                return index
            self.last = token
        return len(tokens)

    is_complete = is_over = False


@repeats_parts_of("test_answers_are_those_without_drafts")
@pytest.mark.parametrize("family", [DENSE, repeat(HYBRID)])
def test_answers_by_a_grammar_are_drafted(family, tiny_model):
    model, trees, head, drafted = made(family, tiny_model, vocab_size=6)
    asked = [replace(each, grammar=Falling() if each.index % 2 else None) for each in requests(PLAIN)]
    engine = engine_of(model, head, 2)
    found = answers(engine, drafted, asked, slots=3)
    for (number, _), (tokens, _, _) in found.items():
        assert not asked[number].grammar or Falling().take(tokens.tolist()) == len(tokens) == 30 + number
    free = answers(engine_of(model), trees, [asked[0], asked[2]], slots=3)
    np.testing.assert_array_equal(found[0, 0][0], free[0, 0][0])
    assert engine.drafts.accepted


@repeats_parts_of("test_answers_are_those_without_drafts")
def test_a_text_that_goes_on_is_drafted(tiny_model):
    model, trees, head, drafted = made(DENSE, tiny_model, vocab_size=6)
    first = np.random.default_rng(2).integers(0, 5, 130).tolist()
    sampling = SamplingConfig(max_tokens=20, temperature=1.0, top_p=1.0)
    found = []
    for engine, weights in (
        (engine_of(model), trees),
        (engine_of(model, head, 2), drafted),
    ):
        batch = engine.open(
            *weights,
            engine.plan([Request([*first, *first], sampling)]),
            ProgramKind.of([Request(first)], ()),
            whole=False,
        )
        texts, before = [], None
        for suffix in ([], [1, 2, 3], [4] * 70, [3]):
            prompt = [*(first if before is None else [*before.request.prompt, *before.new]), *suffix]
            sequence = engine.answer(Request(prompt[:250], sampling, holds=True, after=before), 0)
            batch.add([sequence], ())
            while batch.is_busy:
                list(batch.advance())
            texts, before = [*texts, sequence.new], sequence
        found.append(texts)
        batch.close()
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 4


def test_steps_that_ran_have_their_drafts_counted():
    steps = np.array([[3, 1], [4, -1], [-1, -1], [2, -1], [-1, -1], [-1, -1]])
    assert accepted(steps, 3, -1).tolist() == [[2, 1], [1, 0], [0, 0]]


def test_models_without_attention_alone_have_no_drafts(tiny_model):
    assert "no layer" in (why_no_drafts(tiny_model("falcon_h1").config) or "")
    assert why_no_drafts(tiny_model("qwen3").config) is None


STEP = StepBytes(weights=18e9, experts=0, chosen=1, head=0.5e9, vocabulary=2e9, token=32e3, states=25e6)


def test_drafts_follow_acceptance_and_streams():
    def settled(share, streams):
        """Return the choice after windows in which drafts were accepted with a probability."""
        rule = DraftRule(STEP, 3)
        for _ in range(50):
            drafts = rule.choose(streams, 500).drafts
            rule.note((100 * share ** np.arange(drafts + 1)).astype(int))
        return rule.choose(streams, 500)

    assert settled(0.9, 1).drafts == 3 > settled(0.3, 1).drafts
    assert settled(0.05, 1).drafts == 0 and "none" in settled(0.05, 1).reason
    by_streams = [settled(0.7, streams).drafts for streams in (1, 16, 256, 4096)]
    assert by_streams == sorted(by_streams, reverse=True) and by_streams[1] > by_streams[2] == 0


def test_times_of_windows_stand_for_their_bytes():
    rule = DraftRule(STEP, 2)
    assert rule.choose(1, 500).drafts
    assert not rule.choose(1, 500, {0: 1.0, 1: 2.0, 2: 3.0}.get).drafts
    assert rule.choose(512, 500, {0: 1.0, 2: 1.1}.get).drafts == 2
    assert rule.choose(512, 500, {2: 1.1}.get) == rule.choose(512, 500)


def test_drafts_are_tried_again_after_a_text_on_which_they_failed():
    rule = DraftRule(STEP, 2)
    rule.note(np.array([1000, 0, 0]))
    assert not rule.choose(1, 500).drafts
    windows = 0
    while not rule.choose(1, 500).drafts:
        rule.note(np.array([8]))
        windows += 1
    assert 20 < windows < 500


@repeats_parts_of("test_answers_are_those_without_drafts")
@pytest.mark.parametrize("family", [DENSE, repeat(HYBRID)])
def test_accepted_drafts_save_steps(family, tiny_model, monkeypatch):
    model, trees, head, drafted = made(family, tiny_model)
    asked = [Request([3, 1, 4], SamplingConfig(max_tokens=40, temperature=1.0, top_p=1.0))]
    (expected,) = engine_of(model).generate(*trees, asked)
    text = jnp.asarray([3, 1, 4, *expected.tokens])

    def propose(self, weights, slots, last, place, cache, count, ranks):
        """Draft what comes, but for every fifth token."""
        at = last[:, None] + 1 + jnp.arange(count)
        right = text[jnp.minimum(at, len(text) - 1)]
        return jnp.where(at % 5 == 0, (right + 1) % model[1].vocab_size, right), cache

    monkeypatch.setattr(DraftPrograms, "propose", propose)
    engine = Engine(*model, dtype=jnp.float32, drafting=Drafting(head, 3))
    (found,) = engine.generate(*drafted, asked)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    steps = engine.drafts.made // 3
    assert engine.drafts.accepted == 40 - steps and steps <= 20
