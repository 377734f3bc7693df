"""The rows of a failed step in a file that replays it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxglue.data.batch import Answers, Batch
from jaxglue.data.iterator import Step
from jaxglue.hf.files import atomic_file
from jaxglue.ops.segments import PackedSegments

_ANSWERS = ("owners", "used", "desirable", "token_weight", "reference")
_COLUMN = "column "
"""Begins the names of columns' arrays."""
_OPTIONAL = ("gap_starts", "gap_ends", "units")
_ROWS = ("tokens", "targets", "loss_weights")
_SEGMENTS = ("segment_ids", "positions", "starts", "ends", "long")


def save_step(path: Path, step: Step) -> None:
    """Write a step's micro-batches as an `.npz`: stacked, but for the boundaries, whose slots may differ."""
    batches = step.micro_batches
    arrays: dict[str, Any] = {name: np.stack([getattr(batch, name) for batch in batches]) for name in _ROWS}
    arrays |= {name: np.stack([getattr(batch.segments, name) for batch in batches]) for name in _SEGMENTS}
    arrays |= _stacked(_OPTIONAL, [batch.segments for batch in batches])
    arrays |= _stacked(_ANSWERS, [batch.answers for batch in batches])
    arrays |= {_COLUMN + name: np.stack([batch.columns[name] for batch in batches]) for name in batches[0].columns}
    arrays |= {_bounds(index): batch.segments.cu_seqlens for index, batch in enumerate(batches)}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, counts=np.array([step.tokens, step.targets]), **arrays)


def load_step(path: Path) -> Step:
    """Read a step written by `save_step`, for `TrainStep.dispatch`; raise ValueError for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = dict(file)
        tokens, targets = map(int, arrays.pop("counts"))
        batches = tuple(_micro_batch(arrays, index) for index in range(len(arrays["tokens"])))
    except Exception as error:  # zipfile raises errors of many types
        raise ValueError(f"{path} is damaged: {error}") from error
    return Step(micro_batches=batches, tokens=tokens, targets=targets)


def _micro_batch(arrays: dict[str, Any], index: int) -> Batch:
    fields = {name: arrays[name][index] for name in _SEGMENTS}
    others, answers = (
        {name: arrays[name][index] for name in names if name in arrays} for names in (_OPTIONAL, _ANSWERS)
    )
    segments = PackedSegments(**fields | {"long": bool(fields["long"])} | others, cu_seqlens=arrays[_bounds(index)])
    rows = {name: arrays[name][index] for name in _ROWS}
    columns = {name.removeprefix(_COLUMN): arrays[name][index] for name in arrays if name.startswith(_COLUMN)}
    return Batch(**rows, segments=segments, answers=Answers(**answers) if answers else None, columns=columns)


def _stacked(names: Sequence[str], parts: Sequence[Any]) -> dict[str, np.ndarray]:
    """Stack the fields that all parts have."""
    known = [name for name in names if all(getattr(part, name, None) is not None for part in parts)]
    return {name: np.stack([getattr(part, name) for part in parts]) for name in known}


def _bounds(index: int) -> str:
    return f"cu_seqlens_{index}"
