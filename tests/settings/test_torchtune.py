"""Recipes of torchtune: data sets by their builders, several of them, and what stands beside them."""

import json
from pathlib import Path

import pytest

from jaxglue.data.readers import read_rows
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig

BASE = {
    "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
}


def data_set(builder: str, **settings) -> dict:
    return {"_component_": f"torchtune.datasets.{builder}", "source": "json", "data_files": "a.jsonl", **settings}


def load(tmp_path: Path, **settings) -> TrainConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(BASE | settings), encoding="utf-8")
    return load_config(TrainConfig, path)


@pytest.mark.parametrize(
    ("settings", "columns", "format", "system"),
    [
        (data_set("instruct_dataset"), {"question": "input", "answer": "output"}, "question_answer", ""),
        (
            data_set("instruct_dataset", column_map={"output": "reply"}, new_system_prompt="Be brief."),
            {"question": "input", "answer": "reply"},
            "question_answer",
            "Be brief.",
        ),
        (data_set("alpaca_dataset", column_map={"instruction": "ask"}), {"instruction": "ask"}, "alpaca", ""),
        (data_set("chat_dataset", conversation_column="turns"), {"messages": "turns"}, "auto", ""),
        (data_set("chat_dataset", conversation_column="conversations"), {}, "auto", ""),
        (data_set("text_completion_dataset", column="body"), {"text": "body"}, "text", ""),
        (data_set("samsum_dataset"), {"question": "dialogue", "answer": "summary"}, "question_answer", ""),
        (
            data_set("stack_exchange_paired_dataset"),
            {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
            "auto",
            "",
        ),
    ],
)
def test_columns_of_a_data_set_are_those_of_its_builder(tmp_path, settings, columns, format, system):
    (source,) = load(tmp_path, dataset=settings).data.sources
    assert (source.name, source.columns, source.format, source.system) == ("a.jsonl", columns, format, system)


def test_what_its_optimizers_do_otherwise_is_told(tmp_path, caplog):
    load(tmp_path, dataset=data_set("chat_dataset"), dtype="bf16")
    assert "weights that train are in float32 here, in bfloat16 there" in caplog.text
    assert "weight_decay 0.01 (there of norms, too)" in caplog.text
    caplog.clear()
    load(tmp_path, dataset=data_set("chat_dataset"), dtype="fp32")
    assert "in bfloat16 there" not in caplog.text


def test_texts_that_are_chats_there_are_told(tmp_path, caplog):
    load(tmp_path, dataset=data_set("stack_exchange_paired_dataset"))
    assert "may differ: stack_exchange_paired_dataset (prompts and answers of these pairs are texts here" in caplog.text


@pytest.mark.parametrize("name", ["torchtune.models.llama4.llama4_scout_17b_16e", "x.lora_llama3_2_vision_11b"])
def test_models_without_a_family_are_told(tmp_path, name):
    with pytest.raises(ValueError, match=r"model: .*: models of llama\w+ are not read here: docs/models.md lists"):
        load(tmp_path, model={"_component_": name})


def test_data_sets_on_the_hub_have_their_subset(tmp_path):
    config = load(tmp_path, dataset={"_component_": "torchtune.datasets.wikitext_dataset", "subset": "wikitext-2-v1"})
    assert config.data.sources[0].name == "hf:EleutherAI/wikitext_document_level:wikitext-2-v1"


def test_several_data_sets_keep_their_own_settings(tmp_path):
    (tmp_path / "qa.jsonl").write_text(json.dumps({"q": "2 + 2?", "a": "4"}) + "\n")
    asked = data_set(
        "instruct_dataset", data_files=str(tmp_path / "qa.jsonl"), column_map={"input": "q", "output": "a"}
    )
    told = data_set("text_completion_dataset", column="body", split="train[:50%]")
    chats = data_set("chat_dataset", conversation_column="messages", train_on_input=True)
    config = load(tmp_path, dataset=[asked, told, chats], dataset_val=[asked, told], run_val_every_n_steps=5)
    assert [source.loss_on for source in config.data.sources] == ["assistant", "assistant", "all"]
    assert [source.split for source in config.data.sources] == ["train", "train[:50%]", "train"]
    assert [row.value for row in read_rows(config.data.sources[0])] == [{"question": "2 + 2?", "answer": "4"}]
    assert config.data.eval_sources == config.data.sources[:2] and config.run.eval_every == 5
    with pytest.raises(ValueError, match="dataset: expected a table with _component_, got"):
        load(tmp_path, dataset=[asked, "a.jsonl"])


def test_alpacas_prompt_without_turns_is_told(tmp_path, caplog):
    load(tmp_path, dataset=data_set("alpaca_cleaned_dataset"))
    assert "may differ: alpaca_dataset (Alpaca's prompt is a text here" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": data_set("instruct_dataset", column_map={"prompt": "q"})}, "column_map: expected names of input"),
        ({"dataset": data_set("chat_dataset", new_system_prompt="Hi")}, "new_system_prompt: 'Hi': --system names one"),
        (
            {"ref_checkpointer": {"_component_": "x.FullModelHFCheckpointer", "checkpoint_dir": "other"}},
            "ref_checkpointer: other: the reference is the model as training begins",
        ),
        ({"quantizer": {"_component_": "x.Quantizer"}}, "quantizer: no counterpart here: --serve-as"),
    ],
)
def test_parts_of_torchtune_without_a_counterpart_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **({"dataset": data_set("chat_dataset")} | settings))


def test_parts_that_say_how_gpus_share_the_work_are_left_out(tmp_path, caplog):
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2}
    pairs = data_set("preference_dataset", column_map={"chosen": "good", "rejected": "bad"})
    plan = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
    sharded = {"tensor_parallel_dim": 2, "tensor_parallel_plan": plan, "custom_sharded_layers": ["output"]}
    config = load(tmp_path, dataset=pairs, loss=loss, ref_checkpointer=BASE["checkpointer"], **sharded)
    assert (config.objective.objective, config.objective.beta) == ("dpo", 0.2)
    assert config.data.sources[0].columns == {"chosen": "good", "rejected": "bad"}
    assert "tensor_parallel_plan, custom_sharded_layers (--mesh" in caplog.text
