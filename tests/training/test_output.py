import os
import subprocess
import sys

import pytest

from jaxglue.training.output import output_folder


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
    with (
        output_folder(tmp_path / "run") as folder,
        pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*: wait for it, stop it, or choose"),
        output_folder(folder),
    ):
        pass
    with output_folder(folder):
        pass


def test_crash_frees_the_folder(tmp_path):
    crash = (
        "import os, pathlib, sys; from jaxglue.training.output import output_folder\n"
        "with output_folder(pathlib.Path(sys.argv[1])) as f: (f / 'x').touch(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", crash, str(tmp_path / "run")], check=False)
    assert done.returncode == -9
    with output_folder(tmp_path / "run", resume=True) as folder:
        assert files(folder) == ["x"]


def test_earlier_run_needs_resume_or_overwrite(run_folder):
    with pytest.raises(ValueError, match="holds a run: continue it with --resume, or delete it with --overwrite"):
        output_folder(run_folder).__enter__()
    with output_folder(run_folder, resume=True):
        assert files(run_folder) == ["checkpoints", "metrics.jsonl"]
    with output_folder(run_folder, overwrite=True):
        assert files(run_folder) == []


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
    with pytest.raises(ValueError, match="is a file"):
        output_folder(tmp_path / "file").__enter__()
