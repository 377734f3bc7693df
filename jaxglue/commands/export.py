"""Merge an adapter, quantize a model, write a run's checkpoint, or upload the result to the Hugging Face hub.

jaxglue export --adapter runs/first/adapter --output merged
jaxglue export --adapter runs/first/adapter --push owner/name
jaxglue export --quantize nf4 --base models/Qwen3-8B --output models/Qwen3-8B-nf4
jaxglue export --quantize mxfp4 --adapter runs/first/adapter --output merged
jaxglue export --gguf q4_k_m --adapter runs/first/adapter --output first
jaxglue export --run runs/first --checkpoint best --output best
"""

import logging
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.commands.configs import K_QUANTS, ExportConfig
from jaxglue.data.config import DataConfig
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.prepare import prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.files.atomic import require_empty
from jaxglue.files.json_file import read_json
from jaxglue.generation.assistant import tower_of
from jaxglue.hf.export import quantize_folder
from jaxglue.hf.export_check import CHECK_FILE, TRAINED_FILE, ExportRows, folder_parts, load_rows
from jaxglue.hf.gguf.drafts import find_gguf_draft
from jaxglue.hf.gguf.export import export_gguf, export_gguf_lora
from jaxglue.hf.gguf.importance import measure_importance
from jaxglue.hf.gguf.mmproj import is_written
from jaxglue.hf.hub import base_reference, push_folder
from jaxglue.hf.merge import MergedTensors, export_adapter
from jaxglue.hf.model_card import CURVE, model_card
from jaxglue.hf.reading import read_record
from jaxglue.hf.sentence_transformers import read_folder
from jaxglue.hf.serving import has_tokenizer, load_own_tokenizer, render_example, stop_tokens
from jaxglue.hf.temperatures import fold_temperatures
from jaxglue.models.tower_config import TowerConfig
from jaxglue.ops.choices import GgufType
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.terminal.lines import echo
from jaxglue.training.checkpoint_export import export_checkpoint

_KEPT = 0.8
"""Share of an adapter's gain below which its merge into few bits is warned of."""
_log = logging.getLogger(__name__)
_CALIBRATION_TOKENS, _CALIBRATION_BATCH, _CALIBRATION_BATCHES = 512, 4, 16
"""Tokens of a calibration row, rows of a batch, and batches."""
_ROWS_ON_CPU = 8
"""Rows of a run on which a CPU measures importance unasked."""


def main(config: ExportConfig) -> None:
    """Write the merged or quantized folder, and upload it or the adapter."""
    if config.output is not None:
        _write(config, config.output)
        echo(f"wrote {config.output}")
    if config.push is not None:
        echo(f"uploaded to {_push(config, config.push)}")


def _write(config: ExportConfig, output: Path) -> None:
    if config.checkpoint is not None:
        step = export_checkpoint(config.run, config.checkpoint, output)
        echo(f"the weights of step {step:,}")
    elif config.gguf is not None:
        echo(_write_gguf(config, config.gguf, output))
    elif config.gguf_lora:
        echo(_write_gguf_lora(config, output))
    elif config.fold_temperatures:
        echo(_fold_temperatures(config, output))
    elif config.adapter is not None:
        echo(_merge(config, config.adapter, output))
    else:
        echo(_quantize(config, output))


def _fold_temperatures(config: ExportConfig, output: Path) -> str:
    """Write a decision model with its temperatures in the output projection, an adapter merged first."""
    require_empty(output)
    with TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}-") as between:
        base, merged = config.base_folder(), ""
        if config.adapter is not None:
            base = Path(between) / "merged"
            merged = f"{_merge(config, config.adapter, base)}; "
        found = fold_temperatures(base, output, config.max_shard_bytes, progress=DataProgress())
    return (
        merged + "labels' logits are divided by " + ", ".join(f"{value:.3g} ({kind})" for kind, value in found.items())
    )


def _quantize(config: ExportConfig, output: Path) -> str:
    """Write the quantized folder; describe its comparison with the base."""
    base, most = config.base_folder(), config.max_shard_bytes
    check, distance = quantize_folder(base, output, config.quantize, most, progress=DataProgress())
    return f"{check}; its KL to {base} is {distance:.1e}"


def _merge(config: ExportConfig, adapter: Path, output: Path) -> str:
    """Write the merged folder; describe its base, and the comparison with base and adapter apart."""
    storage = None if config.trained_on == "auto" else config.trained_on
    base, most = config.base_folder(), config.max_shard_bytes
    formats = {"experts" if config.merges_into_experts else "quantize": config.quantize}
    check = export_adapter(adapter, base, output, most, storage=storage, **formats, progress=DataProgress())
    if check.gain and (kept := check.gain.share) is not None and kept < _KEPT:
        _log.warning("%.0f%% of the adapter's gain is kept: train with --serve-as to keep more", 100 * kept)
    if check.storage == "none":
        return str(check)
    label = FORMATS[check.storage].label
    return f"merged into the base as quantized to {label}, on which the adapter was trained; {check}"


def _write_gguf(config: ExportConfig, kind: GgufType, output: Path) -> str:
    """Write a GGUF file and its Modelfile; return what to run."""
    storage = None if config.trained_on == "auto" else config.trained_on
    base = config.base_folder()
    tensors = MergedTensors(base, config.adapter, storage, vision=_written_tower(base))
    tokenizer = load_own_tokenizer(base, config.adapter)
    stops = stop_tokens(tokenizer, base, config.adapter)
    rows = _calibration(config, kind, tensors, tokenizer)
    importance = _measure_importance(rows, tensors, base) if rows else None
    draft = find_gguf_draft(tensors, tensors.config, base, config.adapter)
    record = read_record(config.adapter, base) or read_folder(config.adapter or base)
    options: dict[str, Any] = {"importance": importance, "draft": draft, "record": record, "progress": DataProgress()}
    file = export_gguf(tensors, tensors.config, tokenizer, stops, kind, output, **options)
    server = f"llama-server -m {file}" + ("" if draft is None else " --spec-type draft-mtp")
    if record.get("kind") == "decide":
        return f"run it with: {server}, and ask /v1/systemone"
    if record.get("kind") == "embed":
        return f"run it with: {server} --embeddings, and ask /v1/embeddings"
    if tensors.config.vision is not None:
        return f"run it with: {server} --mmproj {file.with_name(f'mmproj-{output.resolve().name}.gguf')}"
    return f"run it with: {server}, or: ollama create {output.resolve().name} -f {output / 'Modelfile'}"


def _written_tower(base: Path) -> TowerConfig | None:
    """Return the shape of the tower that is written beside the text; None of a model without one."""
    try:
        tower = tower_of(base)
    except ValueError as error:
        _log.warning("the vision tower is left out: %s", error)
        return None
    if tower is not None and not is_written(tower):
        _log.warning("the vision tower is left out: llama.cpp's files of this type of model are not written yet")
        return None
    return tower


def _calibration(
    config: ExportConfig, kind: GgufType, tensors: MergedTensors, tokenizer: PreTrainedTokenizerBase
) -> list[ExportRows]:
    """Return rows on which the importance of matrices' inputs is measured: of the data, else of the adapter's run."""
    if kind not in K_QUANTS or config.imatrix == ("none",):
        return []
    if config.imatrix:
        return _read_rows(config.imatrix, tensors, tokenizer)
    kept = load_rows(config.adapter.resolve().parent / TRAINED_FILE) if config.adapter else None
    if kept is None:
        return []
    most = _ROWS_ON_CPU if jax.default_backend() == "cpu" else len(kept.tokens)
    rows = kept.batches(_CALIBRATION_BATCH, most)
    tokens = sum(int((batch.segments.segment_ids > 0).sum()) for batch in rows)
    _log.info("errors are weighed by inputs on %d tokens of the run's training data (--imatrix none: not)", tokens)
    return rows


def _read_rows(data: tuple[str, ...], tensors: MergedTensors, tokenizer: PreTrainedTokenizerBase) -> list[ExportRows]:
    """Return the first rows of the data."""
    settings = DataConfig(data=data, seq_len=_CALIBRATION_TOKENS, loss_on="all")
    prepared = prepare_data(settings, tokenizer, tensors.specs["model.embed_tokens.weight"].shape[0])
    batches = BatchIterator(prepared.train, seq_len=settings.row_tokens, batch_size=_CALIBRATION_BATCH, epochs=1)
    steps = islice(batches, _CALIBRATION_BATCHES)
    return [
        ExportRows(tokens=np.asarray(batch.tokens), segments=batch.segments, source="calibration")
        for step in steps
        for batch in step.micro_batches
    ]


def _measure_importance(rows: list[ExportRows], tensors: MergedTensors, base: Path) -> dict[str, np.ndarray]:
    """Return the importance of matrices' inputs on rows."""
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    config = tensors.config
    if tensors.adapter is None or not tensors.adapter.beside_text:  # the rows are texts
        config = replace(config, vision=None, layer_sees=())
    parts = folder_parts(base, config, dtype=dtype, adapter=tensors.adapter)
    return measure_importance(config, parts, rows, dtype)


def _write_gguf_lora(config: ExportConfig, output: Path) -> str:
    """Write an adapter's GGUF file; return what to run."""
    tensors = MergedTensors(config.base_folder(), config.adapter)
    assert tensors.adapter is not None
    file = export_gguf_lora(tensors.adapter, tensors.config, output)
    return f"run it with: llama-server -m BASE.gguf --lora {file}"


def _example(config: ExportConfig, source: Path) -> str | None:
    """Return a chat in the format of the model that is uploaded; None where nothing tells it."""
    for folder in filter(has_tokenizer, (source, config.base_folder(weights=False))):
        with suppress(ValueError):
            tokenizer = load_own_tokenizer(folder, config.adapter)
            if tokenizer.chat_template:
                return render_example(tokenizer)
    return None


def _push(config: ExportConfig, name: str) -> str:
    """Upload the written folder, else the adapter, with the card of the adapter's run; return the address."""
    source = config.output or config.adapter
    assert source is not None
    run = (config.adapter or source).resolve().parent
    base = base_reference(config.base_folder(weights=False))
    check = read_json(source / CHECK_FILE) if (source / CHECK_FILE).is_file() else None
    gguf = [path.name for path in sorted(source.glob("*.gguf"))]
    adapter, prompt = config.output is None or config.gguf_lora, _example(config, source)
    card = model_card(name, base, run, adapter=adapter, check=check, prompt=prompt, gguf=gguf)
    curve = [run / CURVE] if (run / CURVE).is_file() else []
    return push_folder(source, name, card, extra=curve, private=config.private)
