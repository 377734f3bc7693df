"""Recipes: shipped ones, YAML, misplaced keys, and those of other programs."""

import json
import re
from pathlib import Path

import pytest

from jaxglue.data.readers import read_rows
from jaxglue.settings.config import every_field
from jaxglue.settings.dialects import NOTES, REFUSED
from jaxglue.settings.dialects.values import CONVERTERS
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import find_recipe, from_settings, load_config, shipped_recipes
from jaxglue.training.config import TrainConfig

AXOLOTL = """
base_model: Qwen/Qwen3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: tatsu/chats
    type: chat_template
    split: train[:90%]
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
  - path: data/mine.jsonl
    type: completion
    field: body
val_set_size: 0.05
dataset_prepared_path:
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3.0
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
tf32: false
wandb_project:
gradient_checkpointing: true
warmup_steps: 10
s2_attention: false
special_tokens:
  pad_token: <|end|>
output_dir: ./outputs/qlora
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
cutoff_len: 2048
dataset: identity
template: qwen3
per_device_train_batch_size: 1
num_train_epochs: 3.0
lr_scheduler_type: linear
learning_rate: 1.0e-4
"""


TRL = """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: acme/chats
dataset_config: fine
dataset_test_split: held
chat_template: chatml
use_peft: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_steps: -1
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "recipe.yml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_is_valid(name):
    config = parse_config(TrainConfig, ["--recipe", name, "--data", "x"])
    assert str(config.run.output) == f"runs/{name}"


def test_unknown_shipped_recipe_lists_them_all():
    with pytest.raises(ValueError, match=r"no recipe named quick: give a file, or one of .*quickstart"):
        find_recipe("quick")


def test_text_of_a_recipe_may_name_its_folder(write):
    path = write('[model]\nmodel = "{recipe}/model"\n[data]\ndata = ["x"]', "recipe.toml")
    assert load_config(TrainConfig, path).model.model == str(path.parent / "model")


def test_yaml_has_the_tables_of_toml(write):
    path = write("model:\n  model: m\ndata:\n  data: [a, b]\n  seq_len: 64\noptimizer:\n  learning_rate: 3e-4\n")
    config = load_config(TrainConfig, path)
    assert (config.model.model, config.data.data, config.data.seq_len) == ("m", ("a", "b"), 64)
    assert config.optimizer.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nlearning_rate = 1e-4", r"\[data\] 'learning_rate' belongs in the table \[optimizer\]"),
        ("lora_r = 4", r"'lora_r' belongs in the table \[lora\]"),
        ("[run]\nlearning_rat = 1", r"\[run\] unknown key 'learning_rat'$"),
    ],
)
def test_misplaced_key_is_told_its_table(write, text, message):
    with pytest.raises(ValueError, match=message):
        load_config(TrainConfig, write(text, "recipe.toml"))


def test_axolotl_recipe_is_translated(write, caplog):
    config = load_config(TrainConfig, write(AXOLOTL))
    model, data, lora, run = config.model, config.data, config.lora, config.run
    assert (model.model, model.method, model.quantize) == ("Qwen/Qwen3-8B", "lora", "nf4")
    hub, file = data.sources
    assert (hub.name, hub.split, hub.format) == ("hf:tatsu/chats", "train[:90%]", "auto")
    assert (file.name, file.format, file.columns) == ("data/mine.jsonl", "text", {"text": "body"})
    assert (data.eval_fraction, data.seq_len, data.loss_on) == (0.05, 2048, "assistant")
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (32, 16.0, 0.05, ("all-linear",))
    assert (run.gradient_accumulation_steps, run.per_device_batch_size, run.epochs) == (4, 2, 3)
    assert (config.optimizer.moments, config.optimizer.warmup_steps) == ("8bit", 10)
    assert "sample_packing (documents are always packed" in caplog.text


def test_llama_factory_recipe_is_translated(write):
    config = parse_config(TrainConfig, ["--recipe", str(write(LLAMA_FACTORY)), "--data", "x"])
    assert (config.model.method, config.lora.rank, config.data.seq_len, config.run.epochs) == ("lora", 8, 2048, 3)
    assert config.lora.targets == ("q_proj", "v_proj")
    assert (config.data.image_max_pixels, config.data.video_max_pixels) == (768 * 768, 256 * 256)
    smaller = write(f"{LLAMA_FACTORY}image_max_pixels: 262144\n")
    config = parse_config(TrainConfig, ["--recipe", str(smaller), "--data", "x"])
    assert config.data.image_max_pixels == 262_144


def test_sizes_of_images_that_other_programs_choose_are_told(write, caplog):
    def told(recipe):
        caplog.clear()
        parse_config(TrainConfig, ["--recipe", str(write(recipe)), "--data", "x", "--learning-rate", "1e-4"])
        return caplog.text

    sees = "base_model: m\nprocessor_type: AutoProcessor\n"
    assert "images are brought to the tower's own size there" in told(sees)
    sized = told(f"{sees}image_size: 512\n")
    assert "the result may differ: image_size" in sized and "own size there" not in sized
    assert "images wider than the tower's own size" in told("model_name: m\nfinetune_language_layers: true\n")


def test_trl_recipe_is_translated(write, caplog):
    config = load_config(TrainConfig, write(TRL))
    assert (config.data.data, config.data.eval_data) == (("hf:acme/chats:fine",), ("hf:acme/chats:fine?split=held",))
    assert (config.model.method, config.run.steps) == ("lora", None)
    assert (config.optimizer.schedule, config.optimizer.min_lr_ratio) == ("cosine", 0.1)
    assert "template (the tokenizer's own" in caplog.text


ANSWERS = """
model_name_or_path: m
use_peft: true
dataset_name: acme/sums
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 4
use_vllm: true
scale_rewards: false
epsilon: 0.1
epsilon_high: 0.28
reward_funcs: [accuracy_reward, rewards.short]
reward_weights: [1.0, 0.5]
"""


def test_trls_recipes_of_answers_written_in_training_are_translated(write, caplog):
    config = load_config(TrainConfig, write(ANSWERS))
    found, answers = config.objective, config.rollouts
    assert (found.objective, found.scale_rewards, found.epsilon_low, found.epsilon_high) == ("dapo", "none", 0.1, 0.28)
    assert config.optimizer.epsilon == 1e-8
    assert (answers.generation_batch_size, answers.steps_per_generation, answers.num_generations) == (32, 2, 4)
    assert config.run.gradient_accumulation_steps == 1 and config.run.documents_per_step is None
    assert answers.reward == ("math", "rewards.py:short?weight=0.5")
    assert "left out: use_vllm (answers come from the model in training" in caplog.text
    sequences = f"{ANSWERS}loss_type: grpo\nimportance_sampling_level: sequence\n"
    assert load_config(TrainConfig, write(sequences)).objective.objective == "gspo"


def test_the_longest_answer_of_a_pair_asks_for_no_rollouts(write, caplog):
    path = write("model_name: m\nmax_prompt_length: 64\nmax_completion_length: 32\ndata: [a.jsonl]\n", "r.yaml")
    config = parse_config(TrainConfig, ["--recipe", str(path), "--objective", "orpo"])
    assert config.objective.objective == "orpo" and config.run.documents_per_step == 8
    assert "may differ: max_prompt_length (--seq-len bounds prompt and answer together)" in caplog.text


def test_tokens_left_out_of_sampling_are_those_of_the_recipe(write, caplog):
    answers = load_config(TrainConfig, write(ANSWERS + "top_p: 0.9\ntop_k: 50\nmin_p: 0.1\n")).rollouts
    assert (answers.top_p, answers.top_k, answers.min_p) == (0.9, 50, 0.1)
    assert "top_p, top_k, min_p: log-probabilities of sampling are those among all tokens" in caplog.text
    caplog.clear()
    answers = load_config(TrainConfig, write(ANSWERS + "top_p: 1.0\ntop_k: -1\nmin_p: null\n")).rollouts
    assert (answers.top_p, answers.top_k, answers.min_p) == (1.0, 0, 0.0)
    assert "among all tokens" not in caplog.text


def test_axolotls_table_of_trl_is_translated(write):
    table = "trl: {num_generations: 4, beta: 0.1, reward_funcs: [rewards.short], vllm_mode: colocate}\n"
    own = f"base_model: m\nadapter: lora\nrl: grpo\ndatasets: [{{path: a}}]\nmicro_batch_size: 16\n{table}"
    config = load_config(TrainConfig, write(own))
    assert (config.objective.objective, config.objective.beta) == ("dapo", 0.1)
    assert (config.rollouts.reward, config.rollouts.generation_batch_size) == (("rewards.py:short",), 16)
    config = load_config(TrainConfig, write(own.replace("rl: grpo", "rl: gdpo")))
    assert (config.objective.objective, config.objective.multi_objective_aggregation) == ("dapo", "normalize_then_sum")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("repetition_penalty: 1.1", "recipe.yml: line 15: repetition_penalty: 1.1 changes the distribution whose log-"),
        ("loss_type: sigmoid", "recipe.yml: line 15: loss_type: expected grpo | dapo"),
        ("reward_weights: [1]", "reward_weights: expected one for each of 2 functions, got 1"),
        ("steps_per_generation: 3", "steps_per_generation: expected a multiple of gradient_accumulation_steps, 2, g"),
        ("num_generations: many", "num_generations: expected whole numbers above 0"),
        ("reward_funcs: [3]", "reward_funcs: expected names of functions, got [3]"),
        ("importance_sampling_level: answer", "importance_sampling_level: expected token | sequence, got 'answer'"),
    ],
)
def test_settings_of_answers_without_a_counterpart_are_named(write, line, message):
    key = line.partition(":")[0]
    text = "".join(own for own in ANSWERS.splitlines(keepends=True) if not own.startswith(key))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(TrainConfig, write(f"{text}{line}\n"))


def test_reasoning_rewards_and_shares_of_axolotl_recipes_are_translated(write):
    text = (
        "base_model: m\nadapter: lora\nreward_model: true\nnum_labels: 1\nwarmup_steps: 0.1\nwandb_tags:\nfp8: false\n"
    )
    rows = "field_thinking: thinking, template_thinking_key: thinking, field_chosen: good, type: chat_template.default"
    config = load_config(TrainConfig, write(f"{text}datasets: [{{path: a.jsonl, {rows}}}]\n"))
    assert (config.objective.objective, config.optimizer.warmup_ratio) == ("reward", 0.1)
    assert config.data.sources[0].columns == {"chosen": "good"}
    training = "message_field_training: train, trust_remote_code: false, shards: null"
    config = load_config(TrainConfig, write(f"base_model: m\ndatasets: [{{path: a.jsonl, {training}}}]\n"))
    assert config.data.data == ("a.jsonl",)
    with pytest.raises(ValueError, match=r"message_field_training: expected train \| .*, got 'learn': rename it"):
        load_config(TrainConfig, write("base_model: m\ndatasets: [{path: a, message_field_training: learn}]\n"))
    with pytest.raises(ValueError, match=r"field_thinking: expected reasoning_content | .*, got 'trace': rename it"):
        load_config(TrainConfig, write("base_model: m\ndatasets: [{path: a, field_thinking: trace}]\n"))


def test_names_of_other_programs_may_repeat_a_setting():
    config = from_settings(
        TrainConfig,
        {"model": "m", "data": "a", "load_in_4bit": True, "load_in_8bit": False, "seed": 3, "random_state": 3},
    )
    assert (config.model.quantize, config.data.seed) == ("nf4", 3)
    with pytest.raises(ValueError, match="random_state: seed is given twice"):
        from_settings(TrainConfig, {"model": "m", "data": "a", "seed": 3, "random_state": 4})


def test_recipe_without_adapter_trains_all_weights(write):
    path = write("base_model: m\ndatasets:\n  - path: a.jsonl\n")
    config = load_config(TrainConfig, path)
    assert config.model.method == "full" and config.optimizer.learning_rate == 2e-5


@pytest.mark.parametrize("line", ["dataset_name: 5", "dataset_name: a/b\ndataset_config: [c]"])
def test_names_of_data_sets_are_text(write, line):
    with pytest.raises(ValueError, match=r"dataset_\w+: expected a name, got"):
        load_config(TrainConfig, write(f"model_name_or_path: m\n{line}\n", "r.yaml"))


@pytest.mark.parametrize("line", ["lora_target: 3", "lr_scheduler_type: [linear]"])
def test_values_of_other_types_are_named(write, line):
    key = line.partition(":")[0]
    with pytest.raises(ValueError, match=f"{key}: (a value of another type is expected|expected list of str), got"):
        load_config(TrainConfig, write(f"base_model: m\ndatasets: [{{path: a}}]\n{line}\n", "r.yaml"))


def test_unknown_settings_are_named_together(write):
    with pytest.raises(ValueError, match=r"optimizer: expected .*does not know: shrink"):
        load_config(TrainConfig, write("base_model: m\noptimizer: sgd\nshrink: 2\n"))
    with pytest.raises(ValueError, match=r"roles: 'bot' stands for assistant"):
        text = "base_model: m\ndatasets:\n  - path: a.jsonl\n    roles: {assistant: [gpt, bot]}\n"
        load_config(TrainConfig, write(text))
    with pytest.raises(ValueError, match=r"does not know: shrink \(line 2\), roles_to_train \(line 3\)\. Remove them"):
        load_config(TrainConfig, write("base_model: m\nshrink: 2\nroles_to_train: [a]\n"))
    with pytest.raises(ValueError, match=r"datasets: a.jsonl: settings that jaxglue does not know: shards"):
        load_config(TrainConfig, write("base_model: m\ndatasets:\n  - path: a.jsonl\n    shards: 2\n"))


def test_settings_that_make_another_run_are_refused_with_ours(write):
    with pytest.raises(ValueError, match=r"recipe.yml: line 2: betas: no counterpart here: --beta1 and --beta2"):
        load_config(TrainConfig, write("base_model: m\nbetas: [0.9, 0.95]\n"))


@pytest.mark.parametrize(
    ("line", "eos", "stops"),
    [
        ("eos_token: <|eot|>", "<|eot|>", ()),
        ("special_tokens: {pad_token: <|end|>, eos_token: <|eot|>}", "<|eot|>", ()),
        ("replace_eos: true", "turn_end", ()),
        ("replace_eos: false", None, ()),
        ("eot_tokens: ['<|eot|>', '<|eom|>']", None, ("<|eot|>", "<|eom|>")),
    ],
)
def test_end_tokens_of_other_programs_are_ours(tmp_path, line, eos, stops):
    (tmp_path / "recipe.yaml").write_text(f"{TRL}{line}\n")
    data = load_config(TrainConfig, tmp_path / "recipe.yaml").data
    assert (data.eos_token, data.stop_tokens) == (eos, stops)


@pytest.mark.parametrize("line", ["mask_history: true", "train_on: last-turn", "loss_on: last-turn"])
def test_the_last_turn_alone_by_other_names(tmp_path, line):
    (tmp_path / "recipe.yaml").write_text(f"{TRL}{line}\n")
    assert load_config(TrainConfig, tmp_path / "recipe.yaml").data.loss_on == "last-turn"
    flags = ["--data", "x", "--model", "m", "--train-on", "last-turn"]
    assert parse_config(TrainConfig, flags).data.loss_on == "last-turn"


UNPACKED = """model_name_or_path: m
cutoff_len: 2048
finetuning_type: lora
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
"""


def test_recipes_that_do_not_pack_keep_their_documents_per_step(write, caplog):
    run = load_config(TrainConfig, write(f"{UNPACKED}dataset_dir: none\ndata: x\n")).run
    assert (run.documents_per_step, run.batch_size, run.gradient_accumulation_steps) == (16, 1, 1)
    assert "a step has the 16 documents" in caplog.text
    for packing in ("packing: true", "neat_packing: true", "stage: pt"):
        run = load_config(TrainConfig, write(f"{UNPACKED}data: x\n{packing}\n")).run
        assert (run.documents_per_step, run.per_device_batch_size, run.gradient_accumulation_steps) == (None, 2, 8)
    axolotl = "base_model: m\ndatasets: [{path: a.jsonl}]\ngradient_accumulation_steps: 4\n"
    assert load_config(TrainConfig, write(axolotl)).run.documents_per_step == 4
    assert (
        load_config(
            TrainConfig, write("model_name_or_path: m\ndata: x\ngradient_accumulation_steps: 2\n")
        ).run.documents_per_step
        == 16
    )
    answers = "model_name_or_path: m\ndata: x\nobjective: grpo\nreward_funcs: exact\nper_device_train_batch_size: 2\n"
    config = load_config(TrainConfig, write(answers))
    assert (config.run.documents_per_step, config.run.batch_size) == (None, 1)
    assert (config.objective.objective, config.rollouts.generation_batch_size) == ("grpo", 8)


def test_alpaca_rows_of_llama_factory_are_chats(write, caplog):
    assert load_config(TrainConfig, write(f"{UNPACKED}data: x\n")).data.format == "auto_chat"
    assert "rendered with the chat template" in caplog.text
    assert load_config(TrainConfig, write("base_model: m\ndatasets: [{path: a.jsonl}]\n")).data.format == "auto"


DATASET_INFO = {
    "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "rules"}},
    "plain": {"file_name": "plain.json", "columns": {"prompt": "ask", "response": "say"}},
    "pairs": {"hf_hub_url": "o/pairs", "subset": "fine", "split": "held", "ranking": True},
    "judged": {
        "file_name": "judged.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "ok"},
    },
    "seen": {"file_name": "seen.json", "columns": {"images": "pictures", "videos": "videos", "audios": "sounds"}},
    "books": {"file_name": "books.jsonl", "columns": {"prompt": "body"}},
    "some": {"file_name": "some.json", "num_samples": 5},
    "odd": {"file_name": "odd.json", "columns": {"depths": "depths"}},
    "far": {"ms_hub_url": "o/far"},
    "bare": {"formatting": "sharegpt"},
    "roles": {"file_name": "r.json", "formatting": "sharegpt", "tags": {"role_tag": "role", "user_tag": "asker"}},
}


def test_named_data_sets_of_llama_factory_are_found(write, tmp_path, caplog):
    (tmp_path / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    head = f"{UNPACKED}dataset_dir: {tmp_path}\n"
    config = load_config(TrainConfig, write(f"{head}dataset: chats, plain\neval_dataset: judged\nmax_samples: 9\n"))
    chats, plain = config.data.sources
    assert (chats.name, chats.columns, chats.format) == (
        f"{tmp_path}/chats.json",
        {"messages": "turns", "system": "rules"},
        "auto_chat",
    )
    assert (plain.columns, plain.format, plain.rows) == ({"instruction": "ask", "output": "say"}, "alpaca_chat", 9)
    assert config.data.eval_sources[0].columns == {"kto_tag": "ok"}
    (pairs,) = load_config(TrainConfig, write(f"{head}dataset: [pairs]\nstage: dpo\n")).data.sources
    assert (pairs.name, pairs.split, pairs.format, pairs.rows) == ("hf:o/pairs:fine", "held", "auto_chat", None)
    (seen,) = load_config(TrainConfig, write(f"{head}dataset: seen\n")).data.sources
    assert seen.columns == {"images": "pictures", "audios": "sounds"} and seen.format == "alpaca_chat"
    books, plain = load_config(TrainConfig, write(f"{head}dataset: books,plain\nstage: pt\n")).data.sources
    assert (books.format, books.columns, plain.format, plain.columns) == (
        "text",
        {"text": "body"},
        "text",
        {"text": "ask"},
    )
    for most, rows in (("", 5), ("max_samples: 3", 3), ("max_samples: 9", 5)):
        caplog.clear()
        (some,) = load_config(TrainConfig, write(f"{head}dataset: some\n{most}\n")).data.sources
        assert some.rows == rows and "may differ: dataset_sample (the first rows" in caplog.text
    for name, message in (
        ("none", r"dataset: none: .*dataset_info.json does not describe it; it has chats, plain"),
        ("odd", "dataset: odd: columns: depths is not read"),
        ("far", "dataset: far: ms_hub_url: only files and the Hugging Face hub are read"),
        ("bare", "dataset: bare: it has neither file_name nor hf_hub_url in .*dataset_info.json: add one"),
        ("roles", r"dataset: roles: tags: user_tag: expected human \| user, got 'asker'"),
    ):
        with pytest.raises(ValueError, match=message + r"(.|\n)*learning_rate: .*does not know: shrink"):
            load_config(TrainConfig, write(f"{head}dataset: {name}\nlearning_rate: fast\nshrink: 1\n"))


def test_wandb_project_switches_the_tracker_on(write):
    run = load_config(TrainConfig, write("base_model: m\ndatasets: [{path: a}]\nwandb_project: p\nwandb_name: n\n")).run
    assert (run.log_to, run.log_project, run.log_name) == (("tensorboard", "wandb"), "p", "n")
    run = load_config(TrainConfig, write("base_model: m\ndatasets: [{path: a}]\nwandb_project: ''\nwandb_name:\n")).run
    assert (run.log_to, run.log_project, run.log_name) == (("tensorboard",), None, None)


def test_what_changes_the_result_is_listed_first(write, caplog):
    load_config(
        TrainConfig,
        write("base_model: m\ndatasets: [{path: a}]\ntf32: true\nsample_packing: true\nchat_template: llama3\n"),
    )
    first, *others = caplog.text.partition("\n  - ")[2].split("\n  - ")
    assert first.startswith("left out, and the result may differ: template (the tokenizer's own") and len(others) == 4


AXOLOTL_ROWS = {
    "context_qa.load_v2": ({"context": "C", "question": "Q", "answer": "A"}, "Context: C\nQuestion: Q\n", "Answer: A"),
    "alpaca_w_system.load_open_orca": (
        {"system_prompt": "S", "question": "Q", "response": "A"},
        "### System:\nS\n### Human:\nQ\n### Assistant:\n",
        "A",
    ),
    "alpaca_w_system.load_instruct": (
        {"system": "S", "instruction": "I", "input": "X", "output": "A"},
        "### System:\nS\n\n### Instruction:\nI\n\n### Input:\nX\n\n### Response:\n",
        "A",
    ),
    "alpaca_w_system": ({"system": "", "instruction": "I", "input": "", "output": "A"}, "USER: I\nASSISTANT:", "A"),
}
OWN = {
    "field_instruction": "my q",
    "field_output": "a",
    "field_input": "x",
    "format": "[{instruction}|{input}]",
    "no_input_format": "[{instruction}] {{",
    "system_prompt": "S",
}


@pytest.mark.parametrize("kind", AXOLOTL_ROWS)
def test_prompts_of_axolotl_types_are_made_of_columns(write, tmp_path, kind):
    row, prompt, completion = AXOLOTL_ROWS[kind]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (source,) = load_config(
        TrainConfig, write(f"base_model: m\ndatasets: [{{path: {tmp_path}/a.jsonl, type: {kind}}}]\n")
    ).data.sources
    assert [found.value for found in read_rows(source)] == [{"prompt": prompt, "completion": completion}]


def test_an_own_type_of_axolotl_names_fields_and_formats(write, tmp_path):
    rows = [
        {"my q": "Q", "x": "X", "a": "A"},
        {"my q": "Q", "x": "", "a": "A"},
        {"my q": "{{ a }}", "a": "A"},
        {"a": "A"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"base_model": "m", "datasets": [{"path": str(tmp_path / "a.jsonl"), "type": OWN}]}
    (source,) = load_config(TrainConfig, write(json.dumps(recipe))).data.sources
    found = read_rows(source)
    assert [next(found).value["prompt"] for _ in range(3)] == ["S[Q|X]", "S[Q] {", "S[{{ a }}] {"]
    with pytest.raises(
        ValueError, match=r"a.jsonl:4: its prompt or completion cannot be made: .*my q.*; its columns are 'a'"
    ):
        next(found)
    for key, value, message in (
        ("format", "{name}", "a format may name instruction, input, got {name}"),
        ("shape", "x", "type: unknown shape"),
        ("field_output", None, "type: field_output is missing"),
    ):
        wrong = {**recipe, "datasets": [{"path": "a.jsonl", "type": {**OWN, key: value}}]}
        with pytest.raises(ValueError, match=message):
            load_config(TrainConfig, write(json.dumps(wrong)))


def test_settings_in_the_table_of_programs_are_treated_as_it_says():
    page = (Path(__file__).parents[2] / "docs/from_other_tools.md").read_text(encoding="utf-8")
    lines = page.partition("### Each program")[2].partition("Five recipes")[0].strip().splitlines()[2:]
    known = {name for _, f, kind in every_field(TrainConfig) for name in (f.name, *kind.aliases)}
    handled = {
        "datasets",
        "adapter",
        "train_on_inputs",
        "sample_packing",
        "dataset",
        "stage",
        "packing",
        "wandb_project",
        "rl",
    }
    for line in lines[:4]:
        honored, translated, left_out, rejected = (
            set(re.findall(r"`([a-z_0-9]+)`", cell)) for cell in line.split("|")[2:6]
        )
        assert honored <= known, honored - known
        assert translated <= known | CONVERTERS.keys() | handled | {"dataset_info"}, translated
        assert left_out <= NOTES.keys(), left_out - NOTES.keys()
        assert rejected <= REFUSED.keys(), rejected - REFUSED.keys()


def test_settings_of_a_kind_that_a_flag_replaces_are_left_out(write, caplog):
    path = write(
        '[model]\nmodel = "m"\n[data]\ndata = ["x"]\n[optimizer]\nbeta2 = 0.98\n'
        '[objective]\nobjective = "dpo"\nlabel_smoothing = 0.1\nbeta = 0.3\n',
        "recipe.toml",
    )
    config = parse_config(TrainConfig, ["--recipe", str(path), "--optimizer", "adafactor", "--objective", "ipo"])
    assert (config.optimizer.optimizer, config.objective.objective, config.objective.beta) == ("adafactor", "ipo", 0.3)
    assert "beta2 is left out" in caplog.text and "label_smoothing is left out" in caplog.text
    wrong = write('[model]\nmodel = "m"\n[data]\ndata = ["x"]\n[objective]\nlabel_smoothing = 0.1\n', "wrong.toml")
    with pytest.raises(SystemExit):
        parse_config(TrainConfig, ["--recipe", str(wrong)])
