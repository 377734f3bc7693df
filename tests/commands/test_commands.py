"""The `jaxglue` command: its list, its errors, Ctrl-C, and what it keeps out."""

import importlib.util
import re
import signal
import subprocess
import sys

import pytest

from jaxglue.commands import COMMANDS, main
from jaxglue.settings.config import every_field
from jaxglue.terminal.interrupt import SecondSignal
from jaxglue.training.config import TrainConfig


def test_help_lists_every_command_without_importing_one(capsys):
    before = set(sys.modules)
    main(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert not {name for name in set(sys.modules) - before if name.startswith("jaxglue.commands.")}


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from jaxglue.commands import main; main([]); "
        "print(*sorted({'jax', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == ""


def test_a_command_s_help_loads_neither_jax_nor_transformers():
    code = (
        "import contextlib, sys; from jaxglue.commands import COMMANDS, main\n"
        "for name in COMMANDS:\n    with contextlib.suppress(SystemExit): main([name, '--help'])\n"
        "print(*sorted({'jax', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == ""


def help_of(capsys, *argv):
    with pytest.raises(SystemExit):
        main([*argv])
    return capsys.readouterr().out


def flags_of(text):
    return re.findall(r"^  (?:-h, )?--(?:\[no-\])?([a-z0-9-]+)", text, flags=re.MULTILINE)


def test_help_shows_the_twenty_usual_flags_and_help_all_every_field_once(capsys):
    short, everything = help_of(capsys, "train", "--help"), help_of(capsys, "train", "--help-all")
    fields = [field.name.replace("_", "-") for _, field, _ in every_field(TrainConfig)]
    usual = [flag for flag in flags_of(short) if flag not in ("help", "help-all", "recipe")]
    assert len(usual) == len(set(usual)) == 20 and {*usual} <= {*fields}
    assert [*fields] == [*dict.fromkeys(fields)] and {*fields} <= {*flags_of(everything)}
    assert "--base-model" in everything and "--base-model" not in short
    assert len(short.splitlines()) < len(everything.splitlines()) / 4


def test_help_has_execution_settings_in_a_group_of_their_own(capsys):
    everything = help_of(capsys, "train", "--help-all")
    execution = re.search(r"^execution:\n(.*?)^\S", everything, flags=re.MULTILINE | re.DOTALL)[1]
    fields = TrainConfig.help_layout.sections["execution"][1]
    assert {*flags_of(execution)} == {"bf16", *(name.replace("_", "-") for name in fields)}  # one is for --dtype


def test_help_shows_a_command_s_own_flags_beside_the_usual_ones(capsys):
    assert {"gpu", "host-memory-gib", "model", "remat"} <= {*flags_of(help_of(capsys, "estimate", "--help"))}


def test_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
    assert "unknown command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (SecondSignal(signal.SIGTERM), 143), (ValueError("no folder"), 1)],
)
def test_interrupts_and_errors_are_one_line(monkeypatch, capsys, error, status):
    def fail(argv):
        raise error

    monkeypatch.setattr("jaxglue.commands.doctor.main", fail)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == status
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_torch_is_hidden_while_a_command_runs(monkeypatch):
    seen = []
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("jaxglue.commands.doctor.main", lambda argv: seen.append(importlib.util.find_spec("torch")))
    main(["doctor"])
    assert seen == [None] and "torch" not in sys.modules


INTERRUPT = """
import importlib, signal
from jaxglue import commands
importlib.import_module = lambda name: signal.raise_signal(signal.SIGINT)
commands.run("train")
"""


SWALLOWED = """
import gc, signal, sys, time
from jaxglue import commands

def main(argv):
    gc.callbacks.append(lambda *args: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))
    gc.collect()
    time.sleep(30)

sys.modules["jaxglue.commands.doctor"] = type(sys)("doctor")
sys.modules["jaxglue.commands.doctor"].main = main
commands.run("doctor", [])
"""


def test_interrupt_inside_a_callback_is_raised_again():
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (130, "jaxglue doctor: interrupted\n")


def test_interrupt_inside_imports_is_one_line():
    done = subprocess.run([sys.executable, "-c", INTERRUPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.split("\n")) == (130, "", ["", "jaxglue: interrupted", ""])


def test_worker_processes_see_no_torch(monkeypatch):
    code = "import jaxglue, sys; print(sys.modules['torch'])"
    seen = []

    def worker(argv):
        seen.append(subprocess.check_output([sys.executable, "-c", code], text=True).strip())

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("jaxglue.commands.doctor.main", worker)
    main(["doctor"])
    assert seen == ["None"]
