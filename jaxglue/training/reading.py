"""Held-out parts of rows that are read, under a model in training, and what its folder says of how it is read."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxglue.data.batch import Batch, Reads
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.reads import ReadDataset
from jaxglue.files.json_file import write_json
from jaxglue.generation.diagram import draw_reliability
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.reading import write_record
from jaxglue.hf.sentence_transformers import write_folder
from jaxglue.models.parameters import Params
from jaxglue.models.wrapper import with_text
from jaxglue.objectives.calibration import Bin
from jaxglue.objectives.reading import PartOutputs, ReadObjective, part_outputs
from jaxglue.sharding.mesh import place_batch
from jaxglue.training.run import Run
from jaxglue.training.step import StepParts
from jaxglue.ui.run_files import RELIABILITY


class HeldOut(NamedTuple):
    """What a model gives for held-out parts, and the sums of their losses."""

    found: PartOutputs
    sums: np.ndarray


def read_parts(parts: StepParts, trainable: Params, frozen: Params, batches: Iterable[Batch]) -> HeldOut:
    """Return what a model gives for the parts of all processes' batches."""
    objective = cast(ReadObjective, parts.run.objective)
    sums: list[Any] = []
    sums_of = jax.jit(objective.sums_of)
    whole = jax.jit(lambda found: found, out_shardings=parts.layout.sharding(PartitionSpec()))

    def outputs() -> Iterator[tuple[Reads, np.ndarray]]:
        for batch in batches:
            placed = place_batch(batch, parts.mesh)
            found = placed.reads, parts.executor.read(trainable, frozen, placed)
            if not objective.two_passes:
                sums.append(sums_of(found[1], found[0]))
            yield jax.device_get(found if parts.mesh is None else whole(found))

    found = part_outputs(outputs())
    return HeldOut(found, np.sum(jax.device_get(sums), 0))


def evaluate_reads(parts: StepParts, trainable: Params, frozen: Params, batches: EvalBatches) -> dict[str, float]:
    """Return the metrics of held-out parts, and what the order of options changes where training permutes it."""
    objective, dataset = cast(ReadObjective, parts.run.objective), cast(ReadDataset, batches.dataset)
    held_out = read_parts(parts, trainable, frozen, batches)
    means: Any = held_out.sums / batches.targets
    values = {} if objective.two_passes else {"loss": float(objective.loss(means))}
    values |= {} if objective.two_passes else {key: float(value) for key, value in objective.metrics(means).items()}
    values |= objective.measure(held_out.found, dataset)
    if dataset.task.permutes_options:
        other = read_parts(parts, trainable, frozen, batches.on(dataset.with_permuted_options()))
        values |= objective.compare_orders(held_out.found, other.found)
    return {f"eval_{name}": value for name, value in values.items()}


def describe_reads(run: Run, parts: StepParts, trainable: Params, frozen: Params, folder: Path, *, write: bool) -> None:
    """Write how a result is read into its folder, with what is fitted on held-out parts. All processes call it."""
    objective = cast(ReadObjective, run.objective)
    fitted: dict[str, Any] = {}
    if run.eval_batches is not None:
        found = read_parts(parts, trainable, frozen, run.eval_batches).found
        fitted = objective.fit(found, cast(ReadDataset, run.eval_batches.dataset))
    if not write:
        return
    lora, width = run.lora is not None, run.model.hidden_size
    write_reads(folder, objective, fitted, system=run.recorded.data.system, hidden_size=width, is_adapter=lora)
    if bins := fitted.get("reliability"):
        draw_reliability([Bin(*each) for each in bins], folder.parent / "reliability.png")
        write_json(folder.parent / RELIABILITY, {"bins": bins, **fitted["held_out"]})


def write_reads(
    folder: Path,
    objective: ReadObjective,
    fitted: Mapping[str, Any],
    *,
    system: str,
    hidden_size: int,
    is_adapter: bool,
) -> None:
    """Write into a result's folder how it is read.

    Args:
        folder: of an adapter, or of a model.
        objective: that it was trained by.
        fitted: values that were fitted on held-out parts; empty where nothing was.
        system: message of questions, or "".
        hidden_size: D, of the model.
        is_adapter: the folder holds an adapter.
    """
    record = objective.record()
    write_record(folder, objective.kind, {**({"system": system} if system else {}), **record, **fitted})
    if objective.kind == "embed":
        write_folder(folder, record, hidden_size)
        if record["bidirectional"] and not is_adapter:
            write_json(folder / "config.json", with_text(read_config(folder), is_causal=False))
