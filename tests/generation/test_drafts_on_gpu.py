"""Greedy answers of drafted steps are those without drafts on a GPU, whose kernels and programs are others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.drafts import HEAD, Drafting, LoadedHead
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.hf.several import add_adapters
from jaxglue.models.draft import build_draft
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from tests.generation.test_drafts import HYBRID, WINDOWS, Alternating, check_equal
from tests.generation.test_several_adapters import written

pytestmark = pytest.mark.gpu


def check_greedy(model, counts, ranks=(None,), **drafting):
    """Assert that answers with each of some numbers of drafts, a part of them right, are those without."""
    rng, sampling = np.random.default_rng(0), SamplingConfig(max_tokens=24, temperature=0)
    asked = [Request(rng.integers(0, 6, n).tolist(), sampling, ranks=own) for n in (1, 5, 70) for own in ranks]
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    graphdef, state = nnx.split(build_draft(model.config, dtype=jnp.float32, rngs=nnx.Rngs(1)))
    texts = dict[int, dict]()
    for drafts in (0, *counts):
        head = LoadedHead(Drafting(graphdef, drafts, **drafting), {HEAD: nnx.to_pure_dict(state)}) if drafts else None
        with jax.default_matmul_precision("highest"):
            engine = Engine(graphdefs, model.config, dtype=jnp.float32, drafting=head and head.drafting)
            done = list(engine.generate(*(head.beside(trees) if head else trees), asked))
        texts[drafts] = {each.number: (each.tokens, each.log_probs, each.finish) for each in done}
        check_equal(texts[drafts], texts[0])
        assert not drafts or 0 < engine.drafts.accepted < engine.drafts.made


def tiny(tiny_model, family, **fields):
    fields = {**family, "num_hidden_layers": 2, "initializer_range": 0.3, "vocab_size": 6, **fields}
    return tiny_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize(
    ("family", "counts"), [(HYBRID, (1, 2, 3)), (WINDOWS, (2,))], ids=["recurrent states", "windows"]
)
def test_greedy_answers_are_those_without_drafts(family, counts, tiny_model):
    check_greedy(tiny(tiny_model, family), counts)


def test_answers_are_those_without_where_the_number_of_drafts_changes(tiny_model, monkeypatch):
    monkeypatch.setattr("jaxglue.generation.engine.DraftRule", Alternating)
    monkeypatch.setattr(Alternating, "turns", (2, 0, 1))
    check_greedy(tiny(tiny_model, HYBRID), (2,), auto=True)


def test_greedy_answers_of_two_adapters_are_those_without_drafts(tiny_model, tmp_path):
    model = tiny(tiny_model, HYBRID)
    targets = {"wide": ("all-linear",), "narrow": ("up_proj", "v_proj")}
    folders = {
        name: written(model, LoraConfig(rank=4, alpha=16, targets=own), tmp_path / name, seed)
        for seed, (name, own) in enumerate(targets.items())
    }
    ranks = add_adapters(model, folders, {"model_type": model.config.model_type}, "base")
    check_greedy(model, (2,), [ranks["wide"], ranks["narrow"]])
