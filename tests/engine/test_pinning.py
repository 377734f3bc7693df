"""Pinned memory whose pages several threads take."""

import ctypes
import mmap
import time

from jaxglue.engine.pinning import _new_parts, pin, taking_pages_of_next_mapping

SIZE = 2**26


def resident_share(memory: mmap.mmap) -> float:
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_pages_of_a_new_mapping_are_taken():
    with taking_pages_of_next_mapping(SIZE):
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        time.sleep(0.1)
    assert resident_share(memory) == 1


def test_only_new_parts_of_mappings_count():
    before = [range(10, 20), range(30, 40)]
    after = [range(5, 20), range(30, 50), range(60, 70)]
    assert list(_new_parts(before, after)) == [range(5, 10), range(40, 50), range(60, 70)]


def test_pool_is_pinned_without_a_new_mapping():
    pin(2**20)
