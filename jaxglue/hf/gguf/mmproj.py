"""The second file of a model that sees: its vision tower and projector, which llama.cpp reads by `--mmproj`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.hf.gguf.layout import GgufTensor, Tensors, interleaved_rows
from jaxglue.hf.gguf.package import load_gguf
from jaxglue.hf.gguf.writer import FileTensor, write_gguf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.pixtral import PixtralConfig
from jaxglue.models.qwen_vision import QwenTowerConfig
from jaxglue.models.siglip import SiglipConfig
from jaxglue.models.tower_config import TowerConfig
from jaxglue.vision.processor import IMAGE_BREAK

_ARCHITECTURE = "clip"
_OWN, _KNOWN = "vision_tower.", "vision_tower.vision_model."
"""What the names of Gemma 3's tower begin with here, and where the gguf package knows them."""
_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
"""Modules of Qwen's merger."""
_DEEP_MERGER = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_NUMBERED = "multi_modal_projector.linear_"
"""Layers that the gguf package numbers like blocks, of which a tower may have fewer."""
_BREAK = "v.token_embd.img_break"
_QUANTIZATION_VERSION = 2


def is_written(vision: TowerConfig) -> bool:
    """Tell whether a tower is one that is written for llama.cpp."""
    return isinstance(vision, SiglipConfig | PixtralConfig | QwenTowerConfig)


def export_tower(
    tensors: Tensors, config: DecoderConfig, output: Path, *, name: str, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write a tower in float16 and float32 to `mmproj-<name>.gguf` in a folder; return the file.

    Args:
        tensors: of the model, merged where there is an adapter.
        config: of the model, with its tower.
        output: the folder.
        name: of the model.
        tokenizer: of the model.

    Raises:
        ValueError: values not finite or out of range, or too little space.
        OSError: a failed write.
    """
    vision = config.vision
    assert vision is not None
    made = [each for source in tensors.specs if vision.owns(source) for each in _tensors(vision, tensors, source)]
    if isinstance(vision, PixtralConfig):  # whose rows of features end with a token's embedding
        read = partial(_row, tensors, int(tokenizer.convert_tokens_to_ids(IMAGE_BREAK)))  # type: ignore[arg-type]
        made.append(_made(_BREAK, (config.hidden_size,), "model.embed_tokens.weight", read))
    written = [FileTensor(tensor=tensor, type=_type(tensor)) for tensor in made]
    file = output / f"mmproj-{name}.gguf"
    write_gguf(file, _ARCHITECTURE, _metadata(config, vision, name), written)
    return file


def _metadata(config: DecoderConfig, vision: TowerConfig, name: str) -> dict[str, Any]:
    """Return the values by which llama.cpp reads a tower."""
    gguf = load_gguf()
    sizes: dict[str, Any] = {
        "projection_dim": config.hidden_size,
        "image_size": _image_size(vision),
        "patch_size": vision.patch,
        "embedding_length": vision.width,
        "feed_forward_length": vision.intermediate,
        "block_count": vision.layers,
        "attention.head_count": vision.heads,
        "attention.layer_norm_epsilon": float(vision.eps),
        "image_mean": [float(value) for value in vision.mean],
        "image_std": [float(value) for value in vision.std],
    }
    silu = isinstance(vision, PixtralConfig) and vision.act == "silu"
    values: dict[str, Any] = {
        "general.type": gguf.GGUFType.MMPROJ,
        "general.name": name,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        "general.quantization_version": _QUANTIZATION_VERSION,
        "clip.has_vision_encoder": True,
        "clip.use_silu" if silu else "clip.use_gelu": True,
    }
    if isinstance(vision, SiglipConfig):
        values["clip.projector_type"] = gguf.VisionProjectorType.GEMMA3
        sizes["projector.scale_factor"] = vision.merge
    else:
        sizes["spatial_merge_size"] = vision.merge
        is_qwen = isinstance(vision, QwenTowerConfig)
        kinds = gguf.VisionProjectorType
        values["clip.projector_type"] = kinds.QWEN3VL if is_qwen else kinds.PIXTRAL
    if isinstance(vision, QwenTowerConfig):
        sizes["is_deepstack_layers"] = [layer in vision.deepstack for layer in range(vision.layers)]
    return values | {f"clip.vision.{key}": value for key, value in sizes.items()}


def _image_size(vision: TowerConfig) -> int:
    """Return the side of the square that learned positions cover; of towers without, the published one."""
    if isinstance(vision, SiglipConfig):
        return vision.image
    return int(vision.positions**0.5) * vision.patch if isinstance(vision, QwenTowerConfig) else 110 * vision.patch


def _tensors(vision: TowerConfig, tensors: Tensors, source: str) -> Iterator[GgufTensor]:
    """Yield the tensors of the file that one of the model's becomes."""
    name, shape = source.removeprefix("model."), tensors.specs[source].shape
    read: Callable[[], np.ndarray] = partial(tensors.read, source)
    if isinstance(vision, QwenTowerConfig):
        if name == "visual.patch_embed.proj.weight":  # a matrix for each frame
            for frame in range(shape[2]):
                suffix = f".{frame}" if frame else ""
                own = partial(lambda frame: np.ascontiguousarray(tensors.read(source)[:, :, frame]), frame)
                yield _made(f"v.patch_embd.weight{suffix}", (*shape[:2], *shape[3:]), source, own)
            return
        yield _made(_qwen_name(vision, name), shape, source, read)
        return
    if isinstance(vision, SiglipConfig) and name.endswith("mm_soft_emb_norm.weight"):
        yield _made("mm.soft_emb_norm.weight", shape, source, lambda: tensors.read(source).astype(np.float32) + 1)
        return
    if isinstance(vision, PixtralConfig) and name.endswith((".q_proj.weight", ".k_proj.weight")):
        order = interleaved_rows(shape[0], vision.heads)
        yield _made(_name(vision, name), shape, source, lambda: tensors.read(source)[order])
        return
    yield _made(_name(vision, name.replace("projection_weight", "projection.weight")), shape, source, read)


def _qwen_name(vision: QwenTowerConfig, name: str) -> str:
    parts = name.split(".")
    if parts[1] == "merger":
        return f"{_MERGER[parts[2]]}.{parts[3]}"
    if parts[1] == "deepstack_merger_list":
        return f"v.deepstack.{vision.deepstack[int(parts[2])]}.{_DEEP_MERGER[parts[3]]}.{parts[4]}"
    return _name(vision, name)


def _name(vision: TowerConfig, name: str) -> str:
    """Return llama.cpp's name of a tower's tensor."""
    if name.startswith(_NUMBERED):
        return f"mm.{name.removeprefix(_NUMBERED)}"
    gguf = load_gguf()
    is_known_deeper = isinstance(vision, SiglipConfig) and name.startswith(_OWN)
    known = _KNOWN + name.removeprefix(_OWN) if is_known_deeper else name
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.layers)
    found = names.get_name(known, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"model.{name}: llama.cpp has no such tensor in its vision towers")
    return str(found)


def _row(tensors: Tensors, token: int) -> np.ndarray:
    return tensors.read("model.embed_tokens.weight")[token]


def _made(name: str, shape: tuple[int, ...], source: str, read: Callable[[], np.ndarray]) -> GgufTensor:
    return GgufTensor(name=name, shape=shape, sources=(source,), pieces=lambda: iter([read]))


def _type(tensor: GgufTensor) -> str:
    """Return a tensor's type: of matrices of linear layers float16, of all others float32."""
    is_matrix = len(tensor.shape) == 2 and not tensor.name.startswith("v.position_embd")
    return "f16" if is_matrix else "f32"
