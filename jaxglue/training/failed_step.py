"""The rows of a failed step in a file that replays it."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import Step
from jaxglue.hf.files import atomic_file
from jaxglue.ops.segments import PackedSegments

_SEGMENTS = tuple(PackedSegments.__dataclass_fields__)
_ROWS = ("tokens", "targets", "loss_weights")


def save_step(path: Path, step: Step) -> None:
    """Write a step's micro-batches, stacked, as an `.npz`."""
    batches = step.micro_batches
    arrays: dict[str, Any] = {name: np.stack([getattr(batch, name) for batch in batches]) for name in _ROWS}
    arrays |= {name: np.stack([getattr(batch.segments, name) for batch in batches]) for name in _SEGMENTS}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, counts=np.array([step.tokens, step.targets]), **arrays)


def load_step(path: Path) -> Step:
    """Read a step written by `save_step`, for `TrainStep.dispatch`."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Any] = dict(file)
    tokens, targets = map(int, arrays.pop("counts"))
    batches = (
        Batch(
            **{name: arrays[name][index] for name in _ROWS},
            segments=PackedSegments(**{name: arrays[name][index] for name in _SEGMENTS}),
        )
        for index in range(len(arrays["tokens"]))
    )
    return Step(micro_batches=tuple(batches), tokens=tokens, targets=targets)
