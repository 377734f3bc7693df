"""Drafts: answers with them are those without, token by token, whatever decides a token."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.drafts import Drafting, DraftPrograms, accepted, why_no_drafts
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.models.draft import build_draft
from jaxglue.models.parameters import split_model

HYBRID = {
    **{"model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.7, "repetition_penalty": 1.2},
}


def requests():
    """Prompts of several lengths with settings of several kinds, one of which has two answers."""
    rng = np.random.default_rng(0)
    for index, (length, settings) in enumerate(zip((1, 2, 5, 40), SETTINGS.values(), strict=True)):
        sampling = SamplingConfig(max_tokens=30 + index, seed=3, **settings)
        prompt = rng.integers(0, 6, length).tolist()
        yield Request(prompt, sampling, index, n=1 + (index == 2), logit_bias={4: 0.5} if index == 1 else {})


def answers(engine, trees, **options):
    """Return tokens and log-probabilities of all answers."""
    done = engine.generate(*trees, list(requests()), stop=(5,), **options)
    return {(each.number, each.answer): (each.tokens, each.log_probs, each.finish) for each in done}


@pytest.mark.parametrize(
    ("family", "drafts", "whole"), [(HYBRID, 2, False), repeat(HYBRID, 1, True), repeat(EXPERTS, 3, False)]
)
def test_answers_are_those_without_drafts(family, drafts, whole, tiny_model):
    fields = {**family, "vocab_size": 6, "num_hidden_layers": 2, "initializer_range": 0.3}
    model = tiny_model(fields.pop("model_type"), **fields)
    head = build_draft(model.config, dtype=jnp.float32, rngs=nnx.Rngs(1))
    graphdef, state = nnx.split(head)
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    expected = answers(Engine(graphdefs, model.config, dtype=jnp.float32), (trainable, frozen), slots=3)
    engine = Engine(graphdefs, model.config, dtype=jnp.float32, drafting=Drafting(graphdef, drafts))
    trees = {**trainable, "draft": {}}, {**frozen, "draft": nnx.to_pure_dict(state)}
    found = answers(engine, trees, slots=3, whole=whole)
    assert found.keys() == expected.keys()
    for name, (tokens, log_probs, finish) in expected.items():
        np.testing.assert_array_equal(found[name][0], tokens)
        np.testing.assert_allclose(found[name][1], log_probs, rtol=0, atol=1e-4)
        assert found[name][2] == finish
    assert 0 < engine.drafts.accepted < engine.drafts.made


def test_steps_that_ran_have_their_drafts_counted():
    steps = np.array([[3, 1], [4, -1], [-1, -1], [2, -1], [-1, -1], [-1, -1]])
    assert accepted(steps, 3, -1) == (6, 1)


def test_models_with_windows_are_decoded_a_token_a_step(tiny_model):
    assert why_no_drafts(tiny_model("mistral", sliding_window=8).config) == "layers with windows"
    assert why_no_drafts(tiny_model("qwen3").config) is None


@pytest.mark.parametrize("family", [HYBRID, repeat(EXPERTS)])
def test_accepted_drafts_save_steps(family, tiny_model, monkeypatch):
    fields = {**family, "num_hidden_layers": 2, "initializer_range": 0.3}
    model = tiny_model(fields.pop("model_type"), **fields)
    graphdef, state = nnx.split(build_draft(model.config, dtype=jnp.float32, rngs=nnx.Rngs(1)))
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    asked = [Request([3, 1, 4], SamplingConfig(max_tokens=40, temperature=1.0))]
    (expected,) = Engine(graphdefs, model.config, dtype=jnp.float32).generate(trainable, frozen, asked)
    text = jnp.asarray([3, 1, 4, *expected.tokens])

    def propose(self, weights, slots, last, place, cache):
        """Draft what comes, but for every fifth token."""
        at = last[:, None] + 1 + jnp.arange(self.count)
        right = text[jnp.minimum(at, len(text) - 1)]
        return jnp.where(at % 5 == 0, (right + 1) % model.config.vocab_size, right), cache

    monkeypatch.setattr(DraftPrograms, "propose", propose)
    engine = Engine(graphdefs, model.config, dtype=jnp.float32, drafting=Drafting(graphdef, 3))
    trees = {**trainable, "draft": {}}, {**frozen, "draft": nnx.to_pure_dict(state)}
    (found,) = engine.generate(*trees, asked)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    steps = engine.drafts.made // 3
    assert engine.drafts.accepted == 40 - steps and steps <= 20
