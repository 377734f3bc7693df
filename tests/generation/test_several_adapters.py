"""Answers of several adapters on one base at a time equal those of each alone."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat

from jaxglue.generation import inputs, programs, scheduler
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.drafts import HEAD, Drafting, LoadedHead
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.loading import add_adapter
from jaxglue.hf.several import add_adapters
from jaxglue.models.draft import build_draft
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.serve.config import ServeConfig

FAMILIES = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": {
        **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
}
CONFIGS = {
    "wide": LoraConfig(rank=4, alpha=16, targets=("all-linear",), exclude=("v_proj",), rank_pattern=("o_proj=6",)),
    "narrow": LoraConfig(rank=2, alpha=6, rslora=True, targets=("q_proj", "v_proj"), layers=(1,)),
}
SAMPLED = SamplingConfig(temperature=0.8, top_p=1.0, max_tokens=12, seed=3)


def written(model, config: LoraConfig, folder, seed: int):
    """Write a random adapter of a model, and return its folder."""
    model = nnx.clone(model)
    add_lora(model, config, rngs=nnx.Rngs(seed))
    tensors = flatten_names(split_model(model, nnx.LoRAParam)[1])
    rng = np.random.default_rng(seed)
    random = {name: 0.25 * rng.standard_normal(tensor.shape).astype(np.float32) for name, tensor in tensors.items()}
    save_adapter(folder, random, config, "base")
    return folder


def engine_of(model, **options):
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    return Engine(graphdefs, model.config, dtype=jnp.float32, **options), trees


def answers_of(model, requests, drafts=0, **options):
    engine, trees = engine_of(model)
    if drafts:
        graphdef, state = nnx.split(build_draft(model.config, dtype=jnp.float32, rngs=nnx.Rngs(1)))
        head = LoadedHead(Drafting(graphdef, drafts), {HEAD: nnx.to_pure_dict(state)})
        (engine, _), trees = engine_of(model, drafting=head.drafting), head.beside(trees)
    return {(c.number, c.answer): c for c in engine.generate(*trees, requests, **options)}


@pytest.mark.parametrize(
    ("family", "piece", "drafts"),
    [
        ("llama", None, 0),
        repeat("qwen3_moe", None, 0),
        repeat("qwen3_5_text", None, 0),
        repeat("llama", 128, 0),
        repeat("llama", None, 2),
        repeat("qwen3_5_text", None, 2),
    ],
)
def test_answers_equal_those_of_each_adapter_alone(tiny_model, tmp_path, monkeypatch, family, piece, drafts):
    for module in (inputs, programs, scheduler) if piece else ():
        monkeypatch.setattr(module, "PREFILL_TOKENS", piece)
    model = tiny_model(family, initializer_range=0.2, num_hidden_layers=2, **FAMILIES[family])
    configs = dict(CONFIGS)
    if family == "qwen3_moe":
        configs["narrow"] = replace(configs["narrow"], layers=(), targets=("q_proj", "down_proj"))
    if family == "qwen3_5_text":
        configs["narrow"] = replace(configs["narrow"], layers=(), targets=("up_proj", "v_proj"))
    folders = {name: written(model, config, tmp_path / name, i) for i, (name, config) in enumerate(configs.items())}
    together = nnx.clone(model)
    ranks = add_adapters(together, folders, {"model_type": model.config.model_type}, "base")
    ranks["base"] = np.zeros_like(ranks["wide"])
    prompt = np.random.default_rng(0).integers(0, 97, 150).tolist()  # two pages, which only equal ranks may share
    named = [(name, text, n) for text, n in ((prompt, 1), (prompt[:9], 2)) for name in ("wide", "narrow", "base")]
    named.append(("narrow", prompt[:140], 1))
    requests = [Request(text, SAMPLED, i, n, ranks=ranks[name]) for i, (name, text, n) in enumerate(named)]
    found = answers_of(together, requests, drafts, slots=4, whole=family == "llama")
    for name in ranks:
        alone = nnx.clone(model)
        if name != "base":
            add_adapter(alone, folders[name], {"model_type": model.config.model_type})
        own = [(number, replace(requests[number], ranks=None)) for number, (n, *_) in enumerate(named) if n == name]
        wanted = answers_of(alone, [request for _, request in own])
        for (index, answer), completion in wanted.items():
            ours = found[own[index][0], answer]
            assert ours.tokens.tolist() == completion.tokens.tolist(), name
            np.testing.assert_allclose(ours.model_log_probs, completion.model_log_probs, atol=2e-5)
    texts = {tuple(found[number, 0].tokens.tolist()) for number in range(3)}
    assert len(texts) == 3, "the adapters change nothing"


def test_adapters_that_are_more_than_sums_are_refused(tiny_model, tmp_path):
    model = tiny_model("llama")
    plain = LoraConfig(rank=2, targets=("q_proj",))
    base = {"model_type": "llama"}
    first = written(model, plain, tmp_path / "first", 0)
    dora = written(model, replace(plain, dora=True), tmp_path / "dora", 1)
    head = written(model, replace(plain, targets=("q_proj", "lm_head")), tmp_path / "head", 2)
    for folder, reason in ((dora, r"magnitudes \(DoRA\)"), (head, "an adapter on lm_head")):
        with pytest.raises(ValueError, match=f"{folder} has {reason}, which is not served beside others"):
            add_adapters(nnx.clone(model), {"first": first, "second": folder}, base, "base")


@pytest.fixture
def two(folders, base, adapted, tmp_path):
    """A configuration with two named adapters, whose B differ."""
    tensors = flatten_names(adapted[1])
    other = {name: -tensor if name.endswith("lora_B") else tensor for name, tensor in tensors.items()}
    save_adapter(tmp_path / "other", other, LoraConfig(rank=4, alpha=16), folders[0])
    return f"first={folders[1]}", f"other={tmp_path / 'other'}"


def test_a_request_names_its_adapter(folders, two):
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    from local_client import TestClient

    from jaxglue.serve.server import make_app
    from jaxglue.serve.service import Service

    greedy = SamplingConfig(temperature=0.0, top_p=1.0, max_tokens=8)
    config = ServeConfig(model=folders[0], adapters=two, name="plain", sampling=greedy)
    assistant = Assistant(config)
    service = Service(assistant, slots=4, length=64, most=8)
    client = TestClient(make_app(assistant, service, config))
    try:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["plain", "first", "other"]
        texts = {}
        for name in names:
            body = {"model": name, "prompt": "Once upon", "max_tokens": 8}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["text"]
        assert len(set(texts.values())) == 3
        for name, adapter in (("plain", None), ("first", folders[1])):
            alone = Assistant(ServeConfig(model=folders[0], adapter=adapter))
            assert texts[name] == "".join(alone.answer(alone.tokenizer.encode("Once upon"), greedy))
        refused = client.post("/v1/completions", json={"model": "third", "prompt": "Once upon"})
        assert refused.status_code == 404 and "use one of plain, first, other" in refused.json()["error"]["message"]
    finally:
        service.close()


def test_malformed_names_of_adapters_are_refused(folders, two):
    for options, message in [
        ({"adapters": ("first",)}, "expected NAME=FOLDER with a name of its own, got 'first'"),
        ({"adapters": (two[0], two[0])}, "expected NAME=FOLDER with a name of its own"),
        ({"adapters": ("x=/nowhere",)}, "no such folder: /nowhere"),
        ({"adapters": two, "adapter": folders[1]}, "--adapter is the one of all requests"),
        ({"adapters": two, "name": "other"}, "other is the base's name"),
    ]:
        with pytest.raises(ValueError, match=message):
            ServeConfig(model=folders[0], **options)
