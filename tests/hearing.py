"""A tiny model that hears, and clips for it."""

import io
import json
import wave
from pathlib import Path

import numpy as np
from tiny_runs import make_seeing


def make_hearing(folder: Path) -> None:
    """Write the folder of a tiny Gemma 4 that sees and hears, without weights."""
    make_seeing(folder)
    (folder / "preprocessor_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    text = {name: raw["text_config"][name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"model_type": "gemma4_text", "vocab_size": 368, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    text |= {"vocab_size_per_layer_input": 368, "num_kv_shared_layers": 0, "global_head_dim": 16}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision |= {"head_dim": 8, "intermediate_size": 24, "patch_size": 4, "position_embedding_size": 64}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
    audio |= {"subsampling_conv_channels": [16, 4], "attention_chunk_size": 4, "attention_context_left": 5}
    ids = {"image_token_id": 364, "boi_token_id": 362, "eoi_token_id": 363}
    ids |= {"audio_token_id": 365, "boa_token_id": 366, "eoa_token_index": 367}
    raw = {"model_type": "gemma4", "text_config": text, "vision_config": vision, "audio_config": audio, **ids}
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["Gemma4ForConditionalGeneration"]}))
    settings = {"image_processor": {"max_soft_tokens": 70}, "feature_extractor": {"feature_size": 16}}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    tokens = ["<|audio|>", "<|audio_start|>", "<|audio_end|>"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**last, "id": 365 + i, "content": token} for i, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] += tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = (
        (folder / "chat_template.jinja")
        .read_text()
        .replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    )
    heard = "{% elif part.type == 'audio' %}{{- '<|audio|>' }}{% else %}{{- part.text"
    (folder / "chat_template.jinja").write_text(template.replace("{% else %}{{- part.text", heard))


def wav(samples, *, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    """Return a WAV file of samples within ±1, as whole numbers of so many bytes."""
    whole = np.round(np.asarray(samples, np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    stored = (whole + 128 if width == 1 else whole).astype("<i8").repeat(channels)[:, None].view(np.uint8)[:, :width]
    with wave.open(file := io.BytesIO(), "wb") as target:
        target.setparams((channels, width, rate, 0, "NONE", ""))
        target.writeframes(stored.tobytes())
    return file.getvalue()
