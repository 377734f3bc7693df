"""The reference's log-probabilities of all answers, computed before training and kept on disk."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from jaxglue.data.answers import AnswerDataset
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.data.store_files import content_key
from jaxglue.distributed import Processes
from jaxglue.engine.array_checks import check_parameters
from jaxglue.files.atomic import atomic_file
from jaxglue.hf.export import on_host
from jaxglue.settings.config import stable_repr
from jaxglue.sharding.mesh import place_batch, process_batch_shard
from jaxglue.training.divergence import bad_weights
from jaxglue.training.run import Run
from jaxglue.training.step import StepParts, TrainState

LogProbs = Float32[np.ndarray, "units 2"]
_VERSION = 3
"""Increment when the same weights and rows yield other values."""
_ADAPTER = re.compile(r"\.lora_\w+$")
_TF32 = 2.0**-10
"""Rounding of float32 products on a GPU, of bfloat16 models and where JAX's setting says so."""
_ROUNDINGS = 8
"""Roundings by which a token's log-probability may differ between two programs of one model."""


def add_reference(run: Run, parts: StepParts, state: TrainState, processes: Processes) -> str | None:
    """Give the run's batches the log-probabilities of a cached reference; return lines about it.

    All processes call this with the weights that training begins with. None where no cached reference is needed.

    Raises:
        ValueError: weights or log-probabilities that are not finite, or a cache that not all processes see.
    """
    if not run.caches_reference:
        return None
    if run.asked.fp8:
        raise ValueError("--matmul fp8 with a cached reference is not supported: use --reference-cache off")
    notes = []
    assert isinstance(run.batches, BatchIterator)  # no stream has answers
    weights = _weights(run, state)
    data: list[BatchIterator | EvalBatches] = [run.batches]
    data += [run.eval_batches] if run.eval_batches else []
    for batches in data:
        dataset = batches.dataset
        assert isinstance(dataset, AnswerDataset)
        path = run.cache / f"reference-{_key(run, dataset, weights)}.float32"
        known = processes.all_gather_object(_read(path, len(dataset)) is not None)[0]
        values = _read(path, len(dataset)) if known else None
        if known and values is None:
            raise ValueError(f"{path}: process 0 reads this file and another cannot: use a --cache-dir that all share")
        if values is not None and not _agrees(values, run, parts, state, dataset):
            notes.append(f"{path} differs from the first rows' log-probabilities under this model: computed anew")
            values = None
        if fresh := values is None:
            values = _compute(run, parts, state, dataset, processes)
            if processes.is_main:
                _write(path, values)
        batches.replace_dataset(replace(dataset, reference=values))
        notes.append(f"reference's log-probabilities: {'written to' if fresh else 'read from'} {path}")
    return "\n".join(notes)


def _weights(run: Run, state: TrainState) -> list[tuple[str, str]]:
    """Return names and digests of all arrays that the reference consists of.

    Adapters that training begins with are no part of it: their product is zero.
    """
    checks = [pair for tree in (state.frozen, state.trainable) for pair in check_parameters(tree)]
    if bad := next((name for name, check in checks if not check.is_finite), None):
        raise ValueError(bad_weights(run.base.name, bad))
    zero = run.workload.lora is not None and run.base.adapter is None
    return [(name, check.digest) for name, check in checks if not (zero and _ADAPTER.search(name))]


def _key(run: Run, dataset: TokenDataset, weights: list[tuple[str, str]]) -> str:
    """Name data, weights, and the computation: all that the values depend on."""
    settings = [
        repr(run.model),
        *([] if run.model.vision is None else [repr(run.model.vision)]),
        "" if run.base.adapter is None else stable_repr(replace(run.base.adapter.config, dropout=0.0), ()),
        str(run.dtype),
        run.remat.attention,
        str(jax.config.jax_default_matmul_precision),
        jax.local_devices()[0].device_kind,
        run.rows.seq_len,
    ]
    return content_key(_VERSION, dataset.fingerprint, weights, *settings)


def _agrees(values: LogProbs, run: Run, parts: StepParts, state: TrainState, dataset: AnswerDataset) -> bool:
    """Tell whether cached values are those of the first batch, but for rounding."""
    units, found = next(_log_probs(run, parts, state, dataset))
    rounding = _ROUNDINGS * max(float(jnp.finfo(run.dtype).eps), _TF32)
    return bool((np.abs(values[units] - found) <= rounding * np.sqrt(dataset.sizes[units] + 1)).all())


def _compute(run: Run, parts: StepParts, state: TrainState, dataset: AnswerDataset, processes: Processes) -> LogProbs:
    values = np.zeros((len(dataset), 2), np.float32)
    progress = DataProgress() if processes.is_main else NoProgress()
    done = 0.0
    with progress.stage("computing the reference's log-probabilities", 4 * float(dataset.lengths.sum())) as advance:
        for units, found in _log_probs(run, parts, state, dataset):
            values[units] = found
            done += 4 * float(dataset.lengths[units].sum())
            advance(done)
    if bad := int((~np.isfinite(values)).any(1).sum()):
        raise ValueError(
            f"the reference's log-probabilities of {bad} of {len(values)} rows are not finite: "
            f"the model in {run.base.name} cannot score them"
        )
    return values


def _log_probs(
    run: Run, parts: StepParts, state: TrainState, dataset: AnswerDataset
) -> Iterator[tuple[Int[np.ndarray, "units"], LogProbs]]:
    """Yield units and their answers' log-probabilities, batch after batch."""
    batch_size = run.rows.batch_size
    index, count = process_batch_shard(parts.mesh, batch_size)
    batches = EvalBatches(
        dataset,
        seq_len=run.rows.seq_len,
        batch_size=batch_size,
        max_segments=run.batches.max_segments,
        process_index=index,
        process_count=count,
    )
    for rows, batch in zip(batches.documents(), batches, strict=True):
        found = on_host(parts.executor.answer_log_probs(state.trainable, state.frozen, place_batch(batch, parts.mesh)))
        yield (
            np.concatenate(rows),
            np.concatenate([values[: len(own)] for own, values in zip(rows, found, strict=True)]),
        )


def _read(path: Path, units: int) -> LogProbs | None:
    """Return the values of a file; None if it is absent, damaged, of another length or not finite."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, values = content[:32], content[32:]
    is_whole = hashlib.sha256(values).digest() == digest and len(values) == 2 * units * np.float32().nbytes
    if not is_whole:
        return None
    read = np.frombuffer(values, np.float32).reshape(units, 2).copy()
    return read if np.isfinite(read).all() else None


def _write(path: Path, values: LogProbs) -> None:
    """Write the values after their SHA-256."""
    content = values.tobytes()
    with atomic_file(path) as temporary:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
