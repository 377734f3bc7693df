"""Dispatched steps, and when the devices finished them."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax


class StepResult(NamedTuple):
    """A dispatched step, whose values may still be computing."""

    step: int
    values: dict[str, jax.Array]
    """loss, learning_rate and, unless parameters are updated in the backward pass, grad_norm."""
    tokens: int


class StepsInFlight:
    """Queue of results in the order of their steps; a thread notes when each is done, for the host looks later."""

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(1)
        self._results: deque[tuple[StepResult, Future[float]]] = deque()

    def add(self, result: StepResult) -> None:
        """Append the result of a step just dispatched."""
        self._results.append((result, self._waiter.submit(_when_done, result)))

    def take(self, *, leave: int) -> Iterator[tuple[StepResult, float]]:
        """Yield all results but the last `leave`, each with the time it was done, `time.perf_counter`."""
        while len(self._results) > leave:
            result, done = self._results.popleft()
            yield result, done.result()


def _when_done(result: StepResult) -> float:
    jax.block_until_ready(result.values)
    return time.perf_counter()
