"""Stores on disk: counts of targets block by block, and mapped pages given back."""

import mmap
import os

import numpy as np
import pytest

from jaxglue.data import store as store_module
from jaxglue.data.encode import Encoded
from jaxglue.data.store import join_stores
from jaxglue.data.store_files import open_store, write_store


@pytest.fixture
def store(tmp_path):
    """Documents of 0 to 39 tokens with random masks, the first and the last empty."""
    rng = np.random.default_rng(0)
    lengths = np.array([0, *rng.integers(0, 40, 60), 0], np.int32)
    size = int(lengths.sum())
    write_store(tmp_path / "s", [Encoded(np.arange(size, dtype=np.int32), rng.integers(0, 2, size, np.uint8), lengths)])
    return open_store(tmp_path / "s")


@pytest.mark.parametrize("block", [1, 7, 100, 2**24])
@pytest.mark.parametrize("most", [1, 2, 13, 1000])
def test_targets_are_counted_block_by_block(store, block, most, monkeypatch):
    monkeypatch.setattr(store_module, "_BLOCK", block)
    ends = store.offsets[:-1] + np.minimum(store.lengths, most)
    expected = [int(store.mask[a + 1 : b].sum()) for a, b in zip(store.offsets[:-1], ends, strict=True)]
    np.testing.assert_array_equal(store.targets_within(ends), expected)


def test_released_pages_are_read_again(store):
    both = join_stores([store, store])
    before = both.tokens[np.arange(len(both.tokens))]
    assert isinstance(store.tokens.base, mmap.mmap)  # else nothing is released
    both.release()
    np.testing.assert_array_equal(both.tokens[np.arange(len(both.tokens))], before)


def test_files_that_change_while_they_are_used_are_refused(tmp_path, store):
    (tmp_path / "s" / "tokens.int32").rename(tmp_path / "moved")
    store.check()
    os.truncate(tmp_path / "moved", 4)
    with pytest.raises(ValueError, match=r"tokens.int32 was changed while it was in use"):
        join_stores([store, store]).check()
