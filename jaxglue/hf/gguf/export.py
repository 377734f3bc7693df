"""Export of a model to a folder with a GGUF file and its Modelfile, and of an adapter to a GGUF file of its own."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.progress import DataProgress
from jaxglue.files.atomic import atomic_folder
from jaxglue.hf.adapter import Adapter
from jaxglue.hf.gguf.architectures import architecture_of
from jaxglue.hf.gguf.decisions import decision_metadata
from jaxglue.hf.gguf.drafts import WithDraft
from jaxglue.hf.gguf.embeddings import embedding_metadata
from jaxglue.hf.gguf.layout import KEYS_AND_VALUES, GgufTensor, Tensors, file_tensors, interleaved_rows
from jaxglue.hf.gguf.linear_attention import matrices_in_file
from jaxglue.hf.gguf.mamba import INPUT, row_factors
from jaxglue.hf.gguf.metadata import model_metadata
from jaxglue.hf.gguf.mmproj import export_tower
from jaxglue.hf.gguf.modelfile import modelfile
from jaxglue.hf.gguf.package import load_gguf
from jaxglue.hf.gguf.types import Shape, file_type, tensor_type
from jaxglue.hf.gguf.vocabulary import vocabulary_metadata
from jaxglue.hf.gguf.writer import FileTensor, write_gguf
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.choices import GgufType

_METADATA = {"decide": decision_metadata, "embed": embedding_metadata}
"""Metadata of models that answer in one pass, by kind."""
_QUANTIZATION_VERSION = 2
_ALPHA = 1.0
"""Adapters are written with alpha = 1 and their scale in B, as it may differ between modules."""


def export_gguf(
    tensors: Tensors,
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    kind: GgufType,
    output: str | Path,
    *,
    importance: Mapping[str, np.ndarray] | None = None,
    draft: WithDraft | None = None,
    record: Mapping[str, Any] = MappingProxyType({}),
    progress: DataProgress | None = None,
) -> Path:
    """Write a folder with `<output's name>-<kind>.gguf` and a Modelfile; return the file.

    The tower of a model that sees is in `mmproj-<output's name>.gguf` beside it.

    Experts that are in MXFP4 stay so in every type.

    Args:
        tensors: of the model, merged where there is an adapter.
        config: of the model.
        tokenizer: of the model.
        stops: tokens that end an answer.
        kind: type of the matrices.
        output: absent or empty; it appears complete or not at all.
        importance: mean squares of the inputs [in], or [experts, in], by the matrix's name in the file; they weigh the
            errors of K-quants.
        draft: the tensors with those of a draft head, which llama.cpp drafts by; None for none.
        record: how the model answers in one pass (`jaxglue.hf.reading`); llama.cpp's server then serves decisions at
            /v1/systemone alone, and embeds texts with their tokens and pooling.
        progress: shows the bytes written; by default nothing does.

    Raises:
        ValueError: a model or tokenizer that llama.cpp does not have, values not finite or out of range, too little
            space, or a non-empty output folder.
        OSError: a failed write.
    """
    output = Path(output)
    if kind == "mxfp4" and config.moe is None:
        raise ValueError("--gguf mxfp4 is for the experts of a sparse model: name another type, such as q4_k_m")
    embedding = tensors.specs["model.embed_tokens.weight"].shape[0]
    shape = model_metadata(config, embedding)
    architecture = _architecture(config)
    metadata: dict[str, Any] = {
        "general.type": "model",
        "general.name": output.resolve().name,
        "general.file_type": int(load_gguf().LlamaFileType[file_type(kind)]),
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    metadata |= {f"{architecture}.{key}": value for key, value in shape.items()}
    metadata |= {f"tokenizer.{k}": v for k, v in vocabulary_metadata(tokenizer, embedding, stops).items()}
    if (kind_of_record := record.get("kind")) in _METADATA:
        metadata |= _METADATA[kind_of_record](architecture, tokenizer, record)
    if draft is not None:
        metadata |= {f"{architecture}.block_count": config.num_hidden_layers + 1}
        metadata |= {f"{architecture}.nextn_predict_layers": 1}
    experts = config.moe.num_experts if config.moe else 0
    model = Shape(architecture, config.num_hidden_layers, experts, config.tie_word_embeddings)
    written = [
        FileTensor(
            tensor=tensor,
            type=tensor.packed or tensor_type(tensor.name, tensor.shape, kind, model),
            importance=(importance or {}).get(tensor.name),
        )
        for tensor in (file_tensors(config, tensors) if draft is None else file_tensors(draft.config, draft))
    ]
    with atomic_folder(output) as temporary:
        file = temporary / f"{output.resolve().name}-{kind}.gguf"
        write_gguf(file, architecture, metadata, written, progress)
        if config.vision is not None:
            export_tower(tensors, config, temporary, name=output.resolve().name, tokenizer=tokenizer)
        (temporary / "Modelfile").write_text(modelfile(file.name, tokenizer, stops), encoding="utf-8")
    return output / file.name


def export_gguf_lora(adapter: Adapter, config: DecoderConfig, output: str | Path) -> Path:
    """Write a folder with `<output's name>-lora.gguf`, which llama.cpp applies to the base's GGUF file.

    Args:
        adapter: fitted to its base.
        config: of the base.
        output: absent or empty; it appears complete or not at all.

    Raises:
        ValueError: DoRA or trained vocabulary, which llama.cpp's adapters do not have, or a non-empty output folder.
        OSError: a failed write.
    """
    output = Path(output)
    remedy = "merge the adapter with --gguf"
    if adapter.config.dora:
        raise ValueError(f"--gguf-lora: llama.cpp has no DoRA adapters: {remedy}")
    if adapter.trains_vocabulary or adapter.config.vocabulary_targets or adapter.scores:
        raise ValueError(f"--gguf-lora: adapters of the vocabulary and of a score are not written: {remedy}")
    model_metadata(config, config.vocab_size)  # refuses what llama.cpp computes otherwise
    matrices: dict[str, np.ndarray] = {}
    for module in adapter.modules:
        matrices |= _lora_matrices(module, adapter, config)
    written = [
        FileTensor(
            tensor=GgufTensor(name=name, shape=matrix.shape, sources=(name,), pieces=_pieces(matrix)),
            type="f32",
        )
        for name, matrix in matrices.items()
    ]
    metadata = {
        "general.type": "adapter",
        "general.name": output.resolve().name,
        "adapter.type": "lora",
        "adapter.lora.alpha": _ALPHA,
    }
    with atomic_folder(output) as temporary:
        file = temporary / f"{output.resolve().name}-lora.gguf"
        write_gguf(file, _architecture(config), metadata, written)
    return output / file.name


def _architecture(config: DecoderConfig) -> str:
    gguf = load_gguf()
    return gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture_of(config).name]]


def _pieces(matrix: np.ndarray):
    return lambda: iter([lambda part=part: part for part in (matrix if matrix.ndim == 3 else [matrix])])


def _lora_matrices(module: str, adapter: Adapter, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return a module's two matrices under llama.cpp's names; a stack of experts' gate and up have two each."""
    a, b = adapter.tensors[f"{module}.lora_A"], adapter.tensors[f"{module}.lora_B"]
    rank = a.shape[-2]
    b = b * np.float32(adapter.config.scale_of(module) * rank / _ALPHA)
    if (factors := row_factors(config, module)) is not None:
        b = b * factors[:, None]
    path, _, last = module.rpartition(".")
    if f"{module}.weight".endswith(KEYS_AND_VALUES):
        raise ValueError(f"--gguf-lora: llama.cpp's files hold {module} in two parts: merge the adapter with --gguf")
    if b.ndim == 3 and not any(part in module for part in (".mlp.", ".feed_forward.")):
        raise ValueError(f"--gguf-lora: llama.cpp applies no adapter of {module}: merge the adapter with --gguf")
    if last == "gate_up_proj" and b.ndim == 3:
        rows = b.shape[1] // 2
        interleaved = config.model_type == "gpt_oss"
        halves = (b[:, ::2], b[:, 1::2]) if interleaved else (b[:, :rows], b[:, rows:])
        parts = {f"{path}.{half}": part for half, part in zip(("gate_proj", "up_proj"), halves, strict=True)}
    elif architecture_of(config).permuted and last in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if last == "q_proj" else config.num_key_value_heads
        parts = {module: b[interleaved_rows(len(b), heads)]}
    else:
        a, b = matrices_in_file(config, module, a, b)
        parts = {module: b}
        if f"{module}.weight".endswith(INPUT):
            names_of = [module.replace("input_linear", half) for half in ("gate_proj", "up_proj")]
            parts = dict(zip(names_of, np.split(b, 2), strict=True))
    gguf = load_gguf()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture_of(config).name], config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        stem = names.get_name(architecture_of(config).renamed(name))
        if stem is None:
            raise ValueError(f"{name}: llama.cpp has no such matrix in its {config.model_type} models")
        found |= {f"{stem}.weight.lora_a": a, f"{stem}.weight.lora_b": np.ascontiguousarray(part)}
    assert all(math.prod(matrix.shape) for matrix in found.values())
    return found
