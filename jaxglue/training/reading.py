"""Held-out parts of rows that are read, under a model in training, and what its folder says of how it is read."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxglue.data.batch import Batch, Reads
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.reads import ReadDataset
from jaxglue.hf.reading import write_record
from jaxglue.models.parameters import Params
from jaxglue.objectives.reading import PartOutputs, ReadObjective, part_outputs
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.run import Run
from jaxglue.training.step import StepParts


def read_parts(parts: StepParts, trainable: Params, frozen: Params, batches: Iterable[Batch]) -> PartOutputs:
    """Return what a model gives for the parts of all processes' batches."""
    whole = jax.jit(lambda found: found, out_shardings=parts.layout.sharding(PartitionSpec()))

    def outputs() -> Iterator[tuple[Reads, np.ndarray]]:
        for batch in batches:
            placed = place_batch(batch, parts.mesh)
            found = placed.reads, parts.executor.read(trainable, frozen, placed)
            yield jax.device_get(found if parts.mesh is None else whole(found))

    return part_outputs(outputs())


def evaluate_reads(parts: StepParts, trainable: Params, frozen: Params, batches: EvalBatches) -> dict[str, float]:
    """Return the metrics of held-out parts, and what the order of options changes where training permutes it."""
    objective, dataset = cast(ReadObjective, parts.run.objective), cast(ReadDataset, batches.dataset)
    found = read_parts(parts, trainable, frozen, batches)
    values = objective.measure(found, dataset)
    if dataset.task.permutes_options:
        other = batches.on(dataset.with_permuted_options())
        values |= objective.compare_orders(found, read_parts(parts, trainable, frozen, other))
    return {f"eval_{name}": value for name, value in values.items()}


def describe_reads(run: Run, parts: StepParts, trainable: Params, frozen: Params, folder: Path, *, write: bool) -> None:
    """Write how a result is read into its folder, with what is fitted on held-out parts. All processes call it."""
    objective = cast(ReadObjective, run.objective)
    fitted: dict[str, Any] = {}
    if run.eval_batches is not None:
        found = read_parts(parts, trainable, frozen, run.eval_batches)
        fitted = objective.fit(found, cast(ReadDataset, run.eval_batches.dataset))
    if write:
        system = run.recorded.data.system
        write_record(folder, objective.kind, {**({"system": system} if system else {}), **objective.record(), **fitted})
