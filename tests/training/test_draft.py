"""Runs that train the folder's draft head, beside the model or after it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats_parts_of

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.hf.draft import load_draft
from jaxglue.hf.loading import load_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models.decoder import packed_context
from jaxglue.models.parameters import split_model
from jaxglue.serve.answers import generate
from jaxglue.serve.config import GenerateConfig
from jaxglue.training.draft import DraftSteps, drafted_batch
from jaxglue.training.setup import resolve
from jaxglue.training.train import train
from tests.draft_folders import add_draft
from tests.models.test_draft import packed_batch
from tests.training.test_linear_attention import HYBRID

LONG = SamplingConfig(max_tokens=24, temperature=0.8)


@pytest.fixture
def with_draft(model_folder, request):
    """Build a TrainConfig as `make_config` for a folder with weights and a drafts' head."""
    path = model_folder / "config.json"
    alike = {"layer_types": ["full_attention"] * 2}  # one type compiles once
    path.write_text(json.dumps(json.loads(path.read_text()) | HYBRID | alike))
    make = request.getfixturevalue("with_weights")
    return make, add_draft(model_folder)


def losses(folder, name="loss"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_a_head_learns_beside_the_model_which_sees_none_of_it(with_draft, model_folder, tmp_path):
    make, published = with_draft
    train(make(steps=6, output=tmp_path / "plain"))
    summary = train(make(steps=6, train_draft="with", output=tmp_path / "run"))
    assert summary.drafts["trained"]["sampled"] > summary.drafts["folder's"]["sampled"]
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    drafts = losses(tmp_path / "run", "draft_loss")
    assert len(drafts) == 6 and drafts[-1] < 0.9 * drafts[0]
    adapters = (load_file(tmp_path / run / "adapter/adapter_model.safetensors") for run in ("plain", "run"))
    first, second = adapters
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name], err_msg=name)
    trained = load_file(tmp_path / "run/adapter/draft.safetensors")
    assert trained.keys() == published.keys()
    linears = {name for name, tensor in published.items() if tensor.ndim == 2}
    for name, tensor in published.items():
        assert np.array_equal(trained[name], tensor) == (name not in linears), name
    export_adapter(tmp_path / "run/adapter", model_folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, tensor in trained.items():
        np.testing.assert_array_equal(merged[name], tensor, err_msg=name)


@repeats_parts_of("test_answers_are_those_without_drafts")
def test_a_trained_head_changes_no_answer(with_draft, model_folder, tmp_path):
    make, _ = with_draft
    train(make(steps=6, train_draft="with", output=tmp_path / "run"))
    asked = {"model": str(model_folder), "adapter": tmp_path / "run/adapter", "prompt": ("Hello",), "sampling": LONG}
    told = [["".join(answer) for _, answer in generate(GenerateConfig(**asked, drafts=drafts))] for drafts in (0, 2)]
    assert told[0] == told[1]


def test_a_head_learns_the_models_own_distribution(with_draft, model_folder):
    make, _ = with_draft
    run = resolve(make(steps=1, train_draft="with"))
    model, head = load_model(model_folder, dtype=jnp.float32), load_draft(model_folder, run.model, dtype=jnp.float32)
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    batch = packed_batch(np.random.default_rng(0).integers(0, 50, 24), [(3, 12, 9)])
    drafted = drafted_batch(batch)

    @jax.jit
    def forward():
        x, context = model.embed_tokens(batch.tokens, jnp.float32), packed_context(run.model, batch.segments)
        for layer in model.layers:
            x = layer(x, context)
        states = head(model.embed_tokens(drafted.tokens, jnp.float32), model.norm(x), context)
        return x, *(jax.nn.log_softmax(h @ model.output_weight.T)[0] for h in (model.norm(x), states))

    x, *log_probs = forward()
    steps = DraftSteps(run, graphdefs)
    steps.begin(steps.first())
    steps.observe(trainable, frozen, x, batch)
    _, values = steps.finish(0)
    rows = np.flatnonzero(drafted.loss_weights[0])
    p, q = map(np.asarray, log_probs)
    expected = [(np.exp(p[row + 1]) * (p[row + 1] - q[row])).sum() for row in rows]
    assert len(rows) == 1 + 10 + 7 and np.std(expected) > 0
    np.testing.assert_allclose(values["draft_loss"], np.mean(expected), rtol=1e-4)


@repeats_parts_of("test_a_head_learns_beside_the_model_which_sees_none_of_it")
def test_a_head_learns_after_the_model_with_all_its_weights(with_draft, tmp_path, capsys):
    make, published = with_draft
    train(make(steps=6, train_draft="after", draft_method="full", learning_rate=1e-3, output=tmp_path / "run"))
    trained = load_file(tmp_path / "run/adapter/draft.safetensors")
    assert not any(np.array_equal(trained[name], tensor) for name, tensor in published.items())
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())  # boxes break lines
    assert "draft head, step 6 of 6" in shown and "accepted by the trained head" in shown


@repeats_parts_of("test_a_head_learns_beside_the_model_which_sees_none_of_it")
def test_a_model_trained_whole_on_several_sources_has_the_trained_head(with_draft, tmp_path, write_jsonl, chat_rows):
    make, published = with_draft
    sources = (write_jsonl(chat_rows(9)), write_jsonl(chat_rows(9, seed=1), "more.jsonl"))
    options = {"method": "full", "learning_rate": 1e-3, "train_draft": "with", "output": tmp_path / "run"}
    train(make(steps=3, data=sources, **options))
    tensors = load_file(tmp_path / "run/model/model.safetensors")
    assert not any(np.array_equal(tensors[name], tensor) for name, tensor in published.items())


@repeats_parts_of("test_a_head_learns_beside_the_model_which_sees_none_of_it")
def test_a_resumed_run_ends_with_the_head_of_one_without_a_stop(with_draft, tmp_path, monkeypatch):
    make, _ = with_draft
    options = {"train_draft": "with", "gradient_accumulation_steps": 2, "save_every": 2}
    train(make(steps=4, **options, output=tmp_path / "whole"))
    stopped = make(steps=4, **options, output=tmp_path / "run")

    def stop(*_):
        raise KeyError("stopped")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="stopped"):
        patch.setattr("jaxglue.training.loop._finish", stop)
        train(stopped)
    train(make(steps=4, **options, output=tmp_path / "run", resume=True))
    whole, resumed = (load_file(tmp_path / run / "adapter/draft.safetensors") for run in ("whole", "run"))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(tensor, resumed[name], err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "dpo"}, "is for --objective sft, not dpo"),
        ({"embeddings": "host"}, "the draft head reads the embedding"),
    ],
)
def test_settings_that_do_not_go_with_a_head_are_refused(changes, message, with_weights, write_jsonl):
    if "objective" in changes:
        changes = {
            **changes,
            "data": (write_jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4, "pairs.jsonl"),),
        }
    with pytest.raises(ValueError, match=message):
        train(with_weights(train_draft="with", **changes))


EVEN = "def even(completion_ids):\n    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)\n"


@pytest.fixture
def answering(with_draft, write_jsonl, tmp_path):
    """Build a TrainConfig of a run on answers."""
    (tmp_path / "rewards.py").write_text(EVEN)
    rows = [{"question": f"What is {a} plus {b}?"} for a in range(3) for b in range(2)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 128, "objective": "grpo", "steps": 2}
    settings |= {"reward": (f"{tmp_path / 'rewards.py'}:even",), "num_generations": 4, "generation_batch_size": 8}
    settings |= {"max_completion_length": 24}
    return lambda drafts: with_draft[0](**settings, drafts=drafts, output=tmp_path / drafts)


@repeats_parts_of("test_a_head_learns_beside_the_model_which_sees_none_of_it")
def test_answers_in_training_are_drafted(answering, tmp_path, monkeypatch):
    engines = list[Engine]()
    monkeypatch.setattr(
        "jaxglue.training.rollout_policy.Engine",
        lambda *args, **options: engines.append(Engine(*args, **options)) or engines[-1],
    )
    train(answering("2"))
    shares = losses(tmp_path / "2", "drafts/accepted")
    assert len(shares) == 2 and all(0 <= share < 1 for share in shares)
    assert max(losses(tmp_path / "2", "sampling/sampling_logp_difference/mean")) < 1e-5
    (engine,) = engines
    assert 0 < engine.drafts.accepted < engine.drafts.made


@repeats_parts_of("test_a_head_learns_beside_the_model_which_sees_none_of_it")
def test_answers_in_training_are_those_without_drafts(answering, tmp_path):
    for drafts in ("off", "2"):
        train(answering(drafts))
    first, second = ((tmp_path / run / "rollouts.jsonl").read_text().splitlines() for run in ("off", "2"))
    assert len(first) == 16
    for one, other in zip(map(json.loads, first), map(json.loads, second), strict=True):
        assert one["answer"] == other["answer"]
    np.testing.assert_allclose(losses(tmp_path / "off"), losses(tmp_path / "2"), atol=1e-5)
    assert not losses(tmp_path / "off", "drafts/accepted")


def test_drafts_of_answers_need_a_head(with_weights, write_jsonl):
    rows = write_jsonl([{"question": "What?", "answer": "4"}] * 4, "prompts.jsonl")
    settings = {"objective": "grpo", "reward": ("exact",), "num_generations": 2, "generation_batch_size": 4}
    settings |= {"max_completion_length": 8}
    with pytest.raises(ValueError, match=r"has no draft head here: .* or name a head of jaxglue draft with --draft-"):
        train(with_weights(data=(rows,), drafts="2", **settings))
