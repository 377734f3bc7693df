"""Iterator over the training batches of a stream, with a checkpointable state."""

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

from jaxglue.data.batch import TokenDataset
from jaxglue.data.iterator import Step, Steps, check_batch, check_run, read_ahead
from jaxglue.data.mixing import plan_dataset_epoch
from jaxglue.data.stream import Position, TokenStream, Window
from jaxglue.ops.segments import segment_bucket


class StreamIterator(Iterator[Step]):
    """Endless iterator over optimizer steps of a stream; each window is shuffled and packed by itself.

    Empty rows complete a window's last step. The next window is tokenized while one is trained on.

    Args:
        stream: of windows.
        first: the stream's first window.
        steps: of the run, for which no epoch is known.
        batch_size: B, rows in a micro-batch over all processes.
        gradient_accumulation_steps: micro-batches in a step.
        process_index, process_count: select this process's rows; batches and state do not depend on their number.

    Raises:
        ValueError: a size below 1, or a batch size not divisible by the processes.
    """

    def __init__(
        self,
        stream: TokenStream,
        first: Window,
        *,
        steps: int,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._sizes: dict[str, Any] = {
            "batch_size": batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        check_batch(process_count=process_count, **self._sizes)
        self._processes: dict[str, Any] = {"process_index": process_index, "process_count": process_count}
        self._stream, self._seq_len, self._seed = stream, stream.config.row_tokens, stream.config.seed
        self.total_steps = self.steps_per_epoch = steps
        """Optimizer steps of the run."""
        self.max_segments = segment_bucket(self._plan(first, None).max_segments)
        """Segment slots S of every batch."""
        self._windows = stream.windows(1, first.end)
        self._next: Future[Window] | None
        self._start(first)

    @property
    def dataset(self) -> TokenDataset:
        """Return the present window's documents."""
        return self._window.dataset

    def __iter__(self) -> "StreamIterator":
        return self

    def __next__(self) -> Step:
        if self._next is None:
            self._next = _in_background(self._windows)
        try:
            return next(self._steps)
        except StopIteration:
            self._steps.close()
            self._start(self._next.result())
            return next(self)

    def get_state(self) -> dict[str, Any]:
        """Return a JSON-able state: the window's number and places, the next step in it, and the settings behind it."""
        window = {"index": self._window.index, "start": [list(place) for place in self._window.start]}
        return {"window": window, "steps": self._steps.get_state(), "run": self._run()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`; its window is read and tokenized again.

        Raises:
            ValueError: data, seed or sizes differ from the state's, by name.
        """
        check_run(state["run"], self._run())
        self.close()
        window = state["window"]
        self._windows = self._stream.windows(window["index"], [Position(*place) for place in window["start"]])
        self._start(next(self._windows))
        self._steps.set_state(state["steps"])

    def close(self) -> None:
        """Stop reading, after the window that is being tokenized."""
        self._steps.close()
        if self._next:
            self._next.exception()
        self._windows.close()

    def _run(self) -> dict[str, Any]:
        fixed = {"data": self._stream.fingerprint, "seed": self._seed, "seq_len": self._seq_len}
        return {**fixed, **self._sizes, "max_segments": self.max_segments}

    def _plan(self, window: Window, max_segments: int | None):
        run: dict[str, Any] = {"seq_len": self._seq_len, "seed": self._seed, "epoch": window.index}
        return plan_dataset_epoch(window.dataset, **run, max_segments=max_segments)

    def _start(self, window: Window) -> None:
        """Begin a window; its first step starts the tokenizing of the next."""
        self._window, self._next = window, None
        self._steps = read_ahead(
            Steps(
                dataset=window.dataset,
                plan=self._plan(window, self.max_segments),
                seq_len=self._seq_len,
                max_segments=self.max_segments,
                **self._sizes,
                **self._processes,
            )
        )


def _in_background(windows: Iterator[Window]) -> Future[Window]:
    """Return the next window of a generator that a daemon thread runs, so that the process may end meanwhile."""
    future: Future[Window] = Future()

    def run() -> None:
        try:
            future.set_result(next(windows))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="stream", daemon=True).start()
    return future
