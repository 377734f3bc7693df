"""LoRA adapters in PEFT's format: read and written."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import parse_json, read_json, write_json
from jaxglue.hf.adapter_config import (
    SEQUENCE_CLASSIFIER,
    config_from_peft,
    config_to_peft,
    matching,
    refuse_unsupported,
    saved_modules,
    token_indices,
)
from jaxglue.hf.adapter_tensors import (
    SCORE,
    check_shapes,
    from_key,
    is_adapter,
    join_rows,
    split_others,
    to_keys,
)
from jaxglue.hf.hub import base_reference, is_hub_id, model_path
from jaxglue.hf.identity import Identity
from jaxglue.hf.tensor_files import TensorFiles, write_file
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora_config import PATHS, LoraConfig, VocabularyModule
from jaxglue.models.tower_config import Trains
from jaxglue.models.vocabulary import ROWS
from jaxglue.models.wrapper import TEXT_PATH, is_beside_text, to_module_name
from jaxglue.ops.choices import QUANTIZE, SERVED, Storage

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
BASE = "base"
"""Folder of a run that keeps a base beside the adapter."""
_BASE_KEY = "jaxglue.base"
"""Key of the base's identity in the tensors' file, where PEFT does not look."""
_DIGEST_KEY = "jaxglue.digest"
"""Key of the tensors' digest there."""
_log = logging.getLogger(__name__)
_REFUSED = "falcon_h1", "nemotron_h"
"""Model types whose `out_proj` PEFT refuses to adapt."""
_FUSED = (*_REFUSED, "granitemoehybrid")
"""Those that transformers trains with a kernel that multiplies the bare matrix of `out_proj`."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter folder, read and checked by itself; `adapter_check` checks it against a base."""

    folder: Path
    config: LoraConfig
    tensors: Mapping[str, np.ndarray]
    """Float32, named as in `save_adapter`."""
    peft: Mapping[str, Any]
    """adapter_config.json."""
    base: Identity | None
    """Identity of the base that it was trained on; None if unrecorded."""
    text_path: str = TEXT_PATH
    """Path of the decoder among the base's modules, as the adapter names them."""

    @property
    def modules(self) -> list[str]:
        """Return the adapted modules' paths, such as `model.layers.0.self_attn.q_proj`."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors if is_adapter(name)))

    @property
    def vocab_size(self) -> int:
        """Return the rows that a base's vocabulary needs, 0 if the adapter has none of its rows."""
        names = (f"{path}.weight" for path in PATHS.values())
        whole = (len(self.tensors[name]) for name in names if name in self.tensors)
        return max([*whole, *(index + 1 for index in self.config.trainable_token_indices)], default=0)

    @property
    def trains_vocabulary(self) -> bool:
        """Tell whether embedding or output projection were trained, or rows of them."""
        return self.vocab_size > 0

    @property
    def scores(self) -> bool:
        """Tell whether it makes its base a reward model or a classifier."""
        return SCORE in self.tensors

    @property
    def labels(self) -> int:
        """Return the scores of a token under it; 0 for a text model's."""
        return len(self.tensors[SCORE]) if self.scores else 0

    def adapted(self, base: DecoderConfig) -> DecoderConfig:
        """Return the architecture of a base with this adapter, which may untie embedding and output projection."""
        return base.untied if base.tie_word_embeddings and self._unties else base

    def merged(self, base: DecoderConfig) -> DecoderConfig:
        """Return the architecture of the merge: an adapter of a tied embedding changes that alone."""
        return self.adapted(base).untied if PATHS["embed_tokens"] in self.modules else self.adapted(base)

    @property
    def _unties(self) -> bool:
        """Tell whether PEFT would have the tied matrices of a base apart.

        A module that it saves is a copy of its own, unless it is told to tie the copies.
        """
        if PATHS["lm_head"] in self.modules:
            return True
        embedding, head = (self.tensors.get(f"{path}.weight") for path in PATHS.values())
        if self.peft.get("ensure_weight_tying"):
            return False
        if embedding is None or head is None:
            # A matrix that was only resized is saved without being named.
            return head is not None or (embedding is not None and "embed_tokens" in saved_modules(self.peft))
        return not np.array_equal(embedding, head)

    @property
    def linears(self) -> "Adapter":
        """Return the part on linear layers and experts, a reward model's score, and a vision tower's projector."""
        config = replace(self.config, modules_to_save=(), trainable_token_indices=())
        others = {name for name in self.beside_text if not is_adapter(name)}
        tensors = {
            name: tensor for name, tensor in self.tensors.items() if is_adapter(name) or name == SCORE or name in others
        }
        return replace(self, config=config, tensors=tensors)

    @property
    def beside_text(self) -> dict[str, np.ndarray]:
        """Return the tensors of a vision tower and its projector."""
        return {name: tensor for name, tensor in self.tensors.items() if is_beside_text(name)}

    def seeing(self, base: DecoderConfig) -> DecoderConfig:
        """Return the architecture of a base that sees with those parts of its tower that this adapter trained."""
        if base.vision is None or not self.beside_text:
            return base
        trains: Trains = "all" if any(map(is_adapter, self.beside_text)) else "projector"
        return replace(base, vision=replace(base.vision, trains=trains))

    @property
    def unquantized(self) -> list[str]:
        """Return the recorded linear layers that were not in `storage`."""
        return (self.base or {}).get("unquantized", "").split(",")

    @property
    def storage(self) -> Storage:
        """Return the format in which the base's linear layers were held in training; none if unrecorded."""
        found = (self.base or {}).get("quantize", "none")
        return found if found in (*QUANTIZE, *SERVED) else "none"


def save_adapter(
    folder: str | Path,
    tensors: Mapping[str, jax.Array | np.ndarray],
    config: LoraConfig,
    base_model: str | Path,
    base: Identity | None = None,
    *,
    tied: bool = False,
    model_type: str | None = None,
    text_path: str = TEXT_PATH,
) -> None:
    """Write an adapter for `peft.PeftModel.from_pretrained`.

    Args:
        folder: created if absent; an existing adapter is replaced, each file atomically.
        tensors: `model.layers.0.self_attn.q_proj.lora_A` [R, in], `….lora_B` [out, R], …; for experts
            `model.layers.0.mlp.experts.down_proj.lora_A` [E, R, in], `….lora_B` [E, out, R]; of DoRA
            `….lora_magnitude_vector` [out]; `model.embed_tokens.weight` [V, D], `lm_head.weight`, or rows of them,
            `….trainable_tokens_delta` [n, D]; of reward models `score.weight` [1, D].
        config: of the adapter.
        base_model: folder or hub name of the base model; recorded as absolute path, or as hub name and commit.
        base: identity of the base, to be recorded.
        tied: the base's output projection is its embedding.
        model_type: of the base.
        text_path: of the decoder among the base's modules, such as `model.language_model` beside a vision tower.

    Raises:
        ValueError: a tensor with values that are not finite.
        OSError: a failed write, such as on a full disk.
    """
    folder = Path(folder)
    tensors = {to_module_name(name, model_type): tensor for name, tensor in tensors.items()}
    by_key = to_keys(tensors, tied=tied, text_path=text_path)
    _require_finite(folder / TENSORS, by_key)
    metadata = {_DIGEST_KEY: _digest(by_key)} | ({} if base is None else {_BASE_KEY: json.dumps(base)})
    specs = {key: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for key, tensor in by_key.items()}
    with atomic_file(folder / TENSORS) as temporary:
        write_file(temporary, specs, by_key.__getitem__, metadata)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if any(".out_proj." in name for name in tensors) and model_type in _FUSED:
        peft = "PEFT 0.21 opens no adapter of it, and " if model_type in _REFUSED else ""
        _log.warning(
            "%s adapts Mamba-2's out_proj: %sprograms that train with mamba-ssm's fused kernel ignore it; "
            "merge the adapter (jaxglue export), or train without it (--exclude out_proj)",
            *(folder, peft),
        )
    described = config_to_peft(
        config, shapes, base_reference(base_model), tied=tied, model_type=model_type, text_path=text_path
    )
    write_json(folder / CONFIG, described)


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter folder written by jaxglue or PEFT.

    Raises:
        ValueError: not an adapter folder, a corrupt file, an unsupported PEFT feature by name, a wrong value in
            adapter_config.json, or tensors that are damaged or not finite.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(_not_an_adapter(folder, name))
    raw = read_json(folder / CONFIG)
    refuse_unsupported(folder / CONFIG, raw)
    files = TensorFiles([folder / TENSORS])
    stored = {key: files.read(key) for key in files.tensors}
    if not stored:
        raise ValueError(f"{folder / TENSORS} holds no tensors")
    recorded = files.metadata().get(_DIGEST_KEY)
    if recorded is not None and recorded != _digest(stored):
        raise ValueError(
            f"{folder / TENSORS} is damaged: its tensors differ from their digest: copy or export it again"
        )
    stored, text_path = split_others(stored, ours=recorded is not None)
    tensors = dict(from_key(folder / TENSORS, key, _as_float(files, key, stored.pop(key)), raw) for key in list(stored))
    for module in PATHS.values():
        if f"{module}.lora_A" in tensors:
            tensors.pop(f"{module}.weight", None)  # the base's, which PEFT saves beside the adapter
    _require_finite(folder / TENSORS, tensors)
    tensors = join_rows(folder / TENSORS, tensors, _row_order(folder / CONFIG, tensors, raw))
    with matching(folder):
        config = config_from_peft(folder / CONFIG, raw, tensors)
        check_shapes(folder / TENSORS, tensors, config)
    base = _recorded_base(folder, files)
    return Adapter(folder=folder, config=config, tensors=tensors, peft=raw, base=base, text_path=text_path)


def _row_order(path: Path, tensors: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[VocabularyModule, list[int]]:
    """Return the tokens of each module's single rows, in the order of these."""
    modules = [module for module, name in PATHS.items() if f"{name}.{ROWS}" in tensors]
    try:
        return {module: token_indices(raw, module) for module in modules}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _digest(tensors: Mapping[str, Any]) -> str:
    """Return a digest of names, types and values."""
    total = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        array = np.asarray(tensor, order="C")
        total.update(f"{key} {array.dtype} {array.shape}".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:32]


def _as_float(files: TensorFiles, key: str, tensor: np.ndarray) -> np.ndarray:
    if tensor.dtype.kind in "iub":
        raise ValueError(f"{files.tensors[key].file}: {key} holds {tensor.dtype}, expected floating-point numbers")
    with np.errstate(over="ignore"):  # found by the check for finite values
        return tensor.astype(np.float32, copy=False)


def _require_finite(path: Path, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(np.asarray(tensor)).all():
            raise ValueError(f"{path}: {name} holds values that are not finite (NaN or infinity): train it again")


def vocabulary_matrix(adapter: Adapter, path: str, weight: Any) -> np.ndarray | None:
    """Return embedding or output projection with an adapter's values; None where it has none.

    Args:
        adapter: fitted to the base by `check_adapter`.
        path: of the module.
        weight: the base's matrix [V, D].
    """
    whole, rows = (adapter.tensors.get(f"{path}.{last}") for last in ("weight", ROWS))
    if whole is not None or rows is None:
        return whole
    weight = np.asarray(weight)
    matrix = np.zeros((max(len(weight), adapter.vocab_size), weight.shape[1]), weight.dtype)
    matrix[: len(weight)] = weight
    matrix[sorted(set(adapter.config.trainable_token_indices))] = rows.astype(weight.dtype)
    return matrix


def warn_of_adapter_inside(model: Path, adapter: Path | None = None) -> None:
    """Warn of an adapter in a model folder that is not the given one: transformers would use it."""
    if (model / CONFIG).is_file() and (adapter is None or adapter.resolve() != model.resolve()):
        _log.warning("%s also holds an adapter, which is not used: name it with --adapter, or move it away", model)


def find_base(folder: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of an adapter's base model, downloaded if it is on the hub.

    Args:
        folder: of the adapter.
        weights: also download the base's weights.

    Raises:
        ValueError: not an adapter folder, no recorded base, or one that is not found.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(_not_an_adapter(folder, CONFIG))
    raw = read_json(folder / CONFIG)
    name = "" if raw.get("base_model_name_or_path") is None else str(raw["base_model_name_or_path"])
    if (
        not Path(name).exists()
        and Path(name).name == BASE
        and (folder.resolve().parent / BASE / "config.json").is_file()
    ):
        name = str(folder.resolve().parent / BASE)  # the run was moved with the base that it wrote
    if not Path(name).is_dir() and not is_hub_id(name):
        raise ValueError(f"{folder} names {name or 'no'} base, which is not a folder here: give the base model's")
    return model_path(name, raw.get("revision"), weights=weights)


def adapter_labels(folder: str | Path) -> int:
    """Return the scores of a token under an adapter's reward model or classifier; 0 for a text model's adapter."""
    path = Path(folder) / CONFIG
    if not path.is_file() or read_json(path).get("task_type") != SEQUENCE_CLASSIFIER:
        return 0
    tensors = TensorFiles([Path(folder) / TENSORS]).tensors
    return next((info.shape[0] for key, info in tensors.items() if key.endswith(f".{SCORE}")), 1)


def random_seed(folder: str | Path) -> int | None:
    """Return the seed of the random weights that an adapter was trained on; None for loaded weights."""
    base = _read_recorded_base(folder)
    kind, *rest = base.get("weights", "").split() or [""]
    return int(rest[0]) if kind == "random" else None


def served_storage_of(folder: str | Path) -> Storage | None:
    """Return the storage that merges an adapter into its base as it is served; None of adapters not trained so."""
    if not (Path(folder) / TENSORS).is_file():
        return None
    storage = _read_recorded_base(folder).get("quantize")
    return storage if storage in SERVED else None


def _read_recorded_base(folder: str | Path) -> Identity:
    return _recorded_base(Path(folder), TensorFiles([Path(folder) / TENSORS])) or {}


def _recorded_base(folder: Path, files: TensorFiles) -> Identity | None:
    if (text := files.metadata().get(_BASE_KEY)) is None:
        return None
    base = parse_json(text, f"{_BASE_KEY} in {folder / TENSORS}")
    if not isinstance(base, dict) or not all(isinstance(value, str) for value in base.values()):
        raise ValueError(f"{_BASE_KEY} in {folder / TENSORS}: expected an object of texts, got {text[:100]}")
    return base


def _not_an_adapter(folder: Path, missing: str) -> str:
    if missing == TENSORS and (folder / "adapter_model.bin").exists():
        return (
            f"{folder} has only adapter_model.bin, a pickle, which is refused because unpickling runs arbitrary code. "
            "Save it again with peft: model.save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder} is not a PEFT adapter folder: {missing} is missing"
