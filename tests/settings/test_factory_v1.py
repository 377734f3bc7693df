"""Recipes of LLaMA-Factory's v1: tables of its plugins, data sets described by a file, and its defaults."""

import json
from pathlib import Path

import pytest

from jaxglue.data.formats import read_row
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig

BASE = {"model": "m", "train_dataset": "rows.jsonl", "dist_config": {"name": "fsdp2"}}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}")

    def load(**settings) -> TrainConfig:
        Path("recipe.yaml").write_text(json.dumps(BASE | settings), encoding="utf-8")
        return load_config(TrainConfig, Path("recipe.yaml"))

    return load


def test_silent_recipe_has_its_defaults(load, caplog):
    config = load()
    optimizer, run, data = config.optimizer, config.run, config.data
    assert (config.model.method, run.epochs, run.documents_per_step) == ("full", 3, 1)
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.weight_decay) == (1e-4, "constant", 0.01)
    assert (optimizer.warmup_ratio, data.seq_len, data.overlong, data.seed) == (0.0, 2048, "truncate", 42)
    assert data.data == ("rows.jsonl",)
    assert "left unsaid, so as LLaMA-Factory v1" in caplog.text and "a chat is one document" in caplog.text


@pytest.mark.parametrize(
    ("settings", "group", "expected"),
    [
        ({"peft_config": {"name": "lora"}}, "lora", {"rank": 8, "alpha": 16.0, "dropout": 0.05}),
        ({"peft_config": {"name": "lora", "r": 4, "target_modules": "all"}}, "lora",
         {"rank": 4, "targets": ("all-linear",), "exclude": ("experts",)}),
        ({"peft_config": {"name": "lora"}, "quant_config": {"name": "bnb", "quantization_bit": 4}}, "model",
         {"method": "lora", "quantize": "nf4"}),
        ({"optim_config": {"name": "muon", "wd": 0.2, "adamw_betas": [0.8, 0.9], "momentum": 0.95}}, "optimizer",
         {"optimizer": "muon", "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.9}),
        ({"optim_config": {"name": "muon"}}, "optimizer", {"weight_decay": 0.1, "beta2": 0.95}),
        ({"micro_batch_size": 2, "global_batch_size": 16}, "run", {"documents_per_step": 16}),
        ({"micro_batch_size": 2, "batching_strategy": "dynamic_batching"}, "run", {"per_device_batch_size": 2}),
        ({"micro_batch_size": 2, "batching_strategy": "padding_free"}, "run", {"documents_per_step": 2}),
        ({"train_dataset": "a/b"}, "data", {"data": ("hf:a/b",)}),
        ({"custom_chat_template": "{{ messages }}"}, "data", {"chat_template": "{{ messages }}"}),
    ],
)  # fmt: skip
def test_settings_are_ours(load, settings, group, expected):
    found = vars(getattr(load(**settings), group))
    assert {name: found[name] for name in expected} == expected


def test_data_sets_are_described_by_a_file(load, caplog):
    described = {
        "plain": {"path": "rows.jsonl", "source": "local", "converter": "alpaca", "size": 5},
        "hub": {"path": "a/b", "split": "dev", "converter": "sharegpt", "weight": 2},
    }
    Path("data.yaml").write_text(json.dumps(described))
    plain, hub = load(train_dataset="data.yaml").data.sources
    assert (plain.name, plain.format, plain.rows) == ("rows.jsonl", "alpaca_chat", 5)
    assert (hub.name, hub.split, hub.format, hub.weight) == ("hf:a/b", "dev", "auto", 2)
    assert "may differ: dataset_sample" in caplog.text
    Path("data.yaml").write_text(json.dumps({"pairs": {"path": "a/b", "converter": "pair"}}))
    assert load(train_dataset="data.yaml", pref_beta=0.2).objective.beta == 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_config": {"name": "freeze"}}, "line 1: peft_config: expected the name lora, got 'freeze'"),
        ({"peft_config": {"name": "lora", "rank": 3}}, "peft_config: rank: not known here"),
        (
            {"quant_config": {"name": "bnb", "quantization_bit": 2}},
            "quant_config: quantization_bit: expected 4 | 8, got",
        ),
        ({"optim_config": {"name": "muon", "momentum": 0.9}}, "optim_config: momentum: Muon has 0.95 here"),
        ({"batching_strategy": "other"}, "batching_strategy: expected normal | padding_free | dynamic_batching"),
        ({"train_dataset": "none.yaml"}, "train_dataset: no such file: none.yaml"),
        ({"train_dataset": 3}, "train_dataset: expected a name, got 3"),
    ],
)
def test_values_without_a_counterpart_are_named(load, settings, message):
    with pytest.raises(ValueError) as error:
        load(**settings)
    assert message in str(error.value)


def test_its_rows_are_read():
    texts = ("user", "Hi", 0.0), ("assistant", "Hello", 1.0)
    messages = [
        {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}
        for role, text, weight in texts
    ]
    found = read_row({"messages": messages}, "messages")
    assert [message["content"] for message in found.messages] == ["Hi", "Hello"]
    assert list(found.trained) == [False, True]
