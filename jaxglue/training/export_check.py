"""Proof that a run's exported files predict as the model in memory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.hf.adapter import Adapter, fit_tied, load_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import on_host
from jaxglue.hf.export_check import (
    ROWS_FILE,
    ExportCheck,
    Part,
    Parts,
    Rows,
    compare,
    first_rows,
    folder_parts,
    live_parts,
    predict,
    random_rows,
    rounding_limit,
)
from jaxglue.models import config_from_hf
from jaxglue.models.file_param import FileParam
from jaxglue.models.lora import LoraConfig
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params, flatten_names, hf_name
from jaxglue.ops.quant.fp8 import E4M3
from jaxglue.training.setup import Setup


def check_export(
    setup: Setup,
    graphdefs: ModelGraphDefs,
    trainable: Params,
    frozen: Params,
    result: Path,
    last_batch: Batch | None = None,
    *,
    compares: bool = True,
) -> ExportCheck | None:
    """Compare exported files with the trained model; write the result beside them.

    The rows are held-out ones, else of the last trained batch, else random.

    Tensors of adapters are compared to the bit, and predictions on one device, to which a layer's weights come at a
    time from wherever the run has them. All processes must call it; one of them compares.

    Args:
        setup: the run.
        graphdefs, trainable, frozen: its model.
        result: the exported folder.
        last_batch: of training.
        compares: False on processes that only contribute their shards.

    Returns:
        the comparison of predictions; None on the other processes.

    Raises:
        ValueError: the files differ from the trained model.
    """
    rows, dtype = _rows(setup, last_batch), setup.config.model.compute_dtype
    origin = predict(setup.model, _on_one_device(live_parts(graphdefs, trainable, frozen)), rows, dtype)
    if not compares:
        return None
    lora = setup.config.model.method == "lora"
    adapter = load_adapter(result) if lora else None
    if adapter is not None and setup.model.tie_word_embeddings:
        adapter = fit_tied(adapter)
    if adapter is not None:
        require_equal(adapter, setup.config.lora, trainable)
    config, parts = _files(setup, graphdefs, trainable, frozen, result, adapter)
    written = dtype if lora else jnp.dtype(jnp.float32 if setup.config.model.dtype == "float32" else jnp.bfloat16)
    # Rounded masters may round to other FP8 values.
    rounded = [written, dtype, *([E4M3] if setup.model.quantize == "fp8_trained" else [])]
    check = compare(origin, predict(config, parts, rows, dtype), rows, rounding_limit(origin, rounded))
    check.require(result)
    check.save(result)
    rows.save(result.parent / ROWS_FILE)
    return check


def _on_one_device(parts: Parts) -> Parts:
    """Return parts whose arrays are gathered from other devices, the host and files."""

    def local(leaf: Any) -> Any:
        if isinstance(leaf, FileParam):
            return jax.tree.map(jnp.asarray, leaf.read())
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 1 and leaf.sharding.memory_kind == "device":
            return leaf
        return jnp.asarray(on_host(leaf) if isinstance(leaf, jax.Array) else leaf)

    def part(key: ParamKey) -> Part:
        graphdef, trees = parts(key)
        return graphdef, jax.tree.map(local, trees)

    return part


def _files(setup: Setup, graphdefs, trainable: Params, frozen: Params, result: Path, adapter: Adapter | None):
    """Return (config, parts) of the model in the files; of random weights, the frozen ones are those in memory."""
    if adapter is None:
        config = config_from_hf(read_config(result)).quantized(setup.config.model.storage)
        return config, folder_parts(result, config, dtype=setup.config.model.compute_dtype)
    if setup.config.model.random_weights:
        return setup.model, _on_one_device(live_parts(graphdefs, _with_values(trainable, adapter), frozen))
    folder, dtype = setup.config.model.folder, setup.workload.weight_dtype
    parts: Parts = folder_parts(folder, setup.base, dtype=dtype, adapter=adapter)
    return setup.model, parts


def _with_values(trainable: Params, adapter: Adapter) -> Params:
    def value(path, leaf):
        return jnp.asarray(adapter.tensors[hf_name(jax.tree_util.keystr(path, simple=True, separator="."))])

    return jax.tree_util.tree_map_with_path(value, trainable)


def require_equal(adapter: Adapter, lora: LoraConfig, trainable: Params) -> None:
    """Raise `ValueError` unless an adapter's files hold the trained tensors, and the scales of their configuration."""
    trained = flatten_names(trainable)
    if differing := sorted(trained.keys() ^ adapter.tensors.keys()):
        raise ValueError(f"{adapter.folder} lacks, or adds, {differing[0]}; the export failed")
    for name, tensor in trained.items():
        if tensor.is_fully_addressable and not np.array_equal(adapter.tensors[name], np.asarray(tensor)):
            raise ValueError(f"{adapter.folder}: {name} differs from the trained one; the export failed")
    for path in adapter.modules:
        if adapter.config.scale_of(path) != lora.scale_of(path):
            raise ValueError(f"{adapter.folder}: the scale of {path} differs from the trained one; the export failed")


def _rows(setup: Setup, last_batch: Batch | None) -> Rows:
    batch = last_batch if setup.eval_batches is None else next(iter(setup.eval_batches))
    if batch is None or not np.any(batch.segments.segment_ids):
        return random_rows(setup.model.vocab_size)
    source = "trained" if setup.eval_batches is None else "held-out"
    return first_rows(np.asarray(batch.tokens), batch.segments, source)
