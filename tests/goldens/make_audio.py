"""Make audio.safetensors: a Gemma 4 that hears and sees, its logits, loss and gradients, and frames of a clip.

Run as make_vision.py, of whose goldens this one has the tensors, with `owners`, `grids` and `clips` [N, 2] of images
and clips in the order of their tokens: [frames, 0] of a clip. `mel` [frames, 128] is what transformers' feature
extractor makes of the first 1,000 samples of `drawn.samples`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from drawn import frames, pixels, samples
from make_models import probed
from make_vision import (
    GEMMA4,
    GEMMA4_TOKENS,
    GEMMA4_TOWER,
    IMAGE,
    MODELS,
    OWN,
    build,
    document_tensors,
    gemma4_inputs,
    our_name,
)
from safetensors.torch import save_file
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

AUDIO, BANDS = 19, 16
EARS = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 12},
    **{"subsampling_conv_channels": [BANDS, 4], "attention_chunk_size": 4, "attention_context_left": 5},
}
DOCUMENTS = ([5], [3, (45, 0), 4], [2, (2, 4), 1, (6, 0), (17, 0), 2], [(4, 2), 3])
"""Texts, by their tokens, images, by their patches, and clips, by their frames."""


def documents() -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return tokens, and images and clips, of each document."""
    rng, made = np.random.default_rng(0), []
    for parts in DOCUMENTS:
        tokens, grids = [], []
        for part in parts:
            if isinstance(part, int):
                tokens += rng.integers(1, AUDIO, part).tolist()
            else:
                rows, columns = part
                tokens += [IMAGE] * (rows * columns // 4) if columns else [AUDIO] * -(-rows // 4)
                grids.append(part)
        made.append((tokens, grids))
    return made


def clip_inputs(clips: list[np.ndarray]) -> dict:
    """Return frames and which of them are a clip's, padded to the most and some."""
    most = max(map(len, clips)) + 3
    values, mask = np.zeros((len(clips), most, BANDS), np.float32), np.zeros((len(clips), most), bool)
    for line, own, clip in zip(values, mask, clips, strict=True):
        line[: len(clip)], own[: len(clip)] = clip, True
    return {"input_features": torch.from_numpy(values), "input_features_mask": torch.from_numpy(mask)}


def main() -> None:
    """Write the golden."""
    MODELS["gemma4"] = {
        **{"text_config": GEMMA4 | OWN, "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True}},
        **GEMMA4_TOKENS | {"audio_config": EARS, "audio_token_id": AUDIO},
    }
    config, model = build("gemma4")
    logits, total, targets, number = [], 0.0, 0, 0
    for tokens, grids in documents():
        ids, images, clips = torch.tensor([tokens]), [], []
        for grid in grids:
            (images if grid[1] else clips).append((number, grid))
            number += 1
        inputs = {}
        if images:
            inputs |= gemma4_inputs([pixels(i, grid, 4) for i, grid in images], [grid for _, grid in images])
        if clips:
            inputs |= clip_inputs([frames(i, grid[0], BANDS) for i, grid in clips])
        types = (ids == IMAGE).int() + 3 * (ids == AUDIO).int()
        scores = model(input_ids=ids, use_cache=False, mm_token_type_ids=types, **inputs).logits[0]
        logits.append(scores)
        total = total + torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:], reduction="sum")
        targets += len(tokens) - 1
    loss = total / targets
    loss.backward()
    made = documents()
    extract = Gemma4AudioFeatureExtractor()
    mel = extract([samples(1000)], return_tensors="np")
    tensors = {f"grad.{our_name(n)}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors |= {
        **document_tensors(made),
        "mel": torch.from_numpy(mel["input_features"][0][mel["input_features_mask"][0]]),
        **{"logits": torch.cat(logits).detach(), "loss": loss.detach()},
    }
    saved = json.dumps(config.to_dict() | {"architectures": [type(model).__name__]})
    save_file(probed(tensors), Path(__file__).parent / "audio.safetensors", metadata={"config": saved})
    print(loss.item(), len(tensors))


if __name__ == "__main__":
    main()
