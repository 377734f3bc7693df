"""Pages that are kept for texts to come."""

import numpy as np

from jaxglue.generation.pages import PAGE, PagePool, page_names


def test_named_pages_are_taken_last_and_the_oldest_first():
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(1)
    pool.name(first, [b"a", b"b"])
    pool.name(second, [b"c"])
    pool.give_back(second)
    pool.give_back(first)
    assert len(pool) == 4 and pool.find([b"a", b"b", b"x", b"c"]) == first
    assert pool.kept(first) == 2
    (other,) = pool.take(1)
    assert other not in (*first, *second)  # the one without a name
    assert pool.take(1) == second and pool.find([b"c"]) == []
    assert pool.take(1) == [first[1]] and pool.find([b"a", b"b"]) == first[:1]  # beginnings are kept longest


def test_pages_that_are_held_are_not_taken():
    pool = PagePool(2)
    held = pool.take(1)
    pool.name(held, [b"a"])
    pool.share(pool.find([b"a"]))
    pool.give_back(held)
    assert len(pool) == 1 and pool.kept(held) == 0
    pool.give_back(held)
    assert len(pool) == 2 and sorted(pool.take(2)) == [1, 2]


def test_a_name_says_all_that_precedes_a_page():
    text = np.arange(3 * PAGE + 5)
    names = page_names(text)
    assert len(names) == len(set(names)) == 3
    assert page_names(text[: 2 * PAGE]) == names[:2]
    other = text.copy()
    other[0] += 1
    assert not set(page_names(other)) & set(names)
