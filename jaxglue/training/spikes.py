"""Spikes of loss and gradient norm: steps whose update is left out."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxglue.training.metrics import Diverged

_WINDOW = 128
"""Latest accepted steps that mean and deviation are taken over."""
_FEWEST = 16
"""Steps before which only values that are not finite are spikes."""
_MOST_IN_A_ROW = 10
"""Spikes in a row after which the run ends: the weights, not the rows, are to blame."""


class Spikes:
    """Decides step by step whether loss or gradient norm is beyond `sigma` deviations above its mean."""

    def __init__(self, sigma: float):
        self._sigma, self._in_a_row = sigma, 0
        self._values: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in ("loss", "grad_norm")}
        self.steps: list[int] = []
        """Steps left out so far."""

    def accepts(self, step: int, values: Mapping[str, float]) -> bool:
        """Tell whether the update of a step may be applied.

        Raises:
            Diverged: too many steps in a row are spikes.
        """
        if not any(self._is_spike(name, values[name]) for name in self._values):
            self._in_a_row = 0
            for name, window in self._values.items():
                window.append(values[name])
            return True
        self.steps.append(step)
        self._in_a_row += 1
        if self._in_a_row == _MOST_IN_A_ROW:
            raise Diverged(step, f"the last {_MOST_IN_A_ROW} steps were spikes, {_shown(values)}")
        return False

    def get_state(self) -> dict[str, Any]:
        """Return a JSON-able state."""
        return {
            "values": {name: list(window) for name, window in self._values.items()},
            "steps": self.steps,
            "in_a_row": self._in_a_row,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self._values = {name: deque(window, maxlen=_WINDOW) for name, window in state["values"].items()}
        self.steps, self._in_a_row = list(state["steps"]), state["in_a_row"]

    def _is_spike(self, name: str, value: float) -> bool:
        window = self._values[name]
        if not math.isfinite(value):
            return True
        return len(window) >= _FEWEST and value > float(np.mean(window) + self._sigma * np.std(window))


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
