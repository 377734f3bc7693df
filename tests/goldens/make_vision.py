"""Make the goldens of models that see: config.json, logits, loss, and norms and probes of all gradients.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_vision.py [TYPE …]

Weights are those of `drawn.py`, and so are images. Each file `vision/<name>.safetensors` has as metadata the config
that transformers saves, and the tensors of `make_models.py` with `owners` [N] and `grids` [N, 2]: the document and the
patches of each image. Documents run alone: transformers packs some families' images wrongly.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from drawn import drawn, pixels
from make_families import GEMMA4_ROPES
from make_families import our_name as text_name
from make_models import SHAPE, probed
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

HERE = Path(__file__).parent / "vision"
MEAN = STD = 0.5
IMAGE, START, END, BREAK = 20, 21, 22, 23
TEXT = {
    **SHAPE | {"num_hidden_layers": 2, "vocab_size": 24, "max_position_embeddings": 128},
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "mrope_section": [2, 1, 1]},
        "mrope_interleaved": True,
    },
}
QWEN_TOWER = {
    **{"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4},
    **{"spatial_merge_size": 2, "out_hidden_size": 16, "num_position_embeddings": 25},
}
QWEN_VL = {
    **SHAPE | {"num_hidden_layers": 3, "vocab_size": 24, "max_position_embeddings": 128},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    },
}
QWEN_TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    "shared_expert_intermediate_size": 24,
}
GEMMA = {
    **SHAPE | {"num_hidden_layers": 2, "vocab_size": 24, "max_position_embeddings": 128},
    **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "query_pre_attn_scalar": 12},
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full_attention", 100.0), ("sliding_attention", 20.0))
    },
}
SIGLIP = {
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    **{"patch_size": 4, "image_size": 16, "vision_use_head": False},
}
MISTRAL = SHAPE | {"num_hidden_layers": 2, "vocab_size": 24, "max_position_embeddings": 128, "model_type": "mistral"}
PIXTRAL = {
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    **{"patch_size": 4, "head_dim": 8, "image_size": 64, "model_type": "pixtral"},
}
GEMMA4 = {
    **SHAPE
    | {"vocab_size": 24, "max_position_embeddings": 128, "global_head_dim": 16, "rope_parameters": GEMMA4_ROPES},
    **{"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}
OWN = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 24},
}
WIDE = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
GEMMA4_TOWER = {
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 24, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 32},
}
GEMMA4_PATCHES = {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
GEMMA4_PATCHES |= {"output_proj_dims": 16}
GEMMA4_TOKENS = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "audio_config": None}
GEMMA4_TOKENS |= {"video_token_id": BREAK, "audio_token_id": None}
MODELS = {
    "gemma4": {
        **{"text_config": GEMMA4 | OWN, "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True}},
        **GEMMA4_TOKENS,
    },
    "gemma4_unified": {
        **{"text_config": GEMMA4 | WIDE, "vision_config": GEMMA4_PATCHES},
        **GEMMA4_TOKENS,
    },
    "gemma4_wide": {
        **{"text_config": GEMMA4 | WIDE, "vision_config": GEMMA4_TOWER | {"standardize": True}},
        **GEMMA4_TOKENS,
    },
    "gemma3": {
        **{"text_config": GEMMA, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
        **{"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
    },
    "mistral3": {
        **{"text_config": MISTRAL, "vision_config": PIXTRAL, "image_token_index": IMAGE, "spatial_merge_size": 2},
        "multimodal_projector_bias": True,
    },
    "qwen3_vl": {
        **{"text_config": QWEN_VL, "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]}},
        **QWEN_TOKENS,
    },
    "qwen3_5": {"text_config": TEXT, "vision_config": QWEN_TOWER, **QWEN_TOKENS},
    "qwen3_5_moe": {"text_config": TEXT | EXPERTS, "vision_config": QWEN_TOWER, **QWEN_TOKENS},
}
DOCUMENTS = {
    "qwen3_5": ([7], [5, (2, 4), 6], [(6, 2), 1, (4, 4), (2, 2), 3], [2, (4, 10), 1]),
    "gemma3": ([7], [5, (4, 4), 6], [(4, 4), 1, (4, 4), (4, 4), 3], [2, (4, 4), 1]),
    "gemma4_unified": ([7], [5, (1, 2), 6], [(3, 1), 1, (2, 2), (1, 1), 3], [2, (2, 5), 1]),
}
"""Texts, by their tokens, and images, by their patches."""
ALIKE = {
    **{"gemma4": "qwen3_5", "gemma4_wide": "qwen3_5"},
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3_5",
    "mistral3": "qwen3_5",
}


STORED = "put_min", "put_max", "std_bias", "std_scale", "layer_scalar"
"""Buffers that are drawn."""


def documents(name: str) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return tokens and images of each document."""
    rng, made = np.random.default_rng(0), []
    for parts in DOCUMENTS[ALIKE.get(name, name)]:
        tokens, grids = [], []
        for part in parts:
            if isinstance(part, int):
                tokens += rng.integers(1, IMAGE, part).tolist()
            else:
                tokens += [START, *image_tokens(name, part), END]
                grids.append(part)
        made.append((tokens, grids))
    return made


def image_tokens(name: str, grid: tuple[int, int]) -> list[int]:
    """Return the tokens of an image; of Mistral's, another one ends each row but the last."""
    if name == "gemma4_unified":
        return [IMAGE] * (grid[0] * grid[1])
    rows, columns = grid[0] // 2, grid[1] // 2
    if name != "mistral3":
        return [IMAGE] * (rows * columns)
    return ([IMAGE] * columns + [BREAK]) * (rows - 1) + [IMAGE] * columns


def squares(image: np.ndarray, grid: tuple[int, int], patch: int) -> np.ndarray:
    """Return an image [3, H, W] from its patches in the order of merged ones."""
    cut = image.reshape(grid[0] // 2, grid[1] // 2, 2, 2, 3, patch, patch)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, grid[0] * patch, grid[1] * patch)


def square_inputs(images: list[np.ndarray], grids: list[tuple[int, int]], patch: int) -> dict:
    """Return normalized images, padded to the largest, and their sizes."""
    sizes = [(rows * patch, columns * patch) for rows, columns in grids]
    values = np.zeros((len(images), 3, *np.max(sizes, 0)), np.float32)
    for target, image, grid, (height, width) in zip(values, images, grids, sizes, strict=True):
        target[:, :height, :width] = (squares(image, grid, patch) / 255 - MEAN) / STD
    return {"pixel_values": torch.from_numpy(values), "image_sizes": torch.tensor(sizes)}


def qwen_inputs(images: list[np.ndarray], grids: list[tuple[int, int]]) -> dict:
    """Return pixels in the layout of Qwen's tower, the frame twice."""
    values = [((image / 255 - MEAN) / STD).reshape(len(image), 3, 1, -1).repeat(2, 2) for image in images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate(values).reshape(-1, values[0][0].size).astype(np.float32)),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
    }


def gemma4_inputs(images: list[np.ndarray], grids: list[tuple[int, int]]) -> dict:
    """Return values and places of patches, padded to the most."""
    most = max(len(image) for image in images)
    values = np.zeros((len(images), most, images[0].shape[1]), np.float32)
    places = np.full((len(images), most, 2), -1)
    for target, place, image, (rows, columns) in zip(values, places, images, grids, strict=True):
        target[: len(image)] = image / 255
        indices = np.indices((rows, columns)).reshape(2, rows // 2, 2, columns // 2, 2)
        row, column = indices.transpose(0, 1, 3, 2, 4).reshape(2, -1)  # in the order of merged ones
        place[: len(image)] = np.stack([column, row], -1)
    return {"pixel_values": torch.from_numpy(values), "image_position_ids": torch.from_numpy(places)}


def unified_inputs(images: list[np.ndarray], grids: list[tuple[int, int]]) -> dict:
    """Return values and places of large patches, padded to the most."""
    most = max(len(image) for image in images)
    values = np.zeros((len(images), most, images[0].shape[1]), np.float32)
    places = np.full((len(images), most, 2), -1)
    for target, place, image, grid in zip(values, places, images, grids, strict=True):
        target[: len(image)] = image / 255
        place[: len(image)] = np.indices(grid).reshape(2, -1)[::-1].T
    return {"pixel_values": torch.from_numpy(values), "image_position_ids": torch.from_numpy(places)}


def our_name(name: str) -> str:
    """Return a parameter's name here; Gemma 4 12B's files have others than its modules."""
    if name.startswith("model.embed_vision.") and "multimodal_embedder" not in name and "projection" not in name:
        name = name.replace("embed_vision", "vision_embedder")
    name = name.replace("embed_vision.multimodal_embedder.", "embed_vision.")
    return text_name(name.replace("model.language_model.", "model."))


def build(name: str) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Return a config and its model with drawn weights."""
    config = AutoConfig.for_model(name.removesuffix("_wide"), **MODELS[name])
    for part in filter(None, (config, config.text_config, config.vision_config, getattr(config, "audio_config", None))):
        part._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        stored = [item for item in model.named_buffers() if item[0].endswith(STORED)]
        for parameter_name, parameter in [*model.named_parameters(), *stored]:
            parameter.copy_(torch.from_numpy(drawn(our_name(parameter_name), tuple(parameter.shape))))
    return config, model


def loss_of(name: str, config, model, first_image: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of the documents' next tokens, and logits, with images numbered from one."""
    patch = getattr(config.vision_config, "model_patch_size", config.vision_config.patch_size)
    logits, total, targets, count = [], 0.0, 0, first_image
    for tokens, grids in documents(name):
        ids = torch.tensor([tokens])
        images = [pixels(count + i, grid, patch) for i, grid in enumerate(grids)]
        count += len(grids)
        inputs = {}
        if grids and name.startswith("qwen"):
            inputs = qwen_inputs(images, grids)
        elif grids and name == "gemma4_unified":
            inputs = unified_inputs(images, grids)
        elif grids and name.startswith("gemma4"):
            inputs = gemma4_inputs(images, grids)
        elif grids:
            inputs = square_inputs(images, grids, patch)
        types = (ids == IMAGE).int()
        if name == "gemma3":
            inputs |= {"token_type_ids": types}
            inputs.pop("image_sizes", None)
        elif name.startswith(("qwen", "gemma4")):
            inputs |= {"mm_token_type_ids": types}
        if name == "gemma4_unified":  # whose forward alone lets images cross windows; `generate` does not
            embeddings = model.get_input_embeddings()(ids)
            masks = model.create_masks_for_generate(config, embeddings, None, None, None, types)
            inputs |= {"attention_mask": masks}
        scores = model(input_ids=ids, use_cache=False, **inputs).logits[0]
        logits.append(scores)
        total = total + torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:], reduction="sum")
        targets += len(tokens) - 1
    return total / targets, torch.cat(logits)


def document_tensors(made: list) -> dict[str, torch.Tensor]:
    """Return the tokens and grids of documents as goldens store them."""
    return {
        "tokens": torch.tensor([token for tokens, _ in made for token in tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(tokens) for tokens, _ in made], dtype=torch.int32),
        "owners": torch.tensor([d for d, (_, grids) in enumerate(made) for _ in grids], dtype=torch.int32),
        "grids": torch.tensor([grid for _, grids in made for grid in grids], dtype=torch.int32),
    }


def make(name: str) -> None:
    """Write one family's golden."""
    config, model = build(name)
    loss, logits = loss_of(name, config, model)
    made = documents(name)
    loss.backward()
    tensors = {f"grad.{our_name(n)}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors |= {
        **document_tensors(made),
        **{"logits": logits.detach(), "loss": loss.detach()},
    }
    HERE.mkdir(exist_ok=True)
    saved = json.dumps(config.to_dict() | {"architectures": [type(model).__name__]})
    save_file(probed(tensors), HERE / f"{name}.safetensors", metadata={"config": saved})
    print(name, loss.item(), len(tensors))


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name)
