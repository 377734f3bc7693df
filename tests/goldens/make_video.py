"""Make video.safetensors: logits of a document with a video of two pairs of frames, and an image, by Qwen's models.

Run as make_vision.py. Patches of pair i are those that `drawn.pixels` draws for images 10 · i and 10 · i + 1. Gemma 4
sees the first frame of each pair.
"""

from pathlib import Path

import numpy as np
import torch
from drawn import pixels
from make_vision import END, IMAGE, MEAN, MODELS, START, STD, build, gemma4_inputs, qwen_inputs
from safetensors.torch import save_file

VIDEO, PAIRS, GRID, PICTURE = 19, 2, (2, 4), (4, 2)


def inputs() -> dict:
    """Return the document: texts between a video's pairs of frames, then an image."""
    frame = [3, 4, START, *[VIDEO] * 2, END]
    tokens = torch.tensor([[1, 2, *frame, *frame, 5, START, *[IMAGE] * 2, END, 6, 7]])
    patches = []
    for pair in range(PAIRS):
        frames = [pixels(10 * pair + frame, GRID, 4).reshape(-1, 3, 1, 16) for frame in range(2)]
        patches.append((np.concatenate(frames, 2) / 255 - MEAN) / STD)
    values = np.concatenate(patches).reshape(PAIRS * GRID[0] * GRID[1], -1).astype(np.float32)
    video = {"pixel_values_videos": torch.from_numpy(values), "video_grid_thw": torch.tensor([[PAIRS, *GRID]])}
    kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    return {"input_ids": tokens, "mm_token_type_ids": kinds} | video | qwen_inputs([pixels(5, PICTURE, 4)], [PICTURE])


def gemma4_video() -> dict:
    """Return the same document with single frames."""
    frames = gemma4_inputs([pixels(10 * pair, GRID, 4) for pair in range(PAIRS)], [GRID] * PAIRS)
    names = {"pixel_values": "pixel_values_videos", "image_position_ids": "video_position_ids"}
    video = {names[name]: value for name, value in frames.items()} | {"num_frames_per_video": torch.tensor([PAIRS])}
    tokens = {name: value for name, value in inputs().items() if name in ("input_ids", "mm_token_type_ids")}
    return tokens | video | gemma4_inputs([pixels(5, PICTURE, 4)], [PICTURE])


def main() -> None:
    """Write the logits of the models."""
    tensors = {"tokens": inputs()["input_ids"][0].int()}
    for name in ("qwen3_5", "qwen3_vl", "gemma4", "gemma4_wide"):
        MODELS[name]["video_token_id"] = VIDEO
        _, model = build(name)
        given = gemma4_video() if name.startswith("gemma4") else inputs()
        with torch.no_grad():
            tensors[f"logits.{name}"] = model(**given, use_cache=False).logits[0].contiguous()
    save_file(tensors, Path(__file__).parent / "video.safetensors")


if __name__ == "__main__":
    main()
