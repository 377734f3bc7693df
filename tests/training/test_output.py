import os
import subprocess
import sys

import pytest

from jaxglue.training.run_folder import RunFiles, check_inputs, output_folder


@pytest.fixture
def run_folder(tmp_path):
    with output_folder(tmp_path / "run") as folder:
        (folder / "metrics.jsonl").write_text("{}\n")
        (folder / "checkpoints" / "1").mkdir(parents=True)
    return folder


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_new_folder_is_created(tmp_path):
    with output_folder(tmp_path / "a" / "b") as folder:
        assert folder.is_dir()


def test_folder_in_use_names_its_process(tmp_path):
    message = rf"in use by process {os.getpid()} on .*: wait for it, stop it, or choose"
    with output_folder(tmp_path / "run") as folder:
        for written in (False, True):
            if written:
                (folder / "metrics.jsonl").touch()
            with pytest.raises(ValueError, match=message), output_folder(folder):
                pass
    with output_folder(folder, resume=True):
        pass


def test_crash_frees_the_folder(tmp_path):
    crash = (
        "import os, pathlib, sys; from jaxglue.training.run_folder import output_folder\n"
        "with output_folder(pathlib.Path(sys.argv[1])) as f: (f / 'x').touch(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", crash, str(tmp_path / "run")], check=False)
    assert done.returncode == -9
    with output_folder(tmp_path / "run", resume=True) as folder:
        assert files(folder) == ["x"]


def test_earlier_run_needs_resume_or_overwrite(run_folder):
    with pytest.raises(ValueError, match="holds a run: continue it with --resume, or replace it with --overwrite"):
        output_folder(run_folder).__enter__()
    with output_folder(run_folder, resume=True):
        assert files(run_folder) == ["checkpoints", "metrics.jsonl"]
    with pytest.raises(ValueError, match="has no list of the files that its run wrote"):
        output_folder(run_folder, overwrite=True).__enter__()


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds files of something else"):
        output_folder(tmp_path, overwrite=overwrite).__enter__()
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match="nowhere holds no run to continue"):
        output_folder(tmp_path / "nowhere", resume=True).__enter__()


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        output_folder(tmp_path, resume=True, overwrite=True).__enter__()


def test_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="is a file, or a link to nothing"):
            output_folder(tmp_path / name).__enter__()
    with pytest.raises(ValueError, match=r"file/below cannot be made, as .*file is a file: choose another"):
        output_folder(tmp_path / "file/below").__enter__()


@pytest.mark.parametrize("link", ["metrics.jsonl", "checkpoints", "adapter/tokenizer.json"])
def test_symbolic_links_are_refused(run_folder, tmp_path, link):
    (tmp_path / "elsewhere").write_text("mine")
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "checkpoints" / "1").rmdir()
    (run_folder / "checkpoints").rmdir()
    (run_folder / link).parent.mkdir(exist_ok=True)
    (run_folder / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a symbolic link, and a run writes through none"):
        output_folder(run_folder, resume=True).__enter__()
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_inputs_inside_the_replaced_run_are_refused(run_folder):
    files = RunFiles(run_folder)
    files.claim(run_folder / "metrics.jsonl")
    (run_folder / "chats.jsonl").touch()
    check_inputs(run_folder, [run_folder / "chats.jsonl", run_folder.parent, "hf:owner/name"])
    for path in (run_folder / "metrics.jsonl", run_folder):
        with pytest.raises(ValueError, match=r"--overwrite would delete .*, which this run reads"):
            check_inputs(run_folder, [path])
