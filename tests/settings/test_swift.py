"""Recipes of ms-swift: its names, its data sets and their rows, and its defaults."""

import json
from pathlib import Path

import pytest

from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig

BASE = {"model": "m", "dataset": "rows.jsonl", "tuner_type": "lora"}

EMBEDDING = {"task_type": "embedding", "loss_type": "infonce"}


def load(tmp_path: Path, **settings) -> TrainConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(BASE | settings), encoding="utf-8")
    return load_config(TrainConfig, path)


def test_silent_recipe_has_its_defaults(tmp_path, caplog):
    config = load(tmp_path)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout, config.lora.targets) == (
        *(8, 32.0, 0.05),
        ("all-linear",),
    )
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.weight_decay, optimizer.beta2) == (
        *(1e-4, "cosine"),
        *(0.1, 0.95),
    )
    assert (config.run.epochs, config.run.documents_per_step, config.data.overlong) == (3, 16, "drop")
    assert (config.data.seed, config.data.loss_on, config.data.format) == (42, "assistant", "auto_chat")
    assert "left unsaid, so as ms-swift" in caplog.text
    assert "documents are as long as the model's positions there, and here of 4,096 tokens" in caplog.text


@pytest.mark.parametrize(
    ("settings", "group", "expected"),
    [
        ({"tuner_type": "full"}, "optimizer", {"learning_rate": 1e-5}),
        ({"train_type": "full", "tuner_type": None}, "model", {"method": "full"}),
        ({"quant_bits": 4, "quant_method": "bnb"}, "model", {"quantize": "nf4"}),
        ({"per_device_train_batch_size": 3}, "run", {"documents_per_step": 18}),
        ({"packing": True, "per_device_train_batch_size": 3}, "run", {"gradient_accumulation_steps": 6}),
        ({"gradient_accumulation_steps": 2}, "run", {"documents_per_step": 2}),
        ({"truncation_strategy": "right"}, "data", {"overlong": "truncate"}),
        ({"truncation_strategy": "split"}, "data", {"overlong": "split"}),
        ({"loss_scale": "last_round"}, "data", {"loss_on": "last-turn"}),
        ({"loss_scale": "all+ignore_empty_think"}, "data", {"loss_on": "all", "mask_empty_thinking": True}),
        ({"max_pixels": 1003520}, "data", {"image_max_pixels": 1003520}),
        ({"split_dataset_ratio": 0.2}, "data", {"eval_fraction": 0.2}),
        ({"use_chat_template": False}, "data", {"format": "text", "loss_on": "all"}),
        ({"columns": {"ask": "query", "say": "response"}}, "data", {"columns": "question=ask,answer=say"}),
        ({"columns": '{"pictures": "images"}'}, "data", {"columns": "images=pictures"}),
        ({"val_dataset": "held.jsonl"}, "data", {"eval_data": ("held.jsonl",)}),
        ({"target_modules": ["q_proj", "o_proj"]}, "lora", {"targets": ("q_proj", "o_proj")}),
        ({"target_modules": ["all-linear"]}, "lora", {"targets": ("all-linear",)}),
        ({"rlhf_type": "dpo"}, "objective", {"objective": "dpo", "beta": 0.1}),
        ({"rlhf_type": "simpo"}, "objective", {"beta": 2.0, "simpo_gamma": 1.0, "rpo_alpha": 1.0}),
        ({"rlhf_type": "kto"}, "lora", {"dropout": 0.0}),
        ({"rlhf_type": "rm"}, "lora", {"dropout": 0.0}),
        ({"system": r"Be brief.\nBe kind."}, "data", {"system": "Be brief.\nBe kind."}),
        ({"rlhf_type": "rm"}, "objective", {"objective": "reward"}),
        ({"task_type": "seq_cls", "num_labels": 3, "use_chat_template": False}, "objective", {"num_labels": 3}),
        ({"task_type": "seq_cls", "num_labels": 3, "use_chat_template": False}, "data", {"format": "auto_chat"}),
        ({"task_type": "causal_lm"}, "objective", {"objective": "sft"}),
        (EMBEDDING, "objective", {"objective": "embed", "similarity_scale": 10.0, "max_text_length": 4096}),
        (EMBEDDING | {"max_length": 64}, "data", {"seq_len": 64, "format": "auto"}),
        (EMBEDDING | {"max_length": 64}, "objective", {"max_text_length": 64}),
        (EMBEDDING, "lora", {"dropout": 0.0}),
        (EMBEDDING, "run", {"documents_per_step": 16}),
        (EMBEDDING, "optimizer", {"learning_rate": 1e-4}),
        (
            {"task_type": "generative_reranker", "loss_type": "listwise_reranker", "max_length": 64},
            "objective",
            {"objective": "rerank", "rerank_loss": "listwise", "max_document_length": 64},
        ),
        (
            {"task_type": "reranker", "loss_type": "pointwise_reranker", "label_names": "labels"},
            "objective",
            {"objective": "rerank_score", "rerank_loss": "pointwise"},
        ),
        ({"max_epochs": 0.5}, "run", {"epochs": 0.5}),
        ({"save_total_limit": -1}, "run", {"keep_checkpoints": 2}),
        ({"learning_rate": 1e-4, "lr_scheduler_kwargs": '{"min_lr": 1e-5}'}, "optimizer", {"min_lr_ratio": 0.1}),
        ({}, "lora", {"exclude": ("experts",)}),
        ({"model_name": "a", "model_author": "b"}, "model", {"model": "m"}),
    ],
)
def test_settings_are_ours(tmp_path, settings, group, expected):
    found = vars(getattr(load(tmp_path, **settings), group))
    assert {name: found[name] for name in expected} == expected


def test_answers_written_in_training_have_its_defaults(tmp_path):
    config = load(tmp_path, rlhf_type="grpo", reward_funcs=["accuracy", "format"], num_generations=4)
    assert (config.objective.objective, config.objective.beta, config.objective.temperature) == ("grpo", 0.04, 0.9)
    assert config.rollouts.reward[0] == "math" and config.rollouts.reward[1].startswith("regex?pattern=^<think>")


def test_a_teacher_is_distilled_with_its_defaults(tmp_path, caplog):
    given = {"rlhf_type": "gkd", "teacher_model": "t", "split_dataset_ratio": 0.01, "max_length": 100}
    config = load(tmp_path, **given, per_device_train_batch_size=3, teacher_deepspeed="zero3", sft_alpha=0)
    objective, answers = config.objective, config.rollouts
    assert (objective.objective, objective.beta, objective.temperature) == ("distill", 0.5, 0.9)
    assert load(tmp_path, **given, sft_alpha=0.1).objective.sft_alpha == 0.1
    assert (answers.teacher, answers.lmbda, answers.max_completion_length) == ("t", 0.5, 512)
    assert (answers.generation_batch_size, answers.num_generations, answers.steps_per_generation) == (18, None, 1)
    assert (config.data.seq_len, config.data.eval_fraction, config.lora.dropout) == (612, 0.0, 0.0)
    assert "50% of the steps are on answers of the rows, of which 512 tokens are read at most" in caplog.text
    assert "0.01 of the prompts are held out there, and none here" in caplog.text
    assert load(tmp_path, **given, lmbda=1, gradient_accumulation_steps=4).rollouts.generation_batch_size == 4


def test_a_system_message_may_be_a_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Think first.\n", encoding="utf-8")
    assert load(tmp_path, system=str(path)).data.system == "Think first.\n"
    with pytest.raises(ValueError, match=r"system: cannot read .*other.txt: No such file"):
        load(tmp_path, system=str(tmp_path / "other.txt"))


def test_names_of_data_sets_have_their_hub_subset_and_rows(tmp_path, caplog):
    names = ["acme/chats#500", "HF::acme/chats:fine", "rows.jsonl#20"]
    config = load(tmp_path, dataset=names, max_length=64)
    assert [(source.name, source.rows) for source in config.data.sources] == [
        ("hf:acme/chats", 500),
        ("hf:acme/chats:fine", None),
        ("rows.jsonl", 20),
    ]
    assert "may differ: modelscope (names of data sets" in caplog.text
    assert "may differ: dataset_sample (the first rows" in caplog.text and "positions there" not in caplog.text
    caplog.clear()
    load(tmp_path, dataset=names[1], use_hf=True)
    assert "may differ" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tuner_type": "longlora"}, "tuner_type: expected lora | full, got 'longlora'"),
        ({"quant_bits": 2}, "quant_bits: expected 4 | 8, got 2"),
        ({"quant_method": "hqq"}, "quant_method: expected bnb, got 'hqq'"),
        ({"rlhf_type": "ppo"}, "rlhf_type: expected dpo | kto | orpo | simpo | grpo | rm | gkd, got 'ppo'"),
        ({"rlhf_type": "gkd"}, "--objective distill needs --teacher"),
        (
            {"rlhf_type": "gkd", "teacher_model": "t", "sft_alpha": 0.1, "lmbda": 1},
            "--lmbda 1.0 is not for --sft-alpha 0.1",
        ),
        ({"rlhf_type": "gkd", "teacher_model_server": "http://t"}, "teacher_model_server: no counterpart here"),
        ({"task_type": "embedding"}, "loss_type: expected infonce, got None"),
        ({"task_type": "prm"}, "task_type: expected seq_cls | embedding | reranker | generative_reranker, got 'prm'"),
        (
            {"task_type": "seq_cls", "problem_type": "regression"},
            "got 'regression': --objective classify learns labels",
        ),
        ({"cached_dataset": "a"}, "cached_dataset: no counterpart here: name the data with --data"),
        ({"truncation_strategy": "left"}, "truncation_strategy: expected delete | right | split, got 'left'"),
        ({"loss_scale": "default+hermes"}, "loss_scale: expected default | last_round | all, with"),
        ({"dataset": 3}, "dataset: expected names, got 3"),
        ({"dataset": "a/b#many"}, "dataset: a/b#many: expected name, name:subset"),
        ({"columns": "[1]"}, "columns: expected a table from old to new names"),
        ({"external_plugins": "p.py"}, "line 1: external_plugins: no counterpart here: name functions"),
    ],
)
def test_values_without_a_counterpart_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError) as error:
        load(tmp_path, **settings)
    assert message in str(error.value)


def test_prompts_and_answers_are_bounded_apart(tmp_path):
    given = {"rlhf_type": "grpo", "reward_funcs": ["accuracy"], "max_length": 100, "max_completion_length": 300}
    assert load(tmp_path, **given).data.seq_len == 400
