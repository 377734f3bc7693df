"""Steps that have been dispatched, and when the device was done with them."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax


class StepResult(NamedTuple):
    """A step that has been dispatched; the arrays may still be computed."""

    step: int
    values: dict[str, jax.Array]
    """loss, learning_rate and, unless layers are updated in the backward pass, grad_norm."""
    tokens: int


class StepsInFlight:
    """Results in the order of their steps. A thread notes when each is there: the host may look much later."""

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(1)
        self._results: deque[tuple[StepResult, Future[float]]] = deque()

    def add(self, result: StepResult) -> None:
        """Takes the result of a step that has just been dispatched."""
        self._results.append((result, self._waiter.submit(_when_done, result)))

    def take(self, *, leave: int) -> Iterator[tuple[StepResult, float]]:
        """Waits for all results but the last few, and hands out each with the time of `time.perf_counter`."""
        while len(self._results) > leave:
            result, done = self._results.popleft()
            yield result, done.result()


def _when_done(result: StepResult) -> float:
    jax.block_until_ready(result.values)
    return time.perf_counter()
