"""Python's collector of reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Stop the collector for imports and traces: they create millions of objects, of which most live on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_out_what_lives_on() -> None:
    """Collect garbage, and leave all else out of later collections: the millions of objects of imports and programs.

    A collection of all would hold up every thread for some tenths of a second.
    """
    gc.collect()  # or garbage would stay until the end, too
    gc.freeze()
