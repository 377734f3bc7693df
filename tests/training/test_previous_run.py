"""Replacement of a run: nothing of the user's moves, and the run before survives until the new one has a checkpoint."""

import json
import os
from pathlib import Path

import pytest

from jaxglue.training import run_folder
from jaxglue.training.run_folder import MANIFEST, RunFiles, RunFolder, output_folder
from jaxglue.training.train import train


def write_run(folder, text, *, checkpoint=True):
    output = RunFolder(folder)
    output.begin(text, {"rows": []})
    with output.writing("adapter"):
        (folder / "adapter").mkdir(exist_ok=True)
        (folder / "adapter" / "weights").write_text(text)
    if checkpoint:
        output.before_checkpoint(folder / "checkpoints" / "5")
        (folder / "checkpoints" / "5").mkdir(parents=True)
        (folder / "checkpoints" / "5" / "array").write_text(text)
        output.checkpoint_saved(folder / "checkpoints" / "5")


def contents(folder):
    """Texts of the files, without temporary ones, which are removed once their process is dead."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".jaxglue") and path.suffix != ".tmp"
    }


@pytest.fixture
def run(tmp_path):
    with output_folder(tmp_path / "run") as folder:
        write_run(folder, "old")
    (folder / "chats.jsonl").write_text("mine")
    (folder / "adapter" / "notes.txt").write_text("mine")
    return folder


MINE = {"chats.jsonl": "mine", "adapter/notes.txt": "mine"}
PLAN = {"plan.json": '{\n  "rows": []\n}\n'}
OLD = {**MINE, **PLAN, "config.toml": "old", "adapter/weights": "old", "checkpoints/5/array": "old"}


def test_new_run_replaces_the_files_of_the_old_alone(run):
    with output_folder(run, overwrite=True):
        assert contents(run) == OLD
        output = RunFolder(run, overwrite=True)
        with output.replacing():
            assert {name: text for name, text in contents(run).items() if "old-" not in name} == MINE
            output.begin("new", {"rows": []})
            folder = run / "checkpoints" / "1"
            output.before_checkpoint(folder)
            folder.mkdir(parents=True)
            (folder / "array").write_text("new")
            output.checkpoint_saved(folder)
    assert contents(run) == {**MINE, **PLAN, "config.toml": "new", "checkpoints/1/array": "new"}


def test_failure_before_a_checkpoint_restores_the_old_run(run):
    output = RunFolder(run, overwrite=True)
    with pytest.raises(KeyboardInterrupt), output.replacing():
        write_run(run, "new", checkpoint=False)
        raise KeyboardInterrupt
    assert contents(run) == OLD


@pytest.mark.parametrize("damage", [b'{"pa\n', b'{"path": "../x"}\n', b'{"files": 3}\n'])
def test_damaged_list_of_files_is_mended(run, damage):
    with (run / MANIFEST).open("ab") as file:
        file.write(damage + b'{"path": "cut')
    RunFolder(run).begin("resumed", {"rows": []})
    assert {"config.toml", "checkpoints/5/array"} <= set(RunFiles(run).present())
    assert not RunFiles(run)._lines.damaged
    assert (run / f"{MANIFEST}.damaged").read_bytes() == damage


def test_killed_first_run_can_be_replaced(tmp_path):
    folder = tmp_path / "run"
    with output_folder(folder, overwrite=True), RunFolder(folder, overwrite=True).replacing():
        RunFolder(folder).begin("first", {"rows": []})
        (folder / "checkpoints").mkdir()
        killed = contents(folder)
    with output_folder(folder, overwrite=True):
        assert contents(folder) == killed == {**PLAN, "config.toml": "first"}


def test_kill_at_any_moment_leaves_one_whole_run(run, tmp_path, monkeypatch):
    """Stop before each rename, deletion and write, and open the folder again."""
    outcomes = []
    for moment in range(1000):
        folder = tmp_path / str(moment)
        _copy(run, folder)
        if _replace_until(moment, folder, monkeypatch):
            break
        with output_folder(folder, resume=True):
            outcomes.append(contents(folder))
    new = {**MINE, **PLAN, "config.toml": "new", "adapter/weights": "new", "checkpoints/5/array": "new"}
    assert len(outcomes) > 15
    assert [outcome for outcome in outcomes if outcome not in (OLD, new)] == []
    assert outcomes[0] == OLD and outcomes[-1] == new


class Killed(BaseException):
    pass


def _replace_until(moment, folder, monkeypatch):
    """Replace the run, stopping dead before the call of this number; tell whether there were fewer calls."""
    calls = iter(range(moment))

    def dying(function):
        def call(*args, **options):
            if next(calls, None) is None:
                raise Killed
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync"):
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(run_folder, "restore_previous", lambda folder: None)
        try:
            output = RunFolder(folder, overwrite=True)
            with output.replacing():
                write_run(folder, "new")
        except Killed:
            return False
    return True


def _copy(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def test_files_added_to_a_folder_of_the_run_are_the_users(tmp_path):
    files = RunFiles(tmp_path)
    (tmp_path / "adapter").mkdir()
    files.claim(tmp_path / "adapter")
    (tmp_path / "adapter" / "a").touch()
    assert RunFiles(tmp_path).present() == ["adapter/a"]  # killed before it was complete
    files.seal(tmp_path / "adapter")
    (tmp_path / "adapter" / "mine").touch()
    files = RunFiles(tmp_path)
    assert files.present() == ["adapter/a"]
    files.claim(tmp_path / "adapter")
    (tmp_path / "adapter" / "b").touch()
    files.seal(tmp_path / "adapter")
    assert RunFiles(tmp_path).present() == ["adapter/a", "adapter/b"]


def test_user_files_among_checkpoints_are_not_replaced(run):
    (run / "checkpoints" / "5" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"mine.txt was not written by the run there: move it elsewhere"):
        output_folder(run, overwrite=True).__enter__()


@pytest.mark.parametrize("name", ["", ".", "./", "adapter//a", "../mine", "\0", "a" * 5000])
def test_entries_of_other_forms_are_damage(run, name):
    with (run / MANIFEST).open("a") as file:
        file.write(json.dumps({"path": name}) + "\n")
    assert len(RunFiles(run)._lines.damaged) == 1
    run_folder.set_aside(run)
    assert contents(run).items() >= {"chats.jsonl": "mine", "adapter/notes.txt": "mine"}.items()


def test_files_behind_a_link_stay(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (run / "linked").symlink_to(tmp_path / "elsewhere")
    RunFiles(run).claim(run / "linked" / "mine")
    run_folder.set_aside(run)
    assert (tmp_path / "elsewhere" / "mine").exists()


@pytest.mark.parametrize("output", ["run", "/run"])
def test_files_stay_the_runs_once_they_are_written(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with output_folder(Path(output.replace("/", f"{tmp_path}/"))) as folder:
        with RunFolder(folder).writing("adapter", "rows.npz"):
            (folder / "adapter").mkdir()
            (folder / "adapter" / "weights").write_text("weights")
            (folder / "rows.npz").write_text("rows")
        assert RunFiles(folder).present() == ["adapter/weights", "rows.npz"]


def test_a_run_that_is_restored_is_named(run, caplog):
    with pytest.raises(OSError), RunFolder(run, overwrite=True).replacing():
        raise OSError("full")
    assert f"{run} holds the run again that this one was to replace" in caplog.text


def test_a_run_that_replaces_another_saves_its_own_checkpoints(make_config, tmp_path):
    """Those of steps that the run before has saved too: it is given up for them."""
    for seed in (1, 2):
        assert train(make_config(steps=2, save_every=1, seed=seed, overwrite=seed == 2)) is not None
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]
    listed = set(RunFiles(tmp_path / "run").present())
    assert all(any(name.startswith(f"checkpoints/{step}/") for name in listed) for step in (1, 2))
