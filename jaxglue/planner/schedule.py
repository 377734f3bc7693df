"""When layers run and copies move: the executor's order of dispatch, played through on the GPU and on the link."""

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """Of one layer in one direction."""

    kernels: float
    """Seconds."""
    arriving: float = 0.0
    """Seconds that what it needs takes from the host."""
    leaving: float = 0.0
    """Seconds that what it leaves behind takes to the host."""


def simulate(layers: Sequence[Work], *, depth: int, run_ahead: int) -> float:
    """From the first layer's start to the last one's end.

    What a layer needs is asked for when the one `depth` places earlier starts; a layer is dispatched when what left
    `run_ahead` + 1 places earlier is on the host. Copies of one direction follow each other.
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
