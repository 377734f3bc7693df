"""Stores of units whose parts are read, from tokens."""

import numpy as np

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.reads import ReadDataset, ReadTask, select_reads
from jaxglue.data.store import TokenStore


def store_of(units) -> TokenStore:
    """Return the store of units (beginning, parts), a part (tokens, kind, gold)."""
    columns: dict[str, list] = {name: [] for name in ("prefix", "parts", "cut", "kind", "size", "intro", "options")}
    columns |= {name: [] for name in ("gold", "label_size", "text_size")}
    tokens, mask, lengths = [], [], []
    for prefix, parts in units:
        columns["prefix"].append(len(prefix))
        columns["parts"].append(len(parts))
        columns["cut"].append(0)
        for part, kind, gold in parts:
            for name, value in (("kind", kind), ("size", len(part)), ("intro", 0), ("options", len(gold))):
                columns[name].append(value)
            columns["gold"] += list(gold)
            columns["label_size"] += [0] * len(gold)
            columns["text_size"] += [0] * len(gold)
        whole = [*prefix, *(token for part, _, _ in parts for token in part)]
        tokens += whole
        mask += [0] * len(whole)
        lengths.append(len(whole))
    return TokenStore(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, np.uint8),
        offsets=np.cumsum([0, *lengths]),
        columns={name: np.array(values, np.float32) for name, values in columns.items()},
        info={"digest": "", "max_token": max(tokens)},
    )


def read_dataset(units, task: ReadTask, labels=None, *, seq_len: int = 64, **settings) -> ReadDataset:
    """Return the data set of units."""
    config = DataConfig(data=("x",), seq_len=seq_len, **settings)
    return select_reads(store_of(units), config, Source(name="x"), task, labels).dataset


def read_batches(units, task: ReadTask, labels=None, *, seq_len: int = 64, batch_size: int = 1) -> EvalBatches:
    """Return the units in packed rows."""
    dataset = read_dataset(units, task, labels, seq_len=seq_len)
    return EvalBatches(dataset, seq_len=seq_len, batch_size=batch_size)


def require_gradients(gradients, golden, tolerance: float = 1e-5) -> None:
    """Compare (norm, Σ gradient · cos(index / 10)) of named gradients."""
    for name, (norm, projection) in golden.items():
        gradient = np.asarray(gradients[name], np.float64).ravel()
        np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=tolerance, atol=1e-9, err_msg=name)
        found = gradient @ np.cos(np.arange(gradient.size) / 10)
        np.testing.assert_allclose(found, projection, atol=tolerance * norm + 1e-9, err_msg=name)
