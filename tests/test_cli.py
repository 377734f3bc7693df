from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from jaxglue.cli import as_dict, load_config, parse_config, to_toml


@dataclass(frozen=True, kw_only=True)
class DataGroup:
    """What to read."""

    data: Path
    """A folder of JSONL."""
    seq_len: int = 128
    """Tokens in a row, 100%
    of them."""
    columns: tuple[str, ...] = ("messages",)
    eval_share: float | None = 0.1

    def __post_init__(self):
        if self.seq_len < 1:
            raise ValueError(f"seq_len={self.seq_len} must be positive")


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """How to learn."""

    learning_rate: float = 1e-5
    schedule: Literal["cosine", "linear"] = "cosine"
    full: bool = False
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
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
            parse_config(Config, [str(arg) for arg in argv])
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run


def test_flags_fill_fields_of_every_type():
    argv = (
        "--data x --seq-len 64 --columns a --columns b --eval-share none "
        "--learning-rate 3e-4 --schedule linear --full --seed 3"
    )
    config = parse_config(Config, argv.split())
    assert config.data == DataGroup(data=Path("x"), seq_len=64, columns=("a", "b"), eval_share=None)
    assert config.optimizer == OptimizerGroup(learning_rate=3e-4, schedule="linear", full=True)
    assert config.seed == 3


def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_default(write_recipe):
    config = parse_config(Config, ["--config", str(write_recipe(RECIPE)), "--seq-len", "32", "--no-full"])
    assert (config.seed, config.data.seq_len, config.data.columns) == (7, 32, ("a", "b"))
    assert config.optimizer == OptimizerGroup(learning_rate=1.0)


@pytest.mark.parametrize("extra", [[], ["--name", 'a "quoted"\\ é', "--eval-share", "none", "--columns", "--full"]])
def test_a_written_recipe_reads_back_equal(write_recipe, extra):
    config = parse_config(Config, ["--data", "x", *extra])
    assert load_config(Config, write_recipe(to_toml(config))) == config


def test_as_dict_is_plain():
    assert as_dict(Config(data=DataGroup(data=Path("x"))))["data"] == {
        "data": "x",
        "seq_len": 128,
        "columns": ["messages"],
        "eval_share": 0.1,
    }


def test_help_has_groups_docstrings_and_defaults(capsys):
    with pytest.raises(SystemExit):
        parse_config(Config, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Train something.",
        "data: What to read.",
        "--seq-len int Tokens in a row, 100% of them. (default: 128)",
        "A folder of JSONL. (required)",
        "--schedule cosine|linear (default: cosine)",
        "--full, --no-full (default: False)",
        "Of everything random. (default: 0)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "x", "--seqlen", "3"], "unknown argument --seqlen; did you mean --seq-len?"),
        (["--data", "x", "--seq-len", "many"], "--seq-len: expected int, got 'many'"),
        (["--data", "x", "--schedule", "linaer"], "expected cosine | linear, got 'linaer'; did you mean linear?"),
        (["--data", "x", "--seq-len", "0"], "seq_len=0 must be positive"),
        ([], "--data is missing: give the flag or its key in a recipe"),
    ],
)
def test_a_wrong_flag_is_named(error_of, argv, message):
    assert message in error_of(*argv)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[data]\nseqlen = 3", "[data] unknown key 'seqlen'; did you mean seq_len?"),
        ("[optimizer]\nfull = true", "unknown table [optimizer]; did you mean optimizer?"),
        ("[data]\nseq_len = '3'", "[data] seq_len: expected int, got '3'"),
        ("[data]\nseq_len = true", "[data] seq_len: expected int, got True"),
        ("[data]\ncolumns = 'a'", "[data] columns: expected list of str, got 'a'"),
        ("data = 3", "data = 3: expected the table [data]"),
        ("[data", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_named(error_of, write_recipe, recipe, message):
    path = write_recipe(recipe)
    assert f"{path}: {message}" in error_of("--config", path, "--data", "x")


def test_a_missing_recipe_is_named(error_of, tmp_path):
    assert "nowhere.toml: cannot read this recipe: No such file" in error_of("--config", tmp_path / "nowhere.toml")
