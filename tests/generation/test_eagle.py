"""Drafts by EAGLE-3 heads: answers are those without, and the head reads what it reads of a whole text."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeat, repeats_parts_of

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.drafts import Drafting, LoadedHead
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.hf.eagle import load_eagle, new_shape, open_eagle
from jaxglue.models.eagle import EagleHead
from jaxglue.models.parameters import split_model
from tests.eagle_folders import write_head
from tests.generation.test_drafts import Alternating, answers, check_equal, check_read, requests
from tests.models.test_eagle import WORDS, drawn_model  # noqa: F401 - a fixture
from tests.models.test_family_goldens import GOLDENS

DENSE = {"model_type": "qwen3", "rope_theta": 100.0}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"model_type": "mistral", "sliding_window": 16}
MADE: dict[str, tuple] = {}


def made(family, tiny_model):
    """A small model's modules and parameters, and a drawn head for it; made once."""
    if (key := json.dumps(family)) not in MADE:
        fields = {**family, "vocab_size": 6, "initializer_range": 0.3}
        model = tiny_model(fields.pop("model_type"), **fields)
        shape = new_shape({"rope_theta": 500.0}, model.config)
        shape = replace(shape, layer=replace(shape.layer, initializer_range=0.3))
        graphdef, state = nnx.split(EagleHead(shape, dtype=jnp.float32, rngs=nnx.Rngs(1)))
        matrix = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
        words = {"matrix": jnp.asarray(matrix), "tokens": jnp.asarray([0, 1, 3, 4])}
        weights = {"draft": nnx.to_pure_dict(state), "draft_words": words}
        graphdefs, *trees = split_model(model, nnx.LoRAParam)
        MADE[key] = (graphdefs, model.config), trees, LoadedHead(Drafting(graphdef, 2, eagle=shape), weights)
    return MADE[key]


@pytest.mark.parametrize(
    ("family", "drafts", "whole"),
    [(DENSE, 2, False), repeat(DENSE, 1, True), repeat(EXPERTS, 3, False), repeat(WINDOWS, 2, False)],
)
def test_answers_are_those_without_drafts(family, drafts, whole, tiny_model):
    model, trees, loaded = made(family, tiny_model)
    expected = answers(Engine(*model, dtype=jnp.float32), trees, requests(), slots=3)
    engine = Engine(*model, dtype=jnp.float32, drafting=replace(loaded.drafting, most=drafts))
    check_equal(answers(engine, loaded.beside(trees), requests(), slots=3, whole=whole), expected)
    assert 0 < engine.drafts.accepted < engine.drafts.made


@repeats_parts_of("test_three_drafts_in_a_row_are_those_of_the_definition")
@pytest.mark.parametrize("turns", [(2, 0), repeat((0,)), repeat((2,))])
def test_a_head_has_read_what_it_reads_of_a_whole_text(turns, tiny_model, monkeypatch):
    model, trees, loaded = made(DENSE, tiny_model)
    monkeypatch.setattr("jaxglue.generation.engine.DraftRule", Alternating)
    monkeypatch.setattr(Alternating, "turns", turns)
    engine = Engine(*model, dtype=jnp.float32, drafting=replace(loaded.drafting, auto=True))
    check_read(engine, loaded.beside(trees))


def test_three_drafts_in_a_row_are_those_of_the_definition(drawn_model, tmp_path):  # noqa: F811 - a fixture
    folder, model = drawn_model
    write_head(tmp_path / "head", folder, model.config, WORDS)
    head, matrix, tokens = load_eagle(found := open_eagle(tmp_path / "head", folder, model.config), jnp.float32)
    graphdef, state = nnx.split(head)
    words = {"matrix": matrix, "tokens": jnp.asarray(tokens)}
    weights = {"draft": nnx.to_pure_dict(state), "draft_words": words}
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    loaded, proposed = LoadedHead(Drafting(graphdef, 3, eagle=found.shape), weights), []
    engine = Engine(graphdefs, model.config, dtype=jnp.float32, drafting=loaded.drafting)
    propose = engine._programs._propose

    def noted(*arguments, **options):
        proposed.append(propose(*arguments, **options))
        return proposed[-1]

    engine._programs._propose = noted
    golden, first = load_file(GOLDENS / "drafts/eagle.safetensors"), 11 + 1 + 5  # documents before the last
    document, row = golden["tokens"][first:].tolist(), first - 2 - 1  # which has a row less for each of them
    for length in (2, 3, 9, 19):
        proposed.clear()
        asked = [Request(document[:length], SamplingConfig(max_tokens=4))]
        list(engine.generate(*loaded.beside(trees), asked, whole=False))
        at = row + length - 2
        drafts = [golden["fed.1.after"][at], golden["fed.2.after"][at], WORDS[golden["logits.2.after"][at].argmax()]]
        assert proposed[0][0][0].tolist() == [document[length - 1], *drafts]
