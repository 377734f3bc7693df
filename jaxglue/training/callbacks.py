"""Events of a run, for functions of the user's; importing it loads no JAX."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, Literal

import numpy as np
from jaxtyping import Float32, Int

from jaxglue.training.report import RunSummary

Decision = Literal["stop"] | None
"""Whether a run ends."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Target tokens of held-out data with their predictions, document after document."""

    targets: Int[np.ndarray, " N"]
    predicted: Int[np.ndarray, " N"]
    """Tokens with the largest logits in the targets' places."""
    log_probs: Float32[np.ndarray, " N"]
    """Log-probabilities of the targets."""
    documents: Int[np.ndarray, " N"]
    """Number of the target's document, in the order in which they are evaluated."""
    columns: Mapping[str, Float32[np.ndarray, " N"]] = field(default_factory=dict)
    """The documents' values of the columns that were asked for."""


Metrics = Callable[[Predictions], Mapping[str, float]]
"""Values of held-out data by name, which are recorded and shown as `eval_name`."""


class Callback:
    """Receives the events of a run; override those of interest.

    Values are plain floats, by the names of `metrics.jsonl`. A step's arrive while later steps run, so `"stop"` ends
    the run up to three steps later, as early stopping does: with checkpoint and result. An exception ends the run as
    any error does, after a checkpoint of the steps done.
    """

    def on_start(self, step: int, total_steps: int) -> Decision:
        """Receive the steps done before and those of the whole run, once its weights are loaded."""

    def on_step(self, step: int, values: Mapping[str, float]) -> Decision:
        """Receive loss, gradient norm, learning rate and the objective's metrics of a step."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> Decision:
        """Receive `eval_loss` and further values on held-out data."""

    def on_save(self, step: int, folder: Path) -> Decision:
        """Receive the folder of the checkpoints, in which the one of this step is being written."""

    def on_end(self, summary: RunSummary) -> Decision:
        """Receive the results of the run, which are written."""


class Callbacks:
    """The callbacks of a run, in their order."""

    def __init__(self, callbacks: Sequence[Callback]):
        if not isinstance(callbacks, Sequence):
            raise ValueError(f"callbacks: expected a list of them, got {callbacks!r:.100}")
        for each in callbacks:
            if not isinstance(each, Callback):
                raise ValueError(f"callbacks: expected objects of jaxglue.Callback, got {each!r:.100}")
        self._callbacks = callbacks
        self.why_stopped: str | None = None
        """The end that a callback asked for, in words."""
        self.has_failed = False
        """Whether a callback raised an error, or answered wrongly."""

    def call[**P](self, event: Callable[Concatenate[Callback, P], Decision], *args: P.args, **kwargs: P.kwargs) -> None:
        """Pass an event, named by a method of `Callback`, to all.

        Raises:
            ValueError: an answer other than "stop" and None.
        """
        name, self.has_failed = event.__name__, True
        for each in self._callbacks:
            answer = getattr(each, name)(*args, **kwargs)
            if answer == "stop":
                self.why_stopped = self.why_stopped or f"stopped by {type(each).__name__}.{name}"
            elif answer is not None:
                raise ValueError(f'{type(each).__name__}.{name} returned {answer!r:.100}: return "stop" or None')
        self.has_failed = False


def floats(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers, as plain floats: a line of metrics may also say that one is unknown."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
