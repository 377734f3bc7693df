"""Write `defaults.json`: fields that transformers gives a config.json with sizes alone, by model type.

Run with transformers installed (made with 5.24):

    python tests/goldens/make_defaults.py
"""

import json
from pathlib import Path

from transformers import AutoConfig

TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "mistral",
    "ministral",
]
TYPES += [
    "ministral3",
    "mixtral",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
]
TYPES += ["glm4_moe", "glm4_moe_lite", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss"]
TYPES += ["seed_oss", "exaone4", "hunyuan_v1_dense", "ernie4_5", "ernie4_5_moe", "minimax_m2", "qwen3_next"]
TYPES += ["gemma4_unified_text", "muse_glimmer_text", "lfm2", "lfm2_moe", "lfm3", "cohere2"]
SIZES = {"num_hidden_layers": 30, "num_attention_heads": 64, "hidden_size": 1024, "intermediate_size": 96}
SIZES |= {"vocab_size": 64, "use_sliding_window": True}
UNREAD = ["_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype"]
UNREAD += ["eos_token_id", "id2label", "is_encoder_decoder", "label2id", "layer_types", "output_attentions"]
UNREAD += ["output_hidden_states", "pad_token_id", "problem_type", "return_dict", "transformers_version", "use_cache"]


def defaults(model_type: str) -> dict:
    """Return the fields of one type that are neither null nor about something else than the model."""
    made = json.loads(AutoConfig.for_model(model_type, **SIZES).to_json_string(use_diff=False))
    return {name: value for name, value in made.items() if value is not None and name not in UNREAD}


if __name__ == "__main__":
    table = {model_type: defaults(model_type) for model_type in TYPES}
    lines = [f'"{name}": {json.dumps(fields)}' for name, fields in table.items()]
    (Path(__file__).parent / "defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
