"""Words before the flags: a recipe, a folder of a model, an adapter or a run; and flags whose wish is met anyway."""

import logging

import pytest

from jaxglue.commands.bare import folder, recipe, runs
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import from_settings
from jaxglue.training.config import TrainConfig

ARGV = ["--model", "m", "--data", "rows.jsonl"]


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        (["adapter_config.json"], ["--adapter", "{folder}"]),
        (["config.json"], ["--model", "{folder}"]),
        (["adapter/adapter_config.json", "config.toml"], ["--adapter", "{folder}/adapter"]),
        (["model/config.json", "config.toml"], ["--model", "{folder}/model"]),
        ([], ["--model", "{folder}"]),
    ],
)
def test_a_folder_is_a_model_an_adapter_or_a_run(tmp_path, files, flags):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert folder(str(tmp_path)) == [flag.format(folder=tmp_path) for flag in flags]


def test_a_name_on_the_hub_is_a_model():
    assert folder("Qwen/Qwen3-0.6B") == ["--model", "Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize("read", [recipe, folder])
def test_several_words_are_refused(read):
    with pytest.raises(ValueError, match=r"a b: one .* is read, and everything else is a flag"):
        read("a", "b")


def test_several_runs_are_shown():
    assert runs("a", "b") == ["--runs", "a", "b"] and recipe("my.yml") == ["--recipe", "my.yml"]


@pytest.mark.parametrize(
    "words", [["--packing"], ["--packing", "true"], ["--gradient-checkpointing=True"], ["--use_liger_kernel", "--tf32"]]
)
def test_flags_whose_wish_is_met_are_warned_of(words, caplog):
    with caplog.at_level(logging.WARNING):
        config = parse_config(TrainConfig, [*ARGV, *words, "--steps", "3"])
    assert config.run.steps == 3 and "is left out: " in caplog.text


@pytest.mark.parametrize("words", [["--template", "llama3"], ["--packed"], ["--packing", "true", "stray"]])
def test_flags_that_change_the_result_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainConfig, [*ARGV, *words])
    assert "error: " in capsys.readouterr().err


def test_names_of_trl_in_python_name_their_counterpart():
    with pytest.raises(ValueError, match="unknown setting 'train_dataset' is TRL's: data takes files, and rows in"):
        from_settings(TrainConfig, {"model": "m", "train_dataset": []})


@pytest.mark.parametrize(
    ("words", "place"), [([], "auto"), (["--sample-prompt", "Hi"], "device"), (["--weights", "host"], "host")]
)
def test_weights_are_where_they_fit_but_for_sampling(words, place):
    assert parse_config(TrainConfig, [*ARGV, *words]).model.weights == place
