"""The reference's log-probabilities of all answers, computed before training and kept on disk."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from jaxglue.atomic import atomic_file
from jaxglue.data.answers import AnswerDataset
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.data.store import content_key, file_digest
from jaxglue.distributed import Processes
from jaxglue.hf.export import on_host
from jaxglue.hf.identity import weights_digest
from jaxglue.sharding.mesh import place_batch, process_batch_shard
from jaxglue.training.setup import Run
from jaxglue.training.step import TrainStep

LogProbs = Float32[np.ndarray, "units 2"]


def add_reference(run: Run, model: TrainStep, mesh: Mesh | None, processes: Processes) -> str | None:
    """Give the run's batches the log-probabilities of a cached reference; return a line about it.

    All processes call this with the weights that training begins with. None where no cached reference is needed.
    """
    if not run.caches_reference:
        return None
    if run.config.model.matmul == "fp8":
        raise ValueError("--matmul fp8 with a cached reference is not supported: use --reference-cache off")
    notes = []
    assert isinstance(run.batches, BatchIterator)  # no stream has answers
    parts: list[BatchIterator | EvalBatches] = [run.batches]
    parts += [run.eval_batches] if run.eval_batches else []
    for batches in parts:
        dataset = batches.dataset
        assert isinstance(dataset, AnswerDataset)
        path = Path(run.config.data.cache_dir) / f"reference-{_key(run, dataset)}.float32"
        known = processes.all_gather_object(_read(path, len(dataset)) is not None)[0]
        values = _read(path, len(dataset)) if known else _compute(run, model, mesh, dataset, processes)
        if values is None:
            raise ValueError(f"{path}: process 0 reads this file and another cannot: use a --cache-dir that all share")
        if not known and processes.is_main:
            _write(path, values)
        batches.replace_dataset(replace(dataset, reference=values))
        notes.append(f"{'read from' if known else 'written to'} {path}")
    return f"reference's log-probabilities: {', '.join(notes)}"


def _key(run: Run, dataset: TokenDataset) -> str:
    """Name the reference's weights and the data."""
    config = run.config
    adapter = config.model.adapter and file_digest(config.model.adapter / "adapter_model.safetensors")
    weights = f"random {config.data.seed}" if config.model.random_weights else weights_digest(config.model.folder)
    settings = [
        repr(run.model),
        str(config.model.compute_dtype),
        config.model.storage,
        str(adapter),
        config.data.row_tokens,
    ]
    return content_key(dataset.fingerprint, weights, *settings)


def _compute(run: Run, model: TrainStep, mesh: Mesh | None, dataset: AnswerDataset, processes: Processes) -> LogProbs:
    batch_size = run.config.run.batch_size
    index, count = process_batch_shard(mesh, batch_size)
    batches = EvalBatches(
        dataset,
        seq_len=run.config.data.row_tokens,
        batch_size=batch_size,
        max_segments=run.batches.max_segments,
        process_index=index,
        process_count=count,
    )
    values = np.zeros((len(dataset), 2), np.float32)
    progress = DataProgress() if processes.is_main else NoProgress()
    done = 0.0
    with progress.stage("computing the reference's log-probabilities", 4 * float(dataset.lengths.sum())) as advance:
        for units, batch in zip(batches.documents(), batches, strict=True):
            found = on_host(model.executor.answer_log_probs(model.trainable, model.frozen, place_batch(batch, mesh)))
            for row, own in enumerate(units):
                values[own] = found[row, : len(own)]
                done += 4 * float(dataset.lengths[own].sum())
            advance(done)
    return values


def _read(path: Path, units: int) -> LogProbs | None:
    """Return the values of a file; None if it is absent, damaged or of another length."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, values = content[:32], content[32:]
    is_whole = hashlib.sha256(values).digest() == digest and len(values) == 2 * units * np.float32().nbytes
    return np.frombuffer(values, np.float32).reshape(units, 2).copy() if is_whole else None


def _write(path: Path, values: LogProbs) -> None:
    """Write the values after their SHA-256."""
    content = values.tobytes()
    with atomic_file(path) as temporary:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
