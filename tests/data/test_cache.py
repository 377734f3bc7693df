"""The cache: content-addressed, verified, rebuilt when damaged."""

import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxglue.data.config import DataConfig
from jaxglue.data.prepare import prepare_data
from jaxglue.files.atomic import temporary_prefix


@pytest.fixture
def prepare(tmp_path, make_tokenizer):
    def run(data, **options):
        config = DataConfig(data=data, cache_dir=str(tmp_path / "cache"), seq_len=128, **options)
        return prepare_data(config, make_tokenizer())

    return run


def entry(tmp_path) -> Path:
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


def test_a_file_of_equal_size_and_time_is_read_again(tmp_path, prepare, write_jsonl):
    path = write_jsonl([{"text": "What is 1"}])
    before = os.stat(path)
    first = prepare(path)
    write_jsonl([{"text": "What is 2"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not prepare(path).report.cached and prepare(path).fingerprint != first.fingerprint


def test_equal_bytes_share_one_entry(tmp_path, prepare, write_jsonl):
    path = write_jsonl([{"text": "What is 1"}])
    prepare(path)
    copy = shutil.copy(path, f"{tmp_path}/other.jsonl")
    assert prepare(copy).report.cached
    assert prepare((path, copy)).report.cached


def zero_tokens(folder):
    np.zeros(3, np.int32).tofile(folder / "tokens.int32")


def set_value(file, dtype, value):
    def change(folder):
        array = np.fromfile(folder / file, dtype)
        array[1] = value
        array.tofile(folder / file)

    return change


DAMAGE = {
    "zeroed tokens": zero_tokens,
    "token 10⁶": set_value("tokens.int32", np.int32, 10**6),
    "token −7": set_value("tokens.int32", np.int32, -7),
    "mask 255": set_value("mask.uint8", np.uint8, 255),
    "offset": set_value("offsets.int64", np.int64, 99),
    "truncated": lambda folder: os.truncate(folder / "tokens.int32", 4),
    "missing": lambda folder: (folder / "mask.uint8").unlink(),
    "info": lambda folder: (folder / "info.json").write_text("[" * 100_000),
    "format": lambda folder: (folder / "info.json").write_text((folder / "info.json").read_text().replace("text", "t")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed_said_and_mended(tmp_path, prepare, write_jsonl, damage):
    path = write_jsonl([{"text": "What is 1"}, {"text": "Good"}])
    whole = prepare(path)
    damage(entry(tmp_path))
    mended = prepare(path)
    assert mended.fingerprint == whole.fingerprint and not mended.report.cached
    assert "tokenized again" in str(mended.report)
    assert prepare(path).report.cached


def test_entries_open_to_others_as_the_umask_says(tmp_path, prepare, write_jsonl):
    before = os.umask(0o002)
    try:
        prepare(write_jsonl([{"text": "What is 1"}]))
    finally:
        os.umask(before)
    folder = entry(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o664}


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, prepare, write_jsonl):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"cache_dir .*cache: .*: name a folder of your own with --cache-dir"):
        prepare(write_jsonl([{"text": "What is 1"}]))


def test_a_full_disk_names_the_cache(tmp_path, prepare, write_jsonl):
    path, limits = write_jsonl([{"text": "What is 1"}]), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cache cannot hold the tokenized data: make room, or name .* --cache-dir"):
            prepare(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any((tmp_path / "cache").iterdir())


def test_folders_of_killed_writers_are_removed(tmp_path, prepare, write_jsonl):
    path = write_jsonl([{"text": "What is 1"}])
    prepare(path)
    folder = entry(tmp_path)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = folder.with_name(f"{temporary_prefix(folder)}{dead.stdout.strip()}.00.tmp")
    left.mkdir()
    shutil.rmtree(folder)
    prepare(path)
    assert entry(tmp_path) == folder


def test_a_split_of_files_is_sliced_or_noted(prepare, write_jsonl):
    path = write_jsonl([{"text": f"What is {number}"} for number in range(4)])
    whole = prepare(path, split="held").report
    assert whole.rows == 4 and whole.notes[0].endswith("files have no splits, so all rows are read, not split held")
    part = prepare(path, split="train[:50%]").report
    assert part.rows == 2 and not any("splits" in note for note in part.notes)


def test_files_given_twice_are_noted(tmp_path, prepare, write_jsonl):
    path = write_jsonl([{"text": "What is 1"}])
    assert "data.jsonl is read twice" in prepare((path, path)).report.notes[0]
    copy = shutil.copy(path, f"{tmp_path}/copy.jsonl")
    assert "copy.jsonl is held out and trained on" in prepare(path, eval_data=copy).report.notes[0]
