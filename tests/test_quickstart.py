import dataclasses
import importlib.util
import json

import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.data.prepare import prepare_data
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.checkpoint import read_config
from jaxglue.models import config_from_hf
from jaxglue.settings.recipe import find_recipe, load_config
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train


@pytest.fixture(scope="module")
def folder(request):
    return request.config.rootpath / "scripts" / "quickstart"


@pytest.fixture(scope="module")
def recipe(folder):
    return load_config(TrainConfig, folder.parent / "configs" / "quickstart.toml")


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """A folder freshly written by the script."""
    spec = importlib.util.spec_from_file_location("make", folder / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    fresh = tmp_path_factory.mktemp("quickstart")
    make.main(fresh)
    return fresh


def test_script_reproduces_the_shipped_files(folder, made):
    for name in ("chats.jsonl", "pairs.jsonl", "digits.jsonl", "calculator.jsonl", "orders.jsonl", "notes.jsonl"):
        assert (made / name).read_bytes() == (folder / name).read_bytes()
    for name in ("model", "digits", "calculator"):
        shipped, fresh = (load_tokenizer(root / name) for root in (folder, made))
        assert fresh.get_vocab() == shipped.get_vocab()
        assert fresh.chat_template == shipped.chat_template


def test_recipe_fits_model_and_data(folder, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    model = config_from_hf(read_config(recipe.model.model))
    tokenizer = load_tokenizer(recipe.model.model)
    assert len(tokenizer) <= model.vocab_size
    assert recipe.data.seq_len <= model.max_position_embeddings
    data = prepare_data(dataclasses.replace(recipe.data, cache_dir=str(tmp_path)), tokenizer, model.vocab_size)
    assert data.report.truncated == data.report.dropped == 0
    assert data.eval is not None


def test_sample_prompts_are_not_trained_on(folder, recipe):
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").open(encoding="utf-8")]
    asked = {message["content"] for chat in chats for message in chat if message["role"] == "user"}
    assert recipe.run.sample_prompt
    assert not asked & set(recipe.run.sample_prompt)


def run_recipe(name, steps, output):
    """Train by a recipe of rewards; few answers show that one step runs."""
    config = load_config(TrainConfig, find_recipe(name))
    few = {"generation_batch_size": 32} if steps == 1 else {}
    config = dataclasses.replace(config, rollouts=dataclasses.replace(config.rollouts, **few))
    return train(dataclasses.replace(config, run=dataclasses.replace(config.run, output=output, steps=steps)))


@repeats_parts_of("test_a_random_model_learns_to_use_tools_from_rewards_alone")
@pytest.mark.parametrize(("steps", "reached"), [(1, -1.0), repeat(100, 0.7)])
def test_a_random_model_learns_from_a_reward_alone(tmp_path, steps, reached):
    rewards = [line["reward"] for line in read_metrics(run_recipe("quickstart-grpo", steps, tmp_path / "run").metrics)]
    assert len(rewards) == steps and np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[-5:]) > reached


@pytest.mark.parametrize(("steps", "reached"), [(1, -1.0), repeat(100, 1.0)])
def test_a_random_model_learns_to_use_tools_from_rewards_alone(tmp_path, steps, reached):
    lines = read_metrics(run_recipe("quickstart-agent", steps, tmp_path / "run").metrics)
    assert len(lines) == steps and lines[0]["reward"] < 0.2
    assert np.mean([line["reward"] for line in lines[-5:]]) > reached
    assert steps == 1 or lines[-1]["episodes/turns"] > 1.9
