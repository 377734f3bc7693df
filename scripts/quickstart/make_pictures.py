"""Write the pictures and the model folder of the quickstart that sees: `python scripts/quickstart/make_pictures.py`.

A row asks for color and shape of one or two drawn pictures, of odd sizes. Seeded, so the files are reproducible.
"""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from make import TEMPLATE, train_tokenizer
from PIL import Image, ImageDraw

ROWS, HELD_OUT = 640, 32
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 210, 40),
    "black": (20, 20, 20),
    "pink": (240, 130, 190),
}
SHAPES = ("circle", "square", "triangle", "cross")
SAMPLES = ("red", "circle"), ("blue", "triangle"), ("green", "cross"), ("black", "square")
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
CONTENT = """\
{%- macro show(content) %}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
"""
QUESTIONS = ("What is this?", "Name the color and the shape.", "What do you see?")


def draw(rng: random.Random, color: str, shape: str) -> bytes:
    """Return a picture as a PNG file."""
    width, height = rng.randint(44, 66), rng.randint(44, 66)
    shade = rng.randint(225, 255)
    image = Image.new("RGB", (width, height), (shade, shade, shade))
    pen, size = ImageDraw.Draw(image), min(width, height) - rng.randint(4, 10)
    x, y = ((side - size) // 2 + rng.randint(-2, 2) for side in (width, height))
    fill, box = COLORS[color], (x, y, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, fill)
    elif shape == "square":
        pen.rectangle(box, fill)
    elif shape == "triangle":
        pen.polygon([(x + size // 2, y), (x, y + size), (x + size, y + size)], fill)
    else:
        third = size // 3
        pen.rectangle((x + third, y, x + 2 * third, y + size), fill)
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill)
    file = io.BytesIO()
    image.quantize(16).save(file, "PNG", optimize=True)
    return file.getvalue()


def as_url(picture: bytes) -> str:
    """Return a picture as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def make_row(rng: random.Random) -> dict[str, Any]:
    """Return a chat about one picture or two."""
    kinds = [(rng.choice(list(COLORS)), rng.choice(SHAPES)) for _ in range(rng.choice([1, 1, 1, 2]))]
    names = [f"a {color} {shape}" for color, shape in kinds]
    question = rng.choice(QUESTIONS) if len(kinds) == 1 else "What are these?"
    content = [{"type": "image"} for _ in kinds] + [{"type": "text", "text": question}]
    answer = names[0].capitalize() + "." if len(kinds) == 1 else f"First {names[0]}, then {names[1]}."
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [as_url(draw(rng, *kind)) for kind in kinds]}


def model_config(vocabulary: int, ids: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a small Qwen3.5 with a small tower."""
    text = {
        **{"model_type": "qwen3_5_text", "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"layer_types": ["full_attention"] * 3, "max_position_embeddings": 1024, "initializer_range": 0.05},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }
    vision = {
        **{"model_type": "qwen3_5_vision", "depth": 3, "hidden_size": 96, "num_heads": 4, "intermediate_size": 192},
        **{"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128},
        **{"num_position_embeddings": 64, "initializer_range": 0.05},
    }
    return {
        **{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
        **{"text_config": text, "vision_config": vision, "tie_word_embeddings": False},
        "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def main() -> None:
    """Write the files."""
    folder = Path(__file__).parents[2] / "jaxglue" / "recipes" / "quickstart"
    rng = random.Random(0)
    rows = [make_row(rng) for _ in range(ROWS + HELD_OUT)]
    for name, part in (("pictures.jsonl", rows[:ROWS]), ("more_pictures.jsonl", rows[ROWS:])):
        (folder / name).write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in part))
    texts = [json.dumps([message["content"] for message in row["messages"]]) for row in rows]
    tokenizer = train_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = CONTENT + TEMPLATE.replace("message.content", "show(message.content)")
    (folder / "pictures").mkdir(exist_ok=True)
    for color, shape in SAMPLES:
        (folder / "pictures" / f"{color}-{shape}.png").write_bytes(draw(rng, color, shape))
    seeing = folder / "seeing"
    tokenizer.save_pretrained(seeing)
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    (seeing / "config.json").write_text(json.dumps(model_config(len(tokenizer), ids), indent=2) + "\n")
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 16384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (seeing / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
