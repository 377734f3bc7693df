"""Answers of drafted steps have the model's distribution: chi-square tests against all texts of three tokens.

`JAXGLUE_DRAFT_DISTRIBUTIONS=FILE pytest -m slow tests/generation/test_draft_distributions.py` writes the p values.
"""

import json
import os
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_scripts import scripts  # noqa: F401 - a fixture of all tests here
from selection import repeats_parts_of, thorough

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.drafts import Drafting
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from tests.generation.test_drafts import EXPERTS, HYBRID, Falling, made

V, LENGTH, PROMPT = 5, 3, (1, 3, 0, 2)
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "grammar": {"temperature": 1.2},
}


def chosen(log_probs, before, name):
    """The probabilities of the next token, from the model's log-probabilities and the tokens before it."""
    sampling, logits = SETTINGS[name], log_probs.astype(np.float64)
    if name == "penalties":
        counts = np.bincount(before, minlength=V) if before else np.zeros(V)
        logits -= sampling["frequency_penalty"] * counts + sampling["presence_penalty"] * (counts > 0)
    logits = logits / sampling["temperature"]
    if name == "grammar":
        grammar = Falling()
        assert grammar.take(list(before)) == len(before)
        logits = np.where(grammar.mask()[0] >> np.arange(V) & 1, logits, -np.inf)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    if name == "top_p":
        order = np.argsort(-p)
        kept = order[: np.searchsorted(np.cumsum(p[order]), sampling["top_p"]) + 1]
        p = np.where(np.isin(np.arange(V), kept), p, 0)
    return p / p.sum()


def expected(model, trees, name):
    """The probability of each text, by log-probabilities that the model gives for every beginning."""
    beginnings = [text for length in range(LENGTH) for text in product(range(V), repeat=length)]
    one = SamplingConfig(max_tokens=1, temperature=0)
    asked = [Request([*PROMPT, *text], one, top_log_probs=V) for text in beginnings]
    following = {}
    for each in Engine(*model, dtype=jnp.float32).generate(*trees, asked):
        tokens, log_probs = (part[0] for part in each.top)
        following[beginnings[each.number]] = log_probs[np.argsort(tokens)]
    found = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*text, token): p * q
            for text, p in found.items()
            if p
            for token, q in enumerate(chosen(following[text], list(text), name))
        }
    return found


def p_value(counts, probabilities, samples):
    """Pearson's test, in which rare texts are counted together."""
    from scipy.stats import chi2  # takes a second

    pairs = np.array([(counts.get(text, 0), p * samples) for text, p in probabilities.items()])
    assert sum(counts.values()) == pairs[:, 0].sum() == samples
    rare = pairs[:, 1] < 5
    pairs = np.vstack([pairs[~rare], pairs[rare].sum(0)]) if rare.any() else pairs
    pairs = pairs[pairs[:, 1] > 0]
    statistic = ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum()
    return float(chi2.sf(statistic, len(pairs) - 1))


def check(name, family, samples, tiny_model):
    """Assert that drafted answers have the model's distribution; return the test's values."""
    model, trees, head, drafted = made(family, tiny_model, vocab_size=V, num_hidden_layers=2)
    grammar = Falling() if name == "grammar" else None
    sampling = SamplingConfig(max_tokens=LENGTH, seed=5, **{"top_p": 1.0, **SETTINGS[name]})
    engine, counts = Engine(*model, dtype=jnp.float32, drafting=Drafting(head, 2)), {}
    for done in engine.generate(*drafted, [Request(PROMPT, sampling, n=samples, grammar=grammar)], slots=512):
        counts[tuple(done.tokens.tolist())] = counts.get(tuple(done.tokens.tolist()), 0) + 1
    probabilities = expected(model, trees, name)
    assert p_value({(0,) * LENGTH: samples}, probabilities | {(0,) * LENGTH: 0.01}, samples) < 1e-6
    found, drafts = p_value(counts, probabilities, samples), engine.drafts
    print(f"{family['model_type']}, {name}: p = {found:.3f}, {drafts}")
    assert found > 0.01 and 0 < drafts.accepted < drafts.made
    values = {"setting": name, "model": family["model_type"], "samples": samples, "p": round(found, 3)}
    return values | {"texts": len(counts), "drafts": drafts.made, "accepted": round(drafts.accepted / drafts.made, 3)}


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    """Let windows have no more steps than answers have tokens."""
    monkeypatch.setattr("jaxglue.generation.engine.STEPS", LENGTH)


@repeats_parts_of("test_answers_are_those_without_drafts")
@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_answers_have_the_models_distribution(name, tiny_model):
    check(name, EXPERTS, 1000, tiny_model)


@thorough("generation/test_drafts.py")
@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_thousand_answers_have_the_models_distribution(name, tiny_model):
    from measure import write_results

    values = check(name, HYBRID if name in ("top_p", "grammar") else EXPERTS, 20_000, tiny_model)
    if named := os.environ.get("JAXGLUE_DRAFT_DISTRIBUTIONS"):
        file = Path(named)
        before = json.loads(file.read_text())["results"] if file.exists() else []
        write_results(file, [*(each for each in before if each["setting"] != name), values])
