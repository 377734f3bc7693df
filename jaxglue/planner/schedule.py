"""Simulation of the executor's order of dispatch: kernels on the GPU, copies on the link."""

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """Kernels and copies of one layer's forward or backward pass, seconds."""

    kernels: float
    arriving: float = 0.0
    """Copy from the host that must end before the kernels start."""
    leaving: float = 0.0
    """Copy to the host that starts when the kernels end."""


def simulate(layers: Sequence[Work], *, depth: int, run_ahead: int) -> float:
    """Return the seconds from the first layer's start to the last one's end; copies of one direction are serial.

    Args:
        layers: in the order in which they run.
        depth: a layer's copy from the host is requested when the layer `depth` earlier starts.
        run_ahead: a layer is dispatched when the layer `run_ahead` + 1 earlier has been copied to the host.
    """
    now = arrived = left = 0.0
    arrivals: list[float] = []
    departures: list[float] = []
    for index, layer in enumerate(layers):
        for following in range(len(arrivals), min(index + depth, len(layers) - 1) + 1):
            asked = now if index else 0.0
            arrived = max(arrived, asked) + layers[following].arriving
            arrivals.append(arrived)
        held_back = departures[index - run_ahead - 1] if index > run_ahead else 0.0
        start = max(now, arrivals[index], held_back)
        now = start + layer.kernels
        left = max(left, now) + layer.leaving
        departures.append(left)
    return now
