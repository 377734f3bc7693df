"""Programs of prompts' rows: compiled by threads beside one another, those that may come beside the answers, too."""

import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import jax
import numpy as np

from jaxglue.generation.window_sizes import switching_often

_log = logging.getLogger(__name__)


class PromptPrograms:
    """Compiled programs, and those under way, for rows of prompts of one kind of answers."""

    def __init__(self) -> None:
        self._begun = dict[Hashable, Future | None]()

    def compile(
        self, compiler: ThreadPoolExecutor, rows: Iterable[tuple[Any, ...]], compile_row: Callable[[Any], None]
    ) -> None:
        """Let threads compile the programs for rows, once for each shape."""
        for row in rows:
            if (shapes := _shapes(row)) not in self._begun:
                self._begun[shapes] = compiler.submit(copy_context().run, self._compile, compile_row, row)

    def wait_for(self, row: tuple[Any, ...]) -> None:
        """Wait for a thread that compiles a row's programs; where none has begun, the caller's call compiles them."""
        future = self._begun.get(shapes := _shapes(row))
        if future is not None and not future.cancel():
            future.result()
        self._begun[shapes] = None

    def give_up(self) -> None:
        """Leave out what no thread has begun to compile."""
        for shapes, future in list(self._begun.items()):
            if future is not None and future.cancel():
                del self._begun[shapes]

    def wait(self) -> None:
        """Wait for the threads."""
        wait([future for future in self._begun.values() if future is not None])

    @staticmethod
    def _compile(compile_row: Callable[[Any], None], row: Any) -> None:
        try:
            with switching_often():
                compile_row(row)
        except Exception as error:  # a call compiles it again, and says what fails
            _log.warning("a program for %d tokens of prompts was not compiled ahead: %s", row[0].shape[1], error)


def _shapes(row: tuple[Any, ...]) -> Hashable:
    """Return what decides on a row's programs."""
    leaves, treedef = jax.tree.flatten(row)
    return treedef, tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)
