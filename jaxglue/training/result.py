"""The result of a run: weights of the last step, the best ones or both, and the check that the files hold them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxglue.data.batch import Batch
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.progress import DataProgress
from jaxglue.distributed import Processes
from jaxglue.files.json_file import write_json
from jaxglue.hf.adapter import Adapter, load_adapter, save_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.draft import DRAFT_FILE, frequent_tokens, write_draft, write_draft_tokens
from jaxglue.hf.export import describe_classifier, on_host, save_model, wide_tensors
from jaxglue.hf.export_check import (
    ROWS_FILE,
    TRAINED_FILE,
    ExportCheck,
    ExportRows,
    Part,
    Parts,
    compare,
    first_rows,
    folder_parts,
    live_parts,
    predict,
    random_rows,
    rounding_limit,
    trained_rows,
)
from jaxglue.hf.identity import identify
from jaxglue.hf.serving import write_stops, write_tokenizer
from jaxglue.hf.serving_check import PROBES, check_serving
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.file_param import FileParam
from jaxglue.models.lora import LoraConfig, base_shapes
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params, flatten_names, hf_name, part_name
from jaxglue.models.wrapper import with_text
from jaxglue.objectives.objective import Objective
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.fp8 import E4M3
from jaxglue.terminal.console import Console
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.reading import describe_reads
from jaxglue.training.run import Base, Run
from jaxglue.training.run_folder import RunFolder
from jaxglue.training.step import StepParts, TrainState
from jaxglue.training.vocabulary import Vocabulary
from jaxglue.training.workload import base_identity

_MOST_KEPT = 2**30
"""Largest random model that is written beside its adapter, in bytes."""


class Result(NamedTuple):
    """Exported folders."""

    path: Path
    """Adapter, or the model after full fine-tuning."""
    step: int
    """Step of its weights."""
    last: Path | None
    """Weights of the last step, where `path` has the best."""


def write_result(
    run: Run,
    parts: StepParts,
    state: TrainState,
    checkpoints: Checkpoints,
    output: RunFolder,
    *,
    best_step: int | None,
    batch: Batch | None,
    processes: Processes,
    console: Console,
    draft: Callable[[TrainState], Mapping[str, np.ndarray]] | None = None,
) -> tuple[TrainState, Result]:
    """Export the weights that `--keep` names, and check the files; return them, too, with `best` or `both` the best.

    Args:
        run, parts, state, checkpoints, output: of the run.
        best_step: step with the lowest eval loss, if known.
        batch: for the check of the files where nothing is held out.
        processes: all call it, and one writes.
        console: where to print.
        draft: returns the tensors of the draft head for a state's model; None where none is trained.
    """

    def export(name: str, state: TrainState) -> Path:
        path, head = output.path / name, draft(state) if draft else None
        with output.writing(name, ROWS_FILE, TRAINED_FILE):
            all_weights = {**state.trainable, **_random_tower(run, state)}
            export_result(run, all_weights, path, base, write=processes.is_main, draft=head)
            if head and processes.is_main and (tokens := likely_tokens(run)):
                write_draft_tokens(path, tokens)
            if run.objective.reads:
                describe_reads(run, parts, state.trainable, state.frozen, path, write=processes.is_main)
            trees = parts.graphdefs, state.trainable, state.frozen
            check = check_export(run, *trees, path, batch, compares=processes.is_main)
        if processes.is_main:
            check_texts(run, path)
        if check:
            console.print(f"{path}: {check}")
        return path

    base = None
    if reason := why_not_kept(run, state.frozen):
        console.print(
            f"{output.path / 'base'} is not written ({reason}), and the adapter needs its random weights: "
            "for a usable one, name a folder with weights and leave out --random-weights",
        )
    else:
        with output.writing("base"):
            base = keep_base(run, state.frozen, output.path / "base", write=processes.is_main)
    name, keep, step = "model" if run.lora is None else "adapter", run.output.keep, state.step
    last = export(f"{name}-last", state) if keep == "both" else None
    if keep != "last" and best_step != step:
        abstract = abstract_state(state.saved)
        state.free()
        restored = checkpoints.restore_best(abstract)
        state, step = state.restored(restored.state, state.step), restored.step
        console.print(f"the best weights are those of step {step}")
    return state, Result(export(name, state), step, last)


def _random_tower(run: Run, state: TrainState) -> Params:
    """Return the embedding's part with a frozen vision tower of random weights, which no files have; else nothing."""
    trained, frozen = (tree["embed_tokens"] for tree in (state.trainable, state.frozen))
    if run.lora is not None or not run.base.random or "vision" not in frozen:
        return {}
    return {"embed_tokens": {**trained, "vision": _joined(frozen["vision"], trained.get("vision", {}))}}


def _joined(frozen: Params, trained: Params) -> Params:
    """Return a tree with the leaves of both, which have none in common."""
    joined = dict(frozen)
    for name, part in trained.items():
        inner = joined.get(name)
        joined[name] = _joined(inner, part) if isinstance(inner, dict) and isinstance(part, dict) else part
    return joined


def abstract_state(state: PyTree) -> PyTree:
    """Return shapes, dtypes and shardings of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def check_export(
    run: Run,
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
        run: the run.
        graphdefs, trainable, frozen: its model.
        result: the exported folder.
        last_batch: of training.
        compares: False on processes that only contribute their shards.

    Returns:
        the comparison of predictions; None on the other processes.

    Raises:
        ValueError: the files differ from the trained model.
    """
    loss_rows, dtype = _rows(run, last_batch), run.dtype
    rows = loss_rows.few
    live = _on_one_device(live_parts(graphdefs, trainable, frozen))
    origin = predict(run.model, live if run.lora else _as_written(run, live), rows, dtype)
    if not compares:
        return None
    adapter = None
    if run.lora is not None:
        adapter, base = load_adapter(result), run.base.architecture
        shapes = base_shapes(abstract_model(adapter.adapted(base)))
        adapter = check_adapter(adapter, shapes, {"model_type": base.model_type}, str(run.base.folder))
        require_equal(adapter, run.lora, trainable)
    config, parts = _files(run, graphdefs, trainable, frozen, result, adapter)
    made = FORMATS[run.model.quantize]
    # Rounded masters may round to other FP8 values.
    rounded = [dtype, *([E4M3] if made.fp8 and made.trains else [])]
    check = compare(origin, predict(config, parts, rows, dtype), rows, rounding_limit(origin, rounded))
    check.require(result)
    check.save(result)
    loss_rows.save(result.parent / ROWS_FILE)
    store = run.data.train.store
    if store.images is None and (kept := trained_rows(store.tokens, store.offsets)):
        kept.save(result.parent / TRAINED_FILE)
    return check


def check_texts(run: Run, folder: Path) -> None:
    """Open a result's tokenizer, template and stop tokens again; a row of the data must have its trained tokens.

    Raises:
        ValueError: names what differs.
    """
    stops = () if run.objective.trains_scores else run.stops
    store = run.data.train.store
    trained = store.tokens[np.arange(store.lengths[0])]
    try:
        row = run.read_first_row()
        changed = not np.array_equal(row.encode(run.tokenizer).tokens[: len(trained)], trained)
    except (ValueError, OSError):
        changed = True
    if changed:  # the data were moved or edited meanwhile
        check_serving(folder, run.tokenizer, stops)
        return
    chats = [*PROBES, {"messages": row.chat.messages, "tools": row.chat.tools}] if row.chat else PROBES
    opened = check_serving(folder, run.tokenizer, stops, chats)
    if not np.array_equal(row.encode(opened).tokens[: len(trained)], trained):
        raise ValueError(f"{folder}: {row.origin} has other tokens with the folder's tokenizer; the export failed")


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


def _as_written(run: Run, parts: Parts) -> Parts:
    """Return parts with the values that a folder in the run's dtype holds of weights in float32.

    Else their rounding, which grows with the depth, would hide faults of the files, or be taken for one.
    """
    wide = wide_tensors(run.base.folder)

    def part(key: ParamKey) -> Part:
        graphdef, trees = parts(key)

        def written(path, leaf):
            name = part_name(key, jax.tree_util.keystr(path, simple=True, separator="."))
            if name in wide or is_quantized(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            return leaf.astype(run.dtype).astype(leaf.dtype)

        return graphdef, tuple(jax.tree_util.tree_map_with_path(written, tree, is_leaf=is_quantized) for tree in trees)

    return part


def _files(run: Run, graphdefs, trainable: Params, frozen: Params, result: Path, adapter: Adapter | None):
    """Return (config, parts) of the model in the files; of random weights, the frozen ones are those in memory."""
    if adapter is None:
        config = config_from_hf(read_config(result)).quantized(run.base.storage)
        return config, folder_parts(result, config, dtype=run.dtype)
    if run.base.random:
        return run.model, _on_one_device(live_parts(graphdefs, _with_values(trainable, adapter), frozen))
    base, dtype = run.base, run.workload.weight_dtype
    parts: Parts = folder_parts(base.folder, base.architecture, dtype=dtype, adapter=adapter)
    return run.model, parts


def _with_values(trainable: Params, adapter: Adapter) -> Params:
    def value(path, _leaf):
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


def _rows(run: Run, last_batch: Batch | None) -> ExportRows:
    batch = last_batch if run.eval_batches is None else next(iter(run.eval_batches))
    if batch is None or not np.any(batch.segments.segment_ids):
        return random_rows(run.model.vocab_size)
    source = "trained" if run.eval_batches is None else "held-out"
    losses = [np.asarray(array) for array in (batch.targets, batch.loss_weights)]
    return first_rows(np.asarray(batch.tokens), batch.segments, source, *losses)


class Exportable(Protocol):
    """The parts of a run that its exported weights need."""

    @property
    def base(self) -> Base:
        """Return the model that it started from."""

    @property
    def lora(self) -> LoraConfig | None:
        """Return the adapters; None where all weights were trained."""

    @property
    def dtype(self) -> Any:
        """Return the dtype of a model that is written whole."""

    @property
    def objective(self) -> Objective:
        """Return the objective."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer, with the run's chat template, and the model's rows."""

    @property
    def stops(self) -> frozenset[int]:
        """Return the tokens at which the trained model's answers end."""


def likely_tokens(run: Run) -> list[int] | None:
    """Return the tokens that drafts of a run's model are chosen among, by its targets; None for all, as of streams."""
    if not isinstance(run.data.train, TokenDataset):
        return None
    return frequent_tokens(run.data.train.store.count_targets(run.model.vocab_size))


def export_result(
    run: Exportable,
    trainable: Params,
    output: Path,
    kept_base: Path | None = None,
    *,
    write: bool = True,
    draft: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the adapter, or the whole model, to a folder; return it.

    All processes must call it, as each has a part of the arrays; one of them writes.

    Args:
        run: the weights' run.
        trainable: its trained parameters.
        output: the folder.
        kept_base: folder of random base weights, from `keep_base`.
        write: False on processes that only contribute their shards.
        draft: tensors of a trained draft head, which go to the model's files, or beside an adapter.
    """
    tensors, base, architecture = flatten_names(trainable), run.base, run.base.architecture
    if run.lora is None:
        finish = partial(_finish_folder, run)
        options: dict[str, Any] = {"write": write, "finish": finish, "draft": draft, "progress": DataProgress()}
        save_model(output, tensors, base.folder, dtype=run.dtype, **options)
        return output
    adapter = {name: on_host(tensor) for name, tensor in tensors.items()}
    if write:
        drawn = base.seed if base.random else None
        identity = identify(kept_base) if kept_base else base_identity(architecture, base.folder, drawn)
        save_adapter(
            output,
            adapter,
            run.lora,
            kept_base or base.folder,
            identity,
            tied=architecture.tie_word_embeddings,
            text_path=architecture.text_path,
            model_type=architecture.model_type,
        )
        run.vocabulary.tokenizer.save_pretrained(output)
        if not run.objective.trains_scores:
            write_stops(output, run.stops, base.folder)
        if draft:
            write_draft(output / DRAFT_FILE, draft)
    return output


def keep_base(run: Run, frozen: Params, folder: Path, *, write: bool = True) -> Path | None:
    """Write an adapter's random base weights to a folder; None for other bases."""
    if not _has_random_base(run):
        return None
    save_model(folder, flatten_names(frozen), run.base.folder, write=write)
    return folder


def why_not_kept(run: Run, frozen: Params) -> str:
    """Return why an adapter's random base weights are not written; empty where they are, or are not random."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    reasons = {
        "weights in host memory": run.remat.streams_weights or run.workload.host_embeddings,
        "quantized weights": run.model.quantize != "none",
        "new tokens": run.vocabulary.changes,
        "--modules-to-save": run.lora is not None and run.lora.modules_to_save,
        "--train-vision projector": run.model.vision is not None and run.model.vision.trains == "projector",
        "scores": run.model.scores,
        f"{size / 1e9:.1f} GB": size > _MOST_KEPT,
    }
    return next((reason for reason, holds in reasons.items() if holds and _has_random_base(run)), "")


def _has_random_base(run: Run) -> bool:
    return run.base.random and run.lora is not None


def _finish_folder(run: Exportable, folder: Path) -> None:
    """Describe the trained model in a folder: number of tokens, tokenizer, chat template, and stop tokens or score."""
    vocabulary = run.vocabulary
    if vocabulary.changes:
        write_json(folder / "config.json", with_text(read_config(folder), vocab_size=vocabulary.size))
    write_tokenizer(folder, vocabulary.tokenizer)
    if run.objective.trains_scores:
        kind = run.objective.config.problem_type if run.objective.classifies else None
        describe_classifier(folder, vocabulary.tokenizer, run.objective.labels, kind)
    else:
        write_stops(folder, run.stops)
