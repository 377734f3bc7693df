"""Features of images on disk: read again to the bit, damaged ones found, within the disk's room."""

import logging

import ml_dtypes
import numpy as np
import pytest

from jaxglue.training import feature_files
from jaxglue.training.feature_files import FeatureFiles

KEYS = [(bytes([number]) * 16, 4, 2 * number) for number in range(1, 4)]


def opened(folder, *computed_by, dtype=ml_dtypes.bfloat16):
    return FeatureFiles(folder, computed_by, 8, dtype)


@pytest.fixture
def kept(tmp_path):
    files = opened(tmp_path, "tower")
    values = {key: np.random.default_rng(key[2]).normal(size=(key[2], 8)).astype(ml_dtypes.bfloat16) for key in KEYS}
    assert all(files.write(key, features) for key, features in values.items())
    return files, values


def test_a_later_run_reads_what_was_written(tmp_path, kept):
    _, values = kept
    found = opened(tmp_path, "tower").read([*KEYS, (b"x" * 16, 4, 2)])
    assert found.keys() == values.keys()
    for key, features in values.items():
        np.testing.assert_array_equal(found[key].view(np.uint16), features.view(np.uint16))


def test_another_tower_dtype_or_version_has_other_files(tmp_path, kept, monkeypatch):
    assert KEYS[0] not in opened(tmp_path, "other tower")
    assert KEYS[0] not in opened(tmp_path, "tower", dtype=np.float32)
    monkeypatch.setattr(feature_files, "version", lambda package: f"another {package}")
    assert KEYS[0] not in opened(tmp_path, "tower")


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone"])
def test_a_damaged_file_is_said_and_forgotten(tmp_path, kept, damage, caplog):
    files, values = kept
    path = files.folder / f"{KEYS[1][0].hex()}-4x4"
    data = path.read_bytes()
    for number in range(0, 8 * len(data), 67) if damage == "bit" else [0]:
        changed = bytearray(data)
        changed[number // 8] ^= 1 << number % 8
        path.write_bytes({"bit": changed, "cut": data[:-16]}.get(damage, b""))
        if damage == "gone":
            path.unlink()
        again = opened(tmp_path, "tower")
        again._names.add(path.name)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert again.read(KEYS).keys() == values.keys() - {KEYS[1]}
        assert KEYS[1] not in again and [str(path) in line.message for line in caplog.records] == [True]
    assert again.write(KEYS[1], values[KEYS[1]]) and again.read(KEYS).keys() == values.keys()


def test_half_of_the_free_disk_is_left(tmp_path, monkeypatch):
    usage = feature_files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(feature_files.shutil, "disk_usage", lambda folder: usage._replace(free=200))
    files = opened(tmp_path, "tower")
    features = np.zeros((4, 8), ml_dtypes.bfloat16)
    assert files.write(KEYS[0], features) and not files.write(KEYS[1], features) and files.write(KEYS[0], features)
    assert len(list(files.folder.iterdir())) == 1
