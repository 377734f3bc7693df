"""Greedy answers of families whose parts write caches and states in ways of their own, beside transformers'."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import split_model
from tests.models.test_family_goldens import GOLDENS, read_golden, write_folder

ANSWERS = json.loads((GOLDENS / "answers.json").read_text())
"""By goldens/make_answers.py."""


@pytest.mark.parametrize("name", repeats(ANSWERS, *(ANSWERS.keys() - {"lfm3", "nemotron_h"})))
def test_greedy_answers_are_those_of_transformers(name, tmp_path):
    raw, golden = read_golden(name)
    model = load_model(write_folder(tmp_path, raw), dtype=jnp.float32)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine, sampling = Engine(graphdefs, model.config, dtype=jnp.float32), SamplingConfig(temperature=0, max_tokens=12)
    prompts = np.split(golden["tokens"], np.cumsum(golden["lengths"])[:-1])
    requests = [Request(prompt.tolist(), sampling, index) for index, prompt in enumerate(prompts)]
    answers = {completion.number: completion.tokens.tolist() for completion in engine.generate(*trees, requests)}
    assert [answers[index] for index in range(len(prompts))] == ANSWERS[name]
