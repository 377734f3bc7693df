"""Sentences of SECURITY.md: what a command writes, and what it does not run."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from selection import repeat

from jaxglue.commands import main
from jaxglue.data.template import ChatTemplate
from jaxglue.hf.checkpoint import open_checkpoint

WATCHED = """
import os, sys

def note(event, args):
    path = None
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        path = args[0]
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
        path = args[0]
    elif event in ("os.rename", "os.link", "os.symlink"):
        path = args[1]
    if isinstance(path, str | bytes):
        os.write(LOG, os.path.abspath(os.fsdecode(path)).encode(errors="replace") + b"\\n")

LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(note)
sys.argv = ["jaxglue", *sys.argv[2:]]
from jaxglue.commands import main
sys.exit(main())
"""


@pytest.fixture
def command(tmp_path, make_tokenizer, tiny_config, write_jsonl, chat_rows):
    """Return the flags of a tiny run in folders of its own."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **tiny_config, "vocab_size": 420}))
    flags = ["train", "--model", folder, "--random-weights", "--data", write_jsonl(chat_rows(4)), "--seq-len", 96]
    flags += ["--steps", 1, "--workers", 1, "--output", tmp_path / "run", "--cache-dir", tmp_path / "rows"]
    return [*map(str, flags), "--compilation-cache", str(tmp_path / "xla")]


@pytest.mark.parametrize("more", [["--dry-run"], repeat([])])
def test_a_run_writes_where_it_is_told(command, tmp_path, more):
    log, home, temporary = tmp_path / "log", tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir()
    variables = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XDG_"))} | variables
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(log), *command, *more],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = {Path(line) for line in log.read_text().splitlines()} - {Path("/dev/null"), log}
    told = [tmp_path / name for name in ("rows", "xla", "temporary")] + [home / ".cache" / "jaxglue"]
    told += [] if more else [tmp_path / "run"]
    theirs = [home / ".triton", home / ".cache" / "matplotlib", home / ".config" / "matplotlib"]  # of libraries
    outside = [path for path in written if not any(path.is_relative_to(folder) for folder in (*told, *theirs))]
    parents = {parent for folder in (*told, *theirs) for parent in folder.parents}
    assert [path for path in outside if path not in parents and not path.is_relative_to("/dev")] == []
    assert more or any(path.is_relative_to(tmp_path / "run") for path in written)
    assert (tmp_path / "run").exists() == (not more)


@pytest.mark.parametrize("key", ["reward", "environment"])
def test_a_recipe_imports_no_file_that_the_command_line_does_not_name(command, tmp_path, key, capsys):
    file, marker = tmp_path / "rewards.py", tmp_path / "imported"
    file.write_text(f"open({str(marker)!r}, 'w')\n\n\ndef judge(completion):\n    return 1.0\n")
    value = f'["{file}:judge"]' if key == "reward" else f'"{file}:judge"'
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[objective]\nobjective = "grpo"\n\n[rollouts]\n{key} = {value}\n')
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--recipe", str(recipe), "--dry-run"])
    assert "which is code: add" in capsys.readouterr().err and not marker.exists()


class Marker:
    """Runs code where it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_pickles_stay_bytes(tmp_path, name):
    marker = tmp_path / "unpickled"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Marker(str(marker))))
    with pytest.raises(ValueError):
        open_checkpoint(tmp_path / "model")
    assert not marker.exists()


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_reach_nothing_but_their_messages(make_tokenizer, attack):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = attack
    with pytest.raises(ValueError):
        ChatTemplate(tokenizer).render_prompt([{"role": "user", "content": "a"}], None)
