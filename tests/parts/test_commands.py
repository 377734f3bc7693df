"""Kinds in files of the user's, driven by commands alone, each in a process of its own."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from forked import Forked, run_command
from selection import repeat

from jaxglue.commands import main
from jaxglue.files.regular_file import file_digest

FOLDER = Path(__file__).parent
SHAPE = {
    **{"model_type": "qwen3", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "max_position_embeddings": 256,
}
PAIRS = [{"prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "Good"} for n in range(8)]
TEXTS = [{"text": f"{row['prompt']}{row['chosen']}"} for row in PAIRS]
STEPS = 16


@pytest.fixture
def start(tmp_path):
    """Start a command in a process of its own."""
    count = iter(range(99))

    def run(*arguments) -> Forked:
        return Forked(tmp_path / f"process-{next(count)}", run_command, str(tmp_path / "home"), [*map(str, arguments)])

    return run


@pytest.fixture
def finish(start):
    def run(*arguments, status: int = 0) -> str:
        code, stdout, stderr = start(*arguments).wait(300)
        assert code == status, stderr
        return stdout + stderr

    return run


@pytest.fixture
def flags(tmp_path, make_tokenizer, write_jsonl):
    """Flags of a run of a tiny model that writes a checkpoint after every step."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return [
        *("train", "--model", folder, "--random-weights", "--data", write_jsonl(PAIRS), "--seq-len", 64, "--rank", 4),
        *("--cache-dir", tmp_path / "cache", "--workers", 1, "--steps", STEPS, "--save-every", 1, "--log-to", "none"),
        *("--compilation-cache", os.environ.get("JAX_COMPILATION_CACHE_DIR", tmp_path / "xla")),
        *("--output", tmp_path / "run"),
    ]


KINDS = {
    "objective": (
        ("--objective", "cal_dpo", "--calibration", 0.25, "--no-calibrates-rejected"),
        {"objective": {"objective": "cal_dpo", "calibration": 0.25, "calibrates_rejected": False}},
    ),
    "optimizer": (
        ("--optimizer", "sign", "--smoothing", 0.75),
        {"optimizer": {"optimizer": "sign", "smoothing": 0.75, "learning_rate": 2e-5}},
    ),
    "weight_format": (("--quantize", "int4"), {"model": {"quantize": "int4"}}),
}


@pytest.mark.parametrize("kind", ["objective", repeat("optimizer"), repeat("weight_format")])
def test_commands_train_resume_export_and_generate_with_a_kind_of_a_file(
    kind, start, finish, flags, write_jsonl, tmp_path
):
    given, recorded = KINDS[kind]
    part, run = tmp_path / "my_parts.py", tmp_path / "run"
    part.write_bytes((FOLDER / f"{kind}.py").read_bytes())
    parts = ("--parts", part)
    if kind != "objective":
        write_jsonl(TEXTS)

    killed = start(*flags, *given, *parts)
    while killed.process.is_alive() and not (run / "checkpoints/2").is_dir():
        killed.process.join(0.02)
    killed.process.kill()
    code, _, stderr = killed.wait(60)
    assert code == -9, stderr
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["parts"] == [f"{part}#sha256={file_digest(part)}"]
    assert {name: config[name] | values for name, values in recorded.items()} == {
        name: config[name] for name in recorded
    }

    assert "resumed from step" in finish(*flags, *given, "--resume")
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS

    export = ("export", "--run", run, "--checkpoint", "last", "--output")
    assert f"records parts from {part}, which is code: add --parts {part}" in finish(*export, tmp_path / "no", status=1)
    finish(*export, tmp_path / "exported", *parts)
    answer = ("generate", "--adapter", tmp_path / "exported", "--prompt", "What is 3?", "--max-tokens", 4)
    finish(*answer, *(("--quantize", "int4") if kind == "weight_format" else ()), *parts)


def test_a_resumed_run_takes_no_code_that_this_user_never_named(finish, tmp_path):
    run, part = tmp_path / "run", tmp_path / "theirs.py"
    part.write_text("raise SystemExit('it ran')\n")
    run.mkdir()
    (run / "config.toml").write_text(f"parts = ['{part}#sha256={file_digest(part)}']\n")
    text = finish("train", "--model", "m", "--data", "d", "--output", run, "--resume", status=1)
    assert "which no command of yours has named" in text and "it ran" not in text


def test_an_error_of_a_part_names_its_line(finish, tmp_path):
    part = tmp_path / "broken.py"
    part.write_text("x = 1\nundefined\n")
    text = finish("train", "--model", "m", "--data", "d", "--parts", part, status=1)
    assert f"--parts {part}, line 2: NameError: name 'undefined' is not defined" in " ".join(text.split())


@pytest.mark.parametrize(
    ("recipe", "flag"),
    [
        ('parts = ["mine.py"]', "--parts mine.py"),
        ('[rollouts]\nreward = ["mine.py:judge"]', "--reward mine.py:judge"),
        ('[rollouts]\nenvironment = "mine.py:reply"', "--environment mine.py:reply"),
    ],
)
def test_code_that_only_a_recipe_names_is_not_run(recipe, flag, tmp_path, capsys):
    (tmp_path / "theirs.toml").write_text(recipe)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--model", "m", "--data", "d", "--recipe", str(tmp_path / "theirs.toml")])
    assert stop.value.code == 2 and f"which is code: add {flag} to the command" in " ".join(
        capsys.readouterr().err.split()
    )
