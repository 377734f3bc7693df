"""Public recipes of five programs, chosen before their reader was written, start with two changed lines.

`public_recipes.json` holds each one's settings as keys and values, its address and commit, and what it means: values
read beside the program's own sources, line by line, where the recipe names them and where it leaves them out.
"""

import json
import logging
from pathlib import Path

import pytest
import yaml

from jaxglue.data.patterns import pair_renderer
from jaxglue.settings.dialects.defaults import PROGRAMS, program_of
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import construct, from_settings, read_recipe, recipe_kinds
from jaxglue.training.config import TrainConfig

RECIPES = json.loads((Path(__file__).parents[1] / "goldens/public_recipes.json").read_text(encoding="utf-8"))
_DATA = (
    *("datasets", "dataset", "dataset_name", "dataset_mixture", "dataset_mixer", "dataset_splits", "dataset_configs"),
    "pretraining_dataset",
)
SILENT = {
    "axolotl": "base_model: m\nlearning_rate: 1e-4\nadapter: lora\nlora_r: 32\nlora_alpha: 16",
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\nlora_rank: 64",
    "TRL": "model_name_or_path: m\nuse_peft: true",
    "Unsloth": "model_name: m\nmax_steps: 60",
}
"""Recipes that state nothing beyond what their program demands."""
GROUPS = ("model", "optimizer", "data", "lora", "run")
COMMON = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_norm": 1.0}


def read(tmp_path: Path, settings: dict | str, flags: dict | None = None) -> TrainConfig:
    path = tmp_path / "recipe.yml"
    text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    path.write_text(text + ("\ndata: [rows.jsonl]" if isinstance(settings, str) else ""), encoding="utf-8")
    return construct(TrainConfig, read_recipe(TrainConfig, path, flags or {}), {})


def with_own_data(recipe: dict) -> dict:
    settings = recipe["settings"]
    if recipe["program"] == "torchtune":
        return {**settings, "dataset": {**settings["dataset"], "source": "json", "data_files": "rows.jsonl"}}
    return {key: value for key, value in settings.items() if key not in _DATA} | {"data": ["rows.jsonl"]}


def meaning(config: TrainConfig) -> dict:
    optimizer, run, data, lora = config.optimizer, config.run, config.data, config.lora
    warmup = optimizer.warmup_ratio if optimizer.warmup_steps is None else optimizer.warmup_steps
    return {
        **{"objective": config.objective.objective, "method": config.model.method, "quantize": config.model.quantize},
        **{"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout, "targets": " ".join(lora.targets)},
        **{"optimizer": optimizer.optimizer, "moments": optimizer.state_format, "warmup": warmup},
        **{name: getattr(optimizer, name) for name in ("learning_rate", "schedule", "weight_decay", "clip_norm")},
        **{"epochs": run.epochs, "steps": run.steps, "documents_per_step": run.documents_per_step},
        "rows": [run.per_device_batch_size, run.gradient_accumulation_steps],
        **{name: getattr(data, name) for name in ("seq_len", "overlong", "loss_on", "eval_fraction", "seed")},
        "beta": getattr(config.objective, "beta", 0.1),
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["address"].split("/", 3)[-1])
def test_public_recipe_means_the_same(tmp_path, recipe):
    settings, flags = with_own_data(recipe), recipe.get("flags", {})
    if "refused" in recipe:
        with pytest.raises(ValueError) as error:
            read(tmp_path, settings, flags)
        assert recipe["refused"] in str(error.value)
        return
    found = meaning(read(tmp_path, settings, flags))
    assert {name: found[name] for name in recipe["expects"]} == recipe["expects"]


def test_public_recipes_are_of_five_programs_and_four_objectives():
    programs = [recipe["program"] for recipe in RECIPES]
    assert len(RECIPES) >= 40 and len(set(programs)) == 5 and min(map(programs.count, programs)) >= 5
    assert len({recipe["expects"]["objective"] for recipe in RECIPES if "expects" in recipe}) >= 4
    found = {program_of(recipe["settings"]).name for recipe in RECIPES}
    others = {"ms-swift", "LLaMA-Factory v1"}  # whose public recipes are command lines, or are not among these
    assert found | others == {program.name for program in PROGRAMS}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "axolotl",
            {
                **{"rank": 32, "alpha": 16.0, "dropout": 0.0, "targets": "q_proj v_proj", "documents_per_step": 1},
                **{"schedule": "cosine", "warmup": 0.03, "weight_decay": 0.0, "epochs": 1, "seq_len": 512, "seed": 42},
                **{"overlong": "drop", "learning_rate": 1e-4, "loss_on": "assistant", "moments": "float32"},
            },
        ),
        (
            "LLaMA-Factory",
            {
                **{"rank": 64, "alpha": 128.0, "dropout": 0.0, "targets": "all-linear", "documents_per_step": 8},
                **{"schedule": "linear", "warmup": 0.0, "weight_decay": 0.0, "epochs": 3, "seq_len": 2048, "seed": 42},
                **{"learning_rate": 5e-5, "moments": "float32"},
            },
        ),
        (
            "TRL",
            {
                **{"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": "q_proj v_proj", "documents_per_step": 8},
                **{"schedule": "linear", "warmup": 0.0, "weight_decay": 0.0, "epochs": 3, "seq_len": 1024, "seed": 42},
                **{"learning_rate": 2e-5, "loss_on": "completion", "moments": "float32"},
            },
        ),
        (
            "Unsloth",
            {
                **{"rank": 16, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear", "documents_per_step": 8},
                **{"schedule": "linear", "warmup": 0.1, "weight_decay": 0.001, "steps": 60, "seq_len": 2048},
                **{"learning_rate": 5e-5, "seed": 3407, "moments": "8bit"},
            },
        ),
    ],
)
def test_silent_recipe_has_the_programs_defaults(tmp_path, caplog, program, expected):
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, SILENT[program])
    found = meaning(config)
    assert {name: found[name] for name in expected} == expected
    assert {name: getattr(config.optimizer, name) for name in COMMON} == COMMON
    (line,) = [line for line in caplog.text.splitlines() if f"left unsaid, so as {program}" in line]
    assert "weight_decay" in line and "max_steps" not in line


@pytest.mark.parametrize(
    ("objective", "rate"), [("sft", 2e-5), ("dpo", 1e-6), ("kto", 1e-6), ("orpo", 1e-6), ("reward", 1e-4)]
)
def test_learning_rate_of_trl_follows_the_objective(tmp_path, objective, rate):
    config = read(tmp_path, "model_name_or_path: m", {"objective": objective})
    assert config.optimizer.learning_rate == rate and config.objective.objective == objective


def test_dropout_that_trainers_switch_off_is_off(tmp_path, caplog):
    text = "model_name_or_path: m\nuse_peft: true\nlora_dropout: 0.1"
    assert read(tmp_path, text).lora.dropout == 0.1
    assert read(tmp_path, text, {"objective": "dpo"}).lora.dropout == 0
    assert "dropout 0.1 has no effect there" in caplog.text
    assert read(tmp_path, text + "\ndisable_dropout: false", {"objective": "dpo"}).lora.dropout == 0.1


def test_preference_recipe_without_a_command_asks_for_the_objective(tmp_path):
    with pytest.raises(ValueError, match=r"beta: settings of a preference loss.*add --objective dpo"):
        read(tmp_path, "model_name_or_path: m\nbeta: 0.2")
    assert read(tmp_path, "model_name_or_path: m\nbeta: 0.2", {"objective": "ipo"}).objective.beta == 0.2


@pytest.mark.parametrize(
    ("pattern", "targets"),
    [
        (r"model\.layers\.\d+\.(mlp|self_attn)\.(up|down|q)_proj", ("q_proj", "up_proj", "down_proj")),
        (r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|k)_proj", ("k_proj", "up_proj")),
        (r"model.text_model.layers.[\d]+.self_attn.(q|o)_proj", ("q_proj", "o_proj")),
        (r".*self_attn.*", ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")),
    ],
)  # fmt: skip
def test_targets_of_a_regular_expression(tmp_path, pattern, targets):
    settings = {"base_model": "m", "learning_rate": 1e-4, "adapter": "lora", "lora_r": 8, "lora_alpha": 8}
    config = read(tmp_path, {**settings, "lora_target_modules": pattern, "data": ["rows.jsonl"]})
    assert config.lora.targets == targets


@pytest.mark.parametrize("pattern", [r"layers\.1\.mlp\.up_proj", r".*layers\.1\..*", "(", "(a|" * 200])
def test_targets_that_differ_by_layer_are_refused(tmp_path, pattern):
    settings = {"base_model": "m", "learning_rate": 1e-4, "adapter": "lora", "data": ["rows.jsonl"]}
    with pytest.raises(ValueError, match=r"lora_target_modules: .*regular expression"):
        read(tmp_path, {**settings, "lora_target_modules": pattern})


def test_unknown_names_of_trackers_and_launchers_are_left_out(tmp_path, caplog):
    text = "base_model: m\nlearning_rate: 1e-4\nwandb_new_switch: on\nfsdp_offload_x: 1\nnum_processes: 8"
    assert read(tmp_path, text).distributed.num_processes is None
    assert "wandb_new_switch, fsdp_offload_x" in caplog.text
    with pytest.raises(ValueError, match="does not know: unheard_of"):
        read(tmp_path, text + "\nunheard_of: 3")


def test_strict_names_every_unknown_setting_and_no_known_one(tmp_path, capsys):
    path = tmp_path / "recipe.yml"
    path.write_text(
        "base_model: m\nlearning_rate: 1e-4\nunheard_of: 3\nwandb_new_switch: on\nfsdp_offload_x: 1\n"
        "flash_attention: true\nwandb_watch: gradients\ndata: [rows.jsonl]"
    )
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainConfig, ["--recipe", str(path), "--strict"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("unheard_of", "wandb_new_switch", "fsdp_offload_x"))
    assert "flash_attention" not in error and "wandb_watch" not in error
    with pytest.raises(ValueError, match=r"know: unheard_of \(line 3\), wandb_new_switch \(line 4\), fsdp_off"):
        from_settings(TrainConfig, {"strict": True}, path)
    path.write_text("base_model: m\nlearning_rate: 1e-4\nflash_attention: true\ndata: [rows.jsonl]")
    assert from_settings(TrainConfig, {"strict": True}, path) == from_settings(TrainConfig, {}, path)


@pytest.mark.parametrize(
    ("text", "data", "held_out"),
    [
        ("dataset_mixer:\n  a/b: 0.5\n  c/d: 1.0\ndataset_splits: [train_x, test_x]",
         ("hf:a/b?split=train_x[:50%]", "hf:c/d?split=train_x"), ("hf:a/b?split=test_x", "hf:c/d?split=test_x")),
        ("dataset_mixer:\n  a/b: 1.0\ndataset_configs: [fine]", ("hf:a/b:fine",), ()),
        ("dataset_mixture:\n  datasets:\n  - {path: a/b, name: fine}\n  - {id: c/d, config: default, split: test_y}",
         ("hf:a/b:fine",), ("hf:c/d?split=test_y",)),
    ],
)  # fmt: skip
def test_mixtures_are_sources(tmp_path, text, data, held_out):
    path = tmp_path / "recipe.yml"
    path.write_text("model_name_or_path: m\n" + text)
    config = construct(TrainConfig, read_recipe(TrainConfig, path), {})
    assert (config.data.data, config.data.eval_data) == (data, held_out)


def test_streams_of_pretraining_and_inline_templates_are_read(tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(
        "base_model: m\nlearning_rate: 1e-3\nmax_steps: 5\nreinit_weights: true\n"
        "pretraining_dataset:\n- path: a/b\n  name: en\n  text_column: body\n"
        "chat_template: \"{% for message in messages %}{{ message['content'] }}{% endfor %}\"\n"
    )
    config = construct(TrainConfig, read_recipe(TrainConfig, path), {})
    assert config.data.data == ("hf:a/b:en?format=text&overlong=truncate&columns=text=body",) and config.data.streaming
    assert config.data.chat_template.startswith("{% for") and config.model.random_weights


def test_torchtune_recipe_names_the_part_that_it_cannot_translate(tmp_path):
    recipe = next(recipe for recipe in RECIPES if recipe["program"] == "torchtune")
    settings = with_own_data(recipe) | {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}
    with pytest.raises(ValueError, match=r"loss: expected one of .*DPOLoss.*got PPOLoss"):
        read(tmp_path, settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bias: none\nlabel_smoothing_factor: 0\nshuffle: true", {}),
        ("enable_thinking: false", {"mask_empty_thinking": True}),
        ("enable_thinking: true", {"mask_empty_thinking": False}),
        ("use_mlflow: true\nmlflow_tracking_uri: http://localhost", {"log_to": ("tensorboard", "mlflow")}),
        ("use_wandb: false\nwandb_project: p", {"log_to": ("tensorboard",)}),
        ("adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_dropout: 0.1\ndisable_dropout: true", {"dropout": 0.0}),
        ("float32: true", {"dtype": "float32"}),
        ("train_on_responses_only: true", {"loss_on": "assistant"}),
        ("datasets:\n- {path: a.jsonl, type: chat_template.default, field_messages: prompt}", {"data": ("a.jsonl",)}),
    ],
)  # fmt: skip
def test_wishes_that_are_met_ask_for_nothing_and_others_are_translated(tmp_path, caplog, text, expected):
    with caplog.at_level(logging.WARNING):
        path = tmp_path / "recipe.yml"
        more = "" if "datasets" in text else "\ndata: [rows.jsonl]"
        path.write_text(f"base_model: m\nlearning_rate: 1e-4\n{text}{more}", encoding="utf-8")
        config = construct(TrainConfig, read_recipe(TrainConfig, path), {})
    merged = {**vars(config.model), **vars(config.data), **vars(config.lora), **vars(config.run)}
    assert {name: merged[name] for name in expected} == expected
    assert "may differ" not in caplog.text


@pytest.mark.parametrize("text", ["bias: all", "shuffle: false", "label_smoothing_factor: 0.1"])
def test_other_values_of_these_settings_are_told(tmp_path, caplog, text):
    try:
        with caplog.at_level(logging.WARNING):
            read(tmp_path, f"base_model: m\nlearning_rate: 1e-4\n{text}")
    except ValueError as error:
        assert text.partition(":")[0] in str(error)
    else:
        assert f"may differ: {text.partition(':')[0]}" in caplog.text


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("model_name_or_path: m\nloss_type: dft", 2e-5),
        ("model_name_or_path: m\nstage: sft\nuse_dft_loss: true", 5e-5),
        ("model: m\ntuner_type: lora\nenable_dft_loss: true", 1e-4),
    ],
)
def test_dynamic_fine_tuning_has_its_programs_defaults(tmp_path, text, rate):
    config = read(tmp_path, text)
    assert (config.objective.objective, config.optimizer.learning_rate) == ("dft", rate)
    off = read(tmp_path, text.replace("true", "false").replace("dft", "nll", "loss_type" in text))
    assert off.objective.objective == "sft"


def test_a_list_of_one_loss_is_that_loss(tmp_path):
    text = "model_name_or_path: m\nuse_peft: true\nloss_type: [hinge]"
    assert read(tmp_path, text, {"objective": "dpo"}).objective.loss_type == "hinge"
    with pytest.raises(ValueError, match="loss_type: expected sigmoid"):
        read(tmp_path, text.replace("[hinge]", "[hinge, sigmoid]"), {"objective": "dpo"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size: 32\nmicro_batch_size: 4", {"documents_per_step": 32}),
        ("micro_batch_size: 4\nbatch_size: 32\nsample_packing: true", {"gradient_accumulation_steps": 8}),
        ("batch_size: 32\ngradient_accumulation_steps: 2", {"documents_per_step": 2}),
        ("excess_length_strategy: raise", {"overlong": "error"}),
        ("val_set_size: 200", {"eval_fraction": 200}),
        ("val_set_size: 0.1\nearly_stopping_steps: 3", {"early_stopping": 3}),
        ("lr_scheduler: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-5}", {"min_lr_ratio": 0.1}),
        ("optimizer: muon\nadam_beta1: 0.9", {"beta1": 0.95, "beta2": 0.95}),
        ("optimizer: muon\nadam_beta1: 0.9\nadam_beta2: 0.98", {"beta1": 0.9, "beta2": 0.98}),
        ("reward_model: true\nadapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_dropout: 0.1", {"dropout": 0.0}),
        ("unfrozen_parameters: [^model.language_model.*, lm_head.*$]", {"train_vision": "none"}),
        ("unfrozen_parameters:", {"train_vision": "none"}),
        (
            "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_modules: [q_proj]\n"
            "lora_target_parameters: [mlp.experts.down_proj]",
            {"targets": ("q_proj", "mlp.experts.down_proj")},
        ),
        (
            "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true\n"
            "lora_target_parameters: [mlp.experts.down_proj]",
            {"targets": ("all-linear",)},
        ),
    ],
)
def test_sizes_of_axolotl_and_others_are_ours(tmp_path, text, expected):
    config = read(tmp_path, f"base_model: m\nlearning_rate: 1e-4\n{text}")
    merged = {name: value for group in GROUPS for name, value in vars(getattr(config, group)).items()}
    for name, value in expected.items():
        assert merged[name] == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize("value", ["[model.language_model.*]", "[lm_head, 'model.layers.4[4-9]+.mlp']", "[3]"])
def test_parts_of_a_text_model_that_train_alone_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="unfrozen_parameters: no counterpart here but for the whole text model"):
        read(tmp_path, f"base_model: m\nlearning_rate: 1e-4\nunfrozen_parameters: {value}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_path: m\nfinetuning_type: freeze", "line 2: .*freeze': give .*--layers adapts"),
        (
            "model_name_or_path: m\nfinetuning_type: oft\noft_target: all",
            "oft': give .*--dora or .*; line 3: oft_",
        ),
        ("model: m\ntuner_type: full\nfreeze_parameters_ratio: 0.5", "freeze_parameters_ratio: .*--layers adapts"),
    ],
)
def test_methods_that_there_are_none_of_name_the_nearest(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("value", ["{min_lr: [1]}", "{min_lr: 1e-5, power: 2}", "{min_lr: low}"])
def test_last_learning_rates_that_are_none_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="line 3: lr_scheduler_kwargs: expected min_lr or"):
        read(tmp_path, f"base_model: m\nlearning_rate: 1e-4\nlr_scheduler_kwargs: {value}")


@pytest.mark.parametrize(
    ("text", "overlong"),
    [
        ("base_model: m\nlearning_rate: 1e-4\ndatasets: [{path: a.jsonl, type: completion}]", "split"),
        ("base_model: m\nlearning_rate: 1e-4\ndatasets: [{path: a.jsonl, type: alpaca}]", "drop"),
        (
            "base_model: m\nlearning_rate: 1e-4\n"
            "datasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl, type: completion}]",
            "split",
        ),
        (
            "base_model: m\nlearning_rate: 1e-4\nmax_steps: 9\npretraining_dataset: [{path: a.jsonl}]\n"
            "sample_packing: true",
            "split",
        ),
        ("base_model: m\nlearning_rate: 1e-4\nmax_steps: 9\npretraining_dataset: [{path: a.jsonl}]", "truncate"),
        ("model_name_or_path: m\nstage: pt\ndata: a.jsonl", "split"),
        ("model_name_or_path: m\nstage: pt\ndata: a.jsonl\npacking: false", "truncate"),
        ("model_name_or_path: m\ndata: a.jsonl\npacking: true\npacking_strategy: wrapped", "split"),
        ("model_name_or_path: m\ndata: a.jsonl\npacking: true", "truncate"),
    ],
)
def test_long_documents_are_split_where_the_program_splits_them(tmp_path, text, overlong):
    path = tmp_path / "recipe.yml"
    path.write_text(text, encoding="utf-8")
    config = construct(TrainConfig, read_recipe(TrainConfig, path), {})
    assert (config.data.sources[-1].overlong or config.data.overlong) == overlong
    assert config.data.sources[0].overlong is None or len(config.data.sources) == 1


SEEING = "base_model: m\nlearning_rate: 1e-4\nprocessor_type: AutoProcessor\n"
LORA = "adapter: lora\nlora_r: 8\nlora_alpha: 8\n"
LANGUAGE = r"model.language_model.layers.[\d]+.self_attn.(q|k)_proj"


@pytest.mark.parametrize(
    ("text", "trains", "line"),
    [
        (SEEING, "all", "the vision tower trains, too"),
        (SEEING + "freeze_mm_modules: true", "none", ""),
        (SEEING + LORA + "lora_target_linear: true", "all", "the vision tower trains, too"),
        (SEEING + LORA + f"lora_target_modules: '{LANGUAGE}'", "none", ""),
        (SEEING + LORA + "lora_target_modules: [q_proj]", "none", "--train-vision all adapts them all"),
        ("base_model: m\nlearning_rate: 1e-4", "none", ""),
        ("model_name: m\nfinetune_language_layers: true", "all", "the vision tower trains, too"),
        ("model_name: m\nfinetune_language_layers: true\nfinetune_vision_layers: false", "none", ""),
        ("model_name_or_path: m\nfinetuning_type: full\nfreeze_vision_tower: true", "none", ""),
    ],
)
def test_the_vision_tower_trains_where_it_does_there(tmp_path, caplog, text, trains, line):
    assert read(tmp_path, text).model.train_vision == trains
    assert line in caplog.text and ("vision tower" in caplog.text) == bool(line)


@pytest.mark.parametrize("key", ["optimizer", "optim"])
def test_narrow_moments_are_wider_here(tmp_path, caplog, key):
    head = f"base_model: m\nlearning_rate: 1e-4\n{key}: "
    assert read(tmp_path, head + "adamw_torch_4bit").optimizer.moments == "8bit"
    assert "adamw_torch_4bit: its moments have 8 bits here, not 4" in caplog.text
    assert read(tmp_path, head + "paged_lion_8bit").optimizer.optimizer == "lion"
    assert "paged_lion_8bit: its moments have 32 bits here, not 8" in caplog.text
    assert read(tmp_path, head + "paged_lion_32bit").optimizer.optimizer == "lion"


def test_no_warmup_steps_leave_the_share(tmp_path):
    for steps, expected in ((0, None), (5, 5)):
        found = read(tmp_path, f"model_name_or_path: m\nwarmup_steps: {steps}\nwarmup_ratio: 0.1").optimizer
        assert (found.warmup_steps, found.warmup_ratio) == (expected, 0.1)


def test_the_column_of_texts_is_renamed(tmp_path):
    assert read(tmp_path, "model_name_or_path: m\ndataset_text_field: body").data.columns == "text=body"
    assert read(tmp_path, "model_name_or_path: m\ndataset_text_field: text").data.columns == ""


def test_a_default_warmup_of_axolotl_is_told_to_be_bounded(tmp_path, caplog):
    read(tmp_path, "base_model: m\nlearning_rate: 1e-4")
    assert "warmup_ratio 0.03 (at most 100 steps there)" in caplog.text


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("max_completion_length: 1024", None),
        ("max_completion_length: 1024\nmax_prompt_length: 256", 1280),
        ("max_completion_length: 8192", 10240),
        ("max_completion_length: 8192\nmax_length: 9000", 9000),
    ],
)
def test_rows_of_answers_have_room_for_their_prompts(tmp_path, caplog, text, room):
    config = read(tmp_path, f"model_name_or_path: m\nuse_peft: true\nreward_funcs: [accuracy]\n{text}")
    assert config.data.seq_len == room and config.rollouts.reward == ("math",)
    assert ("prompt and answer together" in caplog.text) == (room is not None and "max_length" not in text)


def test_prompts_of_open_r1_are_questions_with_its_system_message(tmp_path):
    text = (
        "model_name_or_path: m\nreward_funcs: [exact]\nbeta: 0\ndataset_prompt_column: problem\nsystem_prompt: Think."
    )
    data = read(tmp_path, text).data
    assert (data.sources[0].columns, data.system) == ({"question": "problem"}, "Think.")


@pytest.mark.parametrize(
    ("text", "warmup", "told"),
    [
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1", 0.0, True),
        ("lr_scheduler_type: constant\nwarmup_steps: 10", 0.0, True),
        ("lr_scheduler_type: constant", 0.0, False),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_ratio: 0.1", 0.1, False),
    ],
)
def test_a_constant_rate_has_no_warmup_there(tmp_path, caplog, text, warmup, told):
    for name in ("model_name_or_path: m\nuse_peft: true", "base_model: m\nlearning_rate: 1e-4"):
        found = read(tmp_path, f"{name}\n{text}").optimizer
        assert (found.schedule, found.warmup_ratio, found.warmup_steps) == ("constant", warmup, None)
    assert ("constant has no warm-up there" in caplog.text) == told


def test_a_supervised_loss_stands_beside_simpo_where_trls_trainer_adds_it(tmp_path):
    axolotl = read(tmp_path, "base_model: m\nlearning_rate: 1e-4\nrl: simpo").objective
    stated = read(tmp_path, "base_model: m\nlearning_rate: 1e-4\nrl: simpo\ncpo_alpha: 0").objective
    factory = read(tmp_path, "model_name_or_path: m\nstage: dpo\npref_loss: simpo").objective
    assert (axolotl.rpo_alpha, stated.rpo_alpha, factory.rpo_alpha) == (1.0, 0.0, 0.0)


def test_supervised_losses_by_trls_names(tmp_path):
    assert read(tmp_path, "model_name_or_path: m\nloss_type: chunked_nll").objective.objective == "sft"
    assert read(tmp_path, "model_name: m\nloss_type: nll").objective.objective == "sft"


def test_recipes_of_answers_are_known_by_their_loss(tmp_path):
    text = "model_name: m\nloss_type: dr_grpo\nmask_truncated_completions: true\nreward_funcs: [exact]"
    assert read(tmp_path, text).objective.objective == "dr_grpo"
    with pytest.raises(ValueError, match="--objective dr_grpo needs --reward"):
        read(tmp_path, text.replace("\nreward_funcs: [exact]", ""))


def test_beginning_and_unknown_tokens_are_the_tokenizers_own(tmp_path, caplog):
    text = "base_model: m\nlearning_rate: 1e-4\nspecial_tokens: {bos_token: <s>, eos_token: </s>, unk_token: <unk>}"
    assert read(tmp_path, text).data.eos_token == "</s>"
    assert "may differ: bos_token, unk_token (the tokenizer's own are used" in caplog.text
    with pytest.raises(ValueError, match="special_tokens: the tokenizer's own are used but for eos_token"):
        read(tmp_path, text.replace("unk_token", "mask_token"))


@pytest.mark.parametrize(("weights", "alpha"), [("[1.0, 0.2]", 0.2), ("null", 1.0)])
def test_a_supervised_loss_among_losses_is_rpos(tmp_path, weights, alpha):
    text = f"model_name_or_path: m\nuse_peft: true\nloss_type: [hinge, sft]\nloss_weights: {weights}"
    found = read(tmp_path, text, {"objective": "dpo"}).objective
    assert (found.loss_type, found.rpo_alpha) == ("hinge", alpha)
    with pytest.raises(ValueError, match="loss_type: expected sigmoid"):
        read(tmp_path, text.replace(weights, "[0.5, 1]"), {"objective": "dpo"})


def test_errors_name_lines_of_settings(tmp_path):
    text = "base_model: m\nlearning_rate: fast\n\nbetas: [1]\nunheard_of: 3\nrelora: true"
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    for part in (
        "recipe.yml: line 2: learning_rate: expected float",
        "line 4: betas: no counterpart here: --beta1",
        "line 6: relora: no counterpart here: train adapters",
        "jaxglue does not know: unheard_of (line 5). Remove them",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"recipe.yml: line 3: stage: expected sft"):
        read(tmp_path, "model_name_or_path: m\nfinetuning_type: lora\nstage: ppo")
    with pytest.raises(ValueError, match=r"recipe.yml: line 3: stage: expected sft"):
        recipe_kinds(TrainConfig, tmp_path / "recipe.yml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model_name: m\ndataset_text_field: ''", {"columns": ""}),
        ("model_name: m\ntask_type: FEATURE_EXTRACTION", {"objective": "sft"}),
        ("model_name: m\nload_in_fp8: block", {"matmul": "fp8", "quantize": "none"}),
        ("base_model: m\nlearning_rate: 1e-4\nfp8: true", {"matmul": "fp8", "method": "full"}),
        ("base_model: m\nlearning_rate: 1e-4\nfp8: false", {"matmul": "bf16"}),
        ("model_name_or_path: m\nlr_scheduler_type: cosine_with_restarts", {"schedule": "cosine"}),
        ("model_name_or_path: m\nnum_train_epochs: 0.5", {"epochs": 0.5}),
        ("model_name_or_path: m\nrouter_aux_loss_coef: 0.01", {"router_balance_loss": 0.01}),
        ("model_name_or_path: m\nfinetuning_type: lora\nuse_kt: true\nkt_config: x.yaml", {"method": "lora"}),
    ],
)
def test_more_values_are_ours(tmp_path, text, expected):
    config = read(tmp_path, text)
    groups = (config.model, config.data, config.run, config.optimizer, config.objective)
    merged = {name: value for group in groups for name, value in vars(group).items()}
    assert {name: merged[name] for name in expected} == expected


GRPO = "model_name: m\nreward_funcs: [exact]\nnum_generations: 8\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"objective": "bnpo", "beta": 0.001, "importance_sampling_mode": "none", "generation_batch_size": 8}),
        ("beta: 0", {"beta": 0.0}),
        ("per_device_train_batch_size: 2\ngradient_accumulation_steps: 2", {"generation_batch_size": 16}),
        ("per_device_train_batch_size: 2\ngradient_accumulation_steps: 8", {"generation_batch_size": 16}),
        ("loss_type: dapo", {"objective": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True}),
        (
            "loss_type: dr_grpo\nimportance_sampling_level: sequence",
            {"objective": "dr_grpo", "importance_sampling_level": "sequence"},
        ),
        ("loss_type: grpo\nimportance_sampling_level: sequence", {"objective": "gspo"}),
    ],
)
def test_answers_written_in_training_are_as_unsloth_has_them(tmp_path, text, expected):
    config = read(tmp_path, GRPO + ("per_device_train_batch_size: 1\n" if "per_device" not in text else "") + text)
    merged = {**vars(config.objective), **vars(config.rollouts)}
    assert {name: merged[name] for name in expected} == expected


def test_losses_of_routers_are_told(tmp_path, caplog):
    read(tmp_path, "model_name_or_path: m\nrouter_aux_loss_coef: 0.01")
    assert "--router-balance-loss weighs the mean of the layers' losses" in caplog.text
    caplog.clear()
    read(tmp_path, "model_name_or_path: m")
    assert "router_balance_loss 0.0 (0.001 of mixtures there)" in caplog.text and "weighs the mean" not in caplog.text


def test_embeddings_among_unsloths_targets_are_trained_whole(tmp_path, caplog):
    lora = read(tmp_path, "model_name: m\ntarget_modules: [q_proj, embed_tokens, lm_head]").lora
    assert (lora.targets, lora.modules_to_save) == (("q_proj", "lm_head"), ("embed_tokens",))
    assert "embed_tokens is trained whole, as there" in caplog.text
    plain = read(tmp_path, "model_name_or_path: m\nuse_peft: true\nlora_target_modules: [q_proj, embed_tokens]").lora
    assert (plain.targets, plain.modules_to_save) == (("q_proj", "embed_tokens"), ())


@pytest.mark.parametrize(
    ("text", "exclude"),
    [
        ("base_model: m\nlearning_rate: 1e-4\n" + LORA + "lora_target_linear: true", ("experts",)),
        ("base_model: m\nlearning_rate: 1e-4\n" + LORA + "lora_target_modules: [down_proj]", ("experts",)),
        (
            "base_model: m\nlearning_rate: 1e-4\n" + LORA + "lora_target_linear: true\n"
            "lora_target_parameters: [mlp.experts.down_proj]",
            (),
        ),
        (
            "base_model: m\nlearning_rate: 1e-4\n" + LORA + f"lora_target_modules: '{LANGUAGE}'\n"
            "lora_target_parameters: [experts.gate_up_proj]",
            (),
        ),
        ("model_name_or_path: m\nfinetuning_type: lora\nlora_target: all", ("experts",)),
        ("model_name_or_path: m\nuse_peft: true\nlora_target_modules: all-linear", ("experts",)),
        ("model_name: m", ()),
    ],
)
def test_experts_have_adapters_where_they_have_there(tmp_path, text, exclude):
    lora = read(tmp_path, text).lora
    assert lora.exclude == exclude
    if "experts.gate" in text:
        assert lora.targets == ("q_proj", "k_proj", "experts.gate_up_proj")


ROW = {"instruction": "Add.", "input": "1 2", "output": "3", "question": "1 + 2?", "answer": "3"}


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("alpaca:chat", "that provides further context. Write a response that appropriately completes the request.\n"
         "USER: Add.\n1 2\nASSISTANT:"),
        ("alpaca:phi", "the request.<|end|>\n<|user|>\nAdd.<|end|>1 2<|assistant|>"),
        ("alpaca:chatml", "<|im_end|>\n<|im_start|>user\nAdd.\n1 2<|im_end|>\n<|im_start|>assistant\n"),
        ("alpaca_chat.load_qa", "completes the request.\n\n\nUSER: 1 + 2?\nASSISTANT:"),
    ],
)  # fmt: skip
def test_styles_of_axolotls_alpaca(tmp_path, kind, prompt):
    path = tmp_path / "recipe.yml"
    path.write_text(f"base_model: m\nlearning_rate: 1e-4\ndatasets: [{{path: a.jsonl, type: '{kind}'}}]")
    (source,) = construct(TrainConfig, read_recipe(TrainConfig, path), {}).data.sources
    rendered = pair_renderer(source.prompt, source.completion)(ROW)
    assert rendered["prompt"].endswith(prompt) and rendered["completion"] == "3"
    short = pair_renderer(source.prompt, source.completion)({k: v for k, v in ROW.items() if k != "input"})
    assert "1 2" not in short["prompt"] and "further context" not in short["prompt"]
