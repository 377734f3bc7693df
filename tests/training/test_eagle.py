"""Heads of EAGLE-3's kind learn on the model's own answers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_model import quickstart  # noqa: F401 - a fixture
from flax import nnx
from safetensors.numpy import load_file
from selection import repeats_parts_of

from jaxglue.commands import main
from jaxglue.generation.config import SamplingConfig
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.eagle import load_eagle, new_shape, open_eagle
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.draft import parameter_name
from jaxglue.models.eagle import EagleHead
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.serve.answers import generate
from jaxglue.serve.config import GenerateConfig
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.draft import drafted_batch
from jaxglue.training.draft_config import DraftConfig
from jaxglue.training.draft_steps import draft_states
from jaxglue.training.eagle import EagleTraining, train_head
from jaxglue.training.train import train
from tests.eagle_folders import write_head
from tests.models.test_draft import packed_batch
from tests.models.test_eagle import WORDS, drawn_model, read_states  # noqa: F401 - a fixture
from tests.models.test_family_goldens import GOLDENS
from tests.training.test_draft import EVEN, losses


@pytest.mark.parametrize("block", [256, 4])
def test_drafts_in_a_row_are_those_of_the_definition(block, drawn_model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("jaxglue.training.draft_steps.BLOCK", block)
    folder, model = drawn_model
    golden = load_file(GOLDENS / "drafts/eagle.safetensors")
    write_head(tmp_path / "head", folder, model.config, WORDS)
    head, matrix, _ = load_eagle(found := open_eagle(tmp_path / "head", folder, model.config), jnp.float32)
    tokens = np.pad(golden["tokens"], (0, 3))  # to a multiple of a block
    batch = packed_batch(tokens, [golden["lengths"]])
    followed, fed = batch.loss_weights > 0, np.zeros((3, *batch.tokens.shape), np.int32)
    for step in range(3):
        fed[step][followed] = golden[f"fed.{step}.after"]

    @jax.jit
    def run():
        read, _ = read_states(model, batch, found.shape.taps)
        embedded = [model.embed_tokens(tokens, jnp.float32) for tokens in fed]
        states = draft_states(head, head.combine(read), embedded, found.shape.layer, batch.segments)
        return [each @ matrix.T for each in states]

    for step, logits in enumerate(run()):
        expected = golden[f"logits.{step}.after"]
        np.testing.assert_allclose(np.asarray(logits)[followed], expected, rtol=0, atol=1e-4)


@repeats_parts_of("test_a_head_learns_the_models_own_answers_and_drafts_them")
def test_loss_and_acceptance_are_those_of_the_models_distributions(tiny_model, tmp_path):
    model, words = tiny_model("qwen3", vocab_size=24), [*range(0, 24, 2)]
    graphdefs, adapter, frozen = split_model(model, nnx.LoRAParam)
    assistant = SimpleNamespace(
        graphdefs=graphdefs, adapter=adapter, frozen=frozen, config=model.config, dtype=jnp.float32
    )
    config = DraftConfig(model=Path(), data=(), output=Path(), drafts=2, learning_rate=1e-2)
    training = EagleTraining(assistant, shape := new_shape({}, model.config), words, config, steps=3)
    batch = packed_batch(np.random.default_rng(0).integers(0, 24, 24), [(3, 12, 9)])
    shown = [drafted_batch(batch), drafted_batch(drafted_batch(batch))]
    named, matrix = training.weights()
    head = nnx.eval_shape(lambda: EagleHead(shape, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    state = [
        (path, v.replace(jnp.asarray(named[parameter_name(path)]))) for path, v in nnx.to_flat_state(nnx.state(head))
    ]
    nnx.update(head, nnx.from_flat_state(state))

    @jax.jit
    def run():
        read, x = read_states(model, batch, shape.taps)
        embedded = [model.embed_tokens(each.tokens, jnp.float32) for each in shown]
        states = draft_states(head, head.combine(read), embedded, shape.layer, batch.segments)
        return model.norm(x) @ model.output_weight.T, [each @ matrix.T for each in states]

    p, q = run()
    p, losses, counts, accepted = np.asarray(p[0]), [], [], []
    for step, drafts in enumerate(q):
        rows = np.flatnonzero(shown[step].loss_weights[0])
        among = [row for row in rows if shown[step].targets[0, row] in words]
        sub, own = (np.asarray(jax.nn.log_softmax(each)) for each in (p[:, words], drafts[0]))
        losses.append(sum((np.exp(sub[row + step + 1]) * (sub[row + step + 1] - own[row])).sum() for row in among))
        counts.append(len(among))
        choices = np.asarray(words)[own.argmax(-1)]
        chances = np.asarray(jax.nn.softmax(p))
        accepted.append([np.mean([chances[row + step + 1, choices[row]] for row in rows])])
        accepted[-1].append(np.mean([p[row + step + 1].argmax() == choices[row] for row in rows]))
    assert 0 < counts[1] < counts[0] < 18
    result = training.acceptance([batch])
    np.testing.assert_allclose([*zip(result.sampled, result.greedy, strict=True)], accepted, rtol=1e-4)
    expected = losses[0] / counts[0], (losses[0] + 0.8 * losses[1]) / counts[0]
    np.testing.assert_allclose(training.step([batch, batch]), expected, rtol=1e-4)
    with Checkpoints(tmp_path / "checkpoints", fingerprint={}) as checkpoints:
        assert training.resume(checkpoints) == []
        checkpoints.save(1, training.saved, {"losses": [0.5]})
        after = [training.step([batch]), training.step([batch])]
        assert training.resume(checkpoints) == [0.5]
        assert [training.step([batch]), training.step([batch])] == after  # moments and learning rate, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quickstart):  # noqa: F811 - a fixture
    """A model of chats without a head."""
    folder = tmp_path_factory.mktemp("eagle") / "model"
    raw = json.loads((quickstart / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "initializer_range": 0.3}
    model = random_model(config_from_hf(raw), dtype=jnp.float32, seed=5)
    save_tensors(folder, flatten_names(split_model(model, nnx.Param)[1]))
    (folder / "config.json").write_text(json.dumps(raw))
    for path in set(quickstart.iterdir()) - {quickstart / "config.json"}:
        shutil.copy(path, folder)
    return folder


PROMPTS = "What is 2 and 3?", "Who is 9?"


def told(folder, **settings):
    """Return the model's answers."""
    asked = GenerateConfig(model=folder, prompt=PROMPTS, sampling=SamplingConfig(max_tokens=24), **settings)
    return ["".join(answer) for _, answer in generate(asked)]


def test_a_head_learns_the_models_own_answers_and_drafts_them(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxglue.hf.draft.MOST_TOKENS", 500)
    rows = [{"prompt": f"What is {a} and {b}?", "completion": "Who knows?"} for a in range(4) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = {"model": folder, "data": tmp_path / "rows.jsonl", "max_tokens": 24, "temperature": 0, "seq_len": 128}
    flags |= {"batch_size": 2, "learning_rate": 5e-3, "drafts": 2, "epochs": 10, "output": tmp_path / "head"}
    main(["draft", *(str(word) for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value))])
    lines = capsys.readouterr().out.splitlines()
    means = [float(line.rpartition(" ")[2]) for line in lines if "draft_loss" in line]
    assert "15 texts with 360 tokens of answers; drafts among 500 tokens" in lines
    assert len(means) == 2 and means[1] < means[0] < 1.5  # 2.9 before a step
    (shares,) = (line for line in lines if line.startswith("accepted, greedy: "))
    assert all(float(share.strip(" %")) > 50 for share in shares.partition(": ")[2].split(","))  # 4% before a step
    with pytest.raises(ValueError, match="--drafts off is not for --draft-model"):
        GenerateConfig(model=folder, prompt=PROMPTS, draft_model=tmp_path / "head", drafts="off")


@repeats_parts_of("test_answers_are_those_without_drafts")
def test_a_trained_head_changes_no_answer(folder, tmp_path):
    rows = [{"prompt": prompt, "completion": "Who knows?"} for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = {"model": folder, "data": (str(tmp_path / "rows.jsonl"),), "output": tmp_path / "head"}
    train_head(DraftConfig(**asked, sampling=SamplingConfig(max_tokens=24, temperature=0), seq_len=128), print)
    assert told(folder, draft_model=tmp_path / "head", drafts="2") == told(folder, drafts="off")


def test_rows_that_no_head_learns_from_are_refused(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 3)
    asked = {"model": folder, "data": (str(tmp_path / "rows.jsonl"),), "output": tmp_path / "head"}
    with pytest.raises(ValueError, match="rows of texts have no prompts: use --answers given"):
        train_head(DraftConfig(**asked, seq_len=64), print)
    with pytest.raises(ValueError, match="above the model's limit"):
        train_head(DraftConfig(**asked, seq_len=2**20), print)


@repeats_parts_of("test_a_head_learns_the_models_own_answers_and_drafts_them")
def test_an_interrupted_run_ends_like_a_whole_one(folder, tmp_path, monkeypatch):
    rows = [{"prompt": f"What is {a} and {b}?", "completion": "Who knows?"} for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {"model": folder, "data": (str(tmp_path / "rows.jsonl"),), "sampling": SamplingConfig(max_tokens=12)}
    shared |= {"seq_len": 64, "batch_size": 1, "drafts": 1, "epochs": 3, "save_every": 2}
    whole = train_head(DraftConfig(**shared, output=tmp_path / "whole"), print)
    config, kept = DraftConfig(**shared, output=tmp_path / "head"), tmp_path / "head.training"
    step = EagleTraining.step

    def stopping(self, batches):
        if self._done == 3:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(EagleTraining, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_head(config, print)
    monkeypatch.setattr(EagleTraining, "step", step)
    answers = (kept / "answers.jsonl").read_bytes()
    (kept / "answers.jsonl").write_bytes(answers[:-20])  # as a crash leaves it
    with pytest.raises(ValueError, match=r"head\.training holds a run that was interrupted: .* --resume"):
        train_head(config, print)
    with pytest.raises(ValueError, match=r"(?s)cannot resume.*learning_rate: saved 0.0001, now 0.01"):
        train_head(replace(config, resume=True, learning_rate=1e-2), print)
    said = []
    assert train_head(replace(config, resume=True), said.append) == whole
    assert "resumed from step 2" in said and not kept.exists()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "head")]
    assert files[0] == files[1]
    with pytest.raises(ValueError, match="is not empty"):
        train_head(replace(config, resume=True), print)
    kept.mkdir()
    assert train_head(replace(config, resume=True), print) is None and not kept.exists()


@repeats_parts_of("test_a_head_learns_the_models_own_answers_and_drafts_them")
def test_answers_in_training_are_drafted(request, model_folder, write_jsonl, tmp_path):
    raw = json.loads((model_folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (model_folder / "config.json").write_text(json.dumps(raw))
    make = request.getfixturevalue("with_weights")
    (tmp_path / "rewards.py").write_text(EVEN)
    write_head(tmp_path / "head", model_folder, config_from_hf(read_config(model_folder)))
    rows = [{"question": f"What is {a} plus {b}?"} for a in range(3) for b in range(2)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 128, "objective": "grpo", "steps": 2}
    settings |= {"reward": (f"{tmp_path / 'rewards.py'}:even",), "num_generations": 4, "generation_batch_size": 8}
    settings |= {"max_completion_length": 24, "drafts": "2"}
    train(make(**settings, draft_model=tmp_path / "head", output=tmp_path / "run"))
    shares = losses(tmp_path / "run", "drafts/accepted")
    assert len(shares) == 2 and all(0 <= share < 1 for share in shares)
    assert max(losses(tmp_path / "run", "sampling/sampling_logp_difference/mean")) < 1e-5
    with pytest.raises(ValueError, match="lacks draft_vocab_size"):
        train(make(**settings, draft_model=model_folder, output=tmp_path / "other"))
