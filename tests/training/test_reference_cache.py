"""The cached reference on disk: damage of any kind is noticed, and the values are computed again."""

import numpy as np
import pytest

from jaxglue.training.reference_cache import _read, _write


@pytest.fixture
def path(tmp_path):
    _write(tmp_path / "reference", np.arange(6, dtype=np.float32).reshape(3, 2))
    return tmp_path / "reference"


def test_written_values_are_read(path):
    assert _read(path, 3).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert _read(path, 2) is None
    assert _read(path.with_name("absent"), 3) is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 35, 52, 55])
def test_truncated_file_is_not_read(path, size):
    path.write_bytes(path.read_bytes()[:size])
    assert _read(path, 3) is None


@pytest.mark.parametrize("byte", [0, 31, 32, 55])
def test_flipped_bit_is_noticed(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)
    assert _read(path, 3) is None
