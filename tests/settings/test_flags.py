from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from jaxglue.models.lora_config import LoraConfig
from jaxglue.settings.config import Alias, Config, Range
from jaxglue.settings.flags import parse_config
from jaxglue.settings.recipe import as_dict, load_config, to_toml
from jaxglue.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataGroup(Config):
    """What to read."""

    data: Path
    """A folder of JSONL."""
    seq_len: Annotated[int, Range(ge=1), Alias("max_length", "row_tokens")] = 128
    """Tokens in a row, 100%
    of them."""
    columns: tuple[str, ...] = ("messages",)
    eval_share: Annotated[float, Range(ge=0, lt=1)] | None = 0.1

    def validate(self) -> None:
        if len(self.columns) > 2:
            raise ValueError("columns: at most two")


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup(Config):
    """How to learn."""

    learning_rate: float = 1e-5
    schedule: Literal["cosine", "linear"] = "cosine"
    full: bool = False
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainGroup(Config):
    """Train something."""

    data: DataGroup
    optimizer: OptimizerGroup = field(default_factory=OptimizerGroup)
    seed: int = 0
    """Of everything random."""


RECIPE = """
seed = 7
[data]
data = "chats"
seq_len = 256
columns = ["a", "b"]
[optimizer]
learning_rate = 1
"""


@pytest.fixture
def write_recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def error_of(capsys):
    def run(*argv) -> str:
        with pytest.raises(SystemExit) as stop:
            parse_config(TrainGroup, [str(arg) for arg in argv])
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run


def test_flags_fill_fields_of_every_type():
    argv = (
        "--data x --seq-len 64 --columns a --columns b --eval-share none "
        "--learning-rate 3e-4 --schedule linear --full --seed 3"
    )
    config = parse_config(TrainGroup, argv.split())
    assert config.data == DataGroup(data=Path("x"), seq_len=64, columns=("a", "b"), eval_share=None)
    assert config.optimizer == OptimizerGroup(learning_rate=3e-4, schedule="linear", full=True)
    assert config.seed == 3


@pytest.mark.parametrize("name", ["seq_len", "max_length", "row_tokens"])
def test_aliases_serve_as_flags_and_keys(write_recipe, name):
    flag = parse_config(TrainGroup, ["--data", "x", f"--{name.replace('_', '-')}", "64"])
    key = parse_config(TrainGroup, ["--data", "x", "--config", str(write_recipe(f"[data]\n{name} = 64"))])
    assert flag == key and flag.data.seq_len == 64


@pytest.mark.parametrize("names", [["q_proj,v_proj"], ["q_proj,", "v_proj"], ["q_proj", "v_proj"]])
def test_names_of_modules_may_stand_between_commas(names):
    assert parse_config(LoraConfig, ["--lora_target_modules", *names]).targets == ("q_proj", "v_proj")
    assert parse_config(LoraConfig, ["--lora_target", "all"]).targets == ("all-linear",)


def test_training_keeps_old_names_as_aliases():
    argv = ["--model", "m", "--data", "d", "--accumulation", "4", "--quantise", "nf4"]
    config = parse_config(TrainConfig, argv)
    assert (config.run.gradient_accumulation_steps, config.model.quantize) == (4, "nf4")


def test_flags_override_recipes_and_recipes_defaults(write_recipe):
    config = parse_config(TrainGroup, ["--config", str(write_recipe(RECIPE)), "--seq-len", "32", "--no-full"])
    assert (config.seed, config.data.seq_len, config.data.columns) == (7, 32, ("a", "b"))
    assert config.optimizer == OptimizerGroup(learning_rate=1.0)


@pytest.mark.parametrize(("flags", "overwrites"), [([], True), (["--resume"], False), (["--no-resume"], True)])
def test_resume_overrules_a_recipe_that_overwrites(flags, overwrites):
    assert parse_config(TrainConfig, ["--recipe", "quickstart", *flags]).run.overwrite == overwrites
    assert parse_config(TrainConfig, ["--recipe", "quickstart", "--overwrite", *flags]).run.overwrite


@pytest.mark.parametrize("extra", [[], ["--name", 'a "quoted"\\ é', "--eval-share", "none", "--columns", "--full"]])
def test_recipe_round_trip(write_recipe, extra):
    config = parse_config(TrainGroup, ["--data", "x", *extra])
    assert load_config(TrainGroup, write_recipe(to_toml(config))) == config


def test_as_dict_has_plain_types():
    assert as_dict(TrainGroup(data=DataGroup(data=Path("x"))))["data"] == {
        "data": "x",
        "seq_len": 128,
        "columns": ["messages"],
        "eval_share": 0.1,
    }


def test_help_shows_groups_docstrings_defaults_and_ranges(capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainGroup, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Train something.",
        "data: What to read.",
        "--seq-len, --max-length, --row-tokens int Tokens in a row, 100% of them. (default: 128; >= 1)",
        "A folder of JSONL. (required)",
        "--schedule cosine|linear (default: cosine)",
        "--[no-]full (default: False)",
        "Of everything random. (default: 0)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "x", "--seqlen", "3"], "unknown argument --seqlen; did you mean --seq-len?"),
        (["--data", "x", "--seq-len", "many"], "expected int >= 1, got 'many'"),
        (["--data", "x", "--schedule", "linaer"], "expected cosine | linear, got 'linaer'; did you mean linear?"),
        (["--data", "x", "--max-length", "0"], "--max-length/--row-tokens: expected int >= 1, got 0"),
        (["--data", "x", "--eval-share", "nan"], "expected float >= 0 and < 1 | none, got nan, which is not finite"),
        (["--data", "x", "--columns", "a", "b", "c"], "columns: at most two"),
        ([], "--data is missing: give the flag or its key in a recipe"),
    ],
)
def test_wrong_flag_is_named(error_of, argv, message):
    assert message in error_of(*argv)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[data]\nseqlen = 3", "[data] unknown key 'seqlen'; did you mean seq_len?"),
        ("[optimiser]\nfull = true", "unknown table [optimiser]; did you mean optimizer?"),
        ("[data]\nseq_len = '3'", "[data] seq_len: expected int >= 1, got '3'"),
        ("[data]\nseq_len = true", "[data] seq_len: expected int >= 1, got True"),
        ("[data]\ncolumns = [1]", "[data] columns: expected list of str, got 1"),
        ("[data]\nmax_length = 0", "[data] max_length: expected int >= 1, got 0"),
        ("[data]\nmax_length = 4\nseq_len = 4", "[data] seq_len: seq_len is given twice"),
        ("data = 3", "data = 3: expected the table [data]"),
        ("[data", "not valid TOML"),
    ],
)
def test_wrong_recipe_is_named(error_of, write_recipe, recipe, message):
    path = write_recipe(recipe)
    assert f"{path}: {message}" in error_of("--config", path, "--data", "x")


def test_missing_recipe_is_named(error_of, tmp_path):
    assert "nowhere.toml: cannot read this recipe: No such file" in error_of("--config", tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("flags", "group", "field", "value"),
    [
        ("--lora_r 8", "lora", "rank", 8),
        ("--logging-steps=1", "run", "log_every", 1),
        ("--num_train_epochs 3.0", "run", "epochs", 3),
        ("--max_steps 7", "run", "steps", 7),
        ("--load_in_4bit", "model", "quantize", "nf4"),
        ("--load_in_4bit True", "model", "quantize", "nf4"),
        ("--load_in_4bit false", "model", "quantize", "none"),
        ("--optim adamw_8bit", "optimizer", "moments", "8bit"),
        ("--optim paged_adamw_8bit", "optimizer", "moments", "8bit"),
        ("--optimizer adamw_torch", "optimizer", "optimizer", "adamw"),
        ("--optim lion", "optimizer", "learning_rate", 2e-4 * 0.1),
        ("--lr_scheduler_type warmup_stable_decay", "optimizer", "schedule", "wsd"),
        ("--lr 1e-3", "optimizer", "learning_rate", 1e-3),
        ("--method full", "optimizer", "learning_rate", 2e-5),
        ("--max_seq_length 512", "data", "seq_len", 512),
        ("--overwrite_output_dir True", "run", "overwrite", True),
        ("--use_rslora false", "lora", "rslora", False),
        ("--train_on_inputs true", "data", "loss_on", "all"),
        ("--lora-target-linear", "lora", "targets", ("all-linear",)),
        ("--lora-target-linear false --targets q_proj", "lora", "targets", ("q_proj",)),
    ],
)
def test_names_of_other_programs_are_accepted(flags, group, field, value):
    config = parse_config(TrainConfig, ["--model", "m", "--data", "d", *flags.split()])
    assert getattr(getattr(config, group), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--save_method merged_16bit",
            "--save-method has no counterpart: training writes the adapter (lora); jaxglue export --adapter DIR",
        ),
        ("--gguf q4_k_m", "--gguf has no counterpart: jaxglue export --gguf q4_k_m"),
        ("--logging_step 1", "unknown argument --logging-step; did you mean --logging-steps?"),
        ("--top-k 1", "--top-k is not for --objective sft: it is for answers written in training"),
        ("--beams 1", "unknown argument --beams; --help"),
        ("--optim sgd", "got 'sgd': adafactor, which stores as little"),
        ("--method qlora", "got 'qlora': give --method lora --quantize nf4"),
    ],
)
def test_suggestions_keep_the_meaning(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse_config(TrainConfig, ["--model", "m", "--data", "d", *flags.split()])
    assert message in capsys.readouterr().err
