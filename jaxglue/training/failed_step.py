"""The rows of a failed step in a file that replays it."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import Step
from jaxglue.hf.files import atomic_file
from jaxglue.ops.segments import PackedSegments

_ROWS = ("tokens", "targets", "loss_weights")
_SEGMENTS = ("segment_ids", "positions", "starts", "ends", "long")


def save_step(path: Path, step: Step) -> None:
    """Write a step's micro-batches as an `.npz`: stacked, but for the boundaries, whose slots may differ."""
    batches = step.micro_batches
    arrays: dict[str, Any] = {name: np.stack([getattr(batch, name) for batch in batches]) for name in _ROWS}
    arrays |= {name: np.stack([getattr(batch.segments, name) for batch in batches]) for name in _SEGMENTS}
    arrays |= {_bounds(index): batch.segments.cu_seqlens for index, batch in enumerate(batches)}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, counts=np.array([step.tokens, step.targets]), **arrays)


def load_step(path: Path) -> Step:
    """Read a step written by `save_step`, for `TrainStep.dispatch`."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Any] = dict(file)
    tokens, targets = map(int, arrays.pop("counts"))
    batches = tuple(_micro_batch(arrays, index) for index in range(len(arrays["tokens"])))
    return Step(micro_batches=batches, tokens=tokens, targets=targets)


def _micro_batch(arrays: dict[str, Any], index: int) -> Batch:
    fields = {name: arrays[name][index] for name in _SEGMENTS}
    segments = PackedSegments(**fields | {"long": bool(fields["long"])}, cu_seqlens=arrays[_bounds(index)])
    return Batch(**{name: arrays[name][index] for name in _ROWS}, segments=segments)


def _bounds(index: int) -> str:
    return f"cu_seqlens_{index}"
