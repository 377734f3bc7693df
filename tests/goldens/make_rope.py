"""Make rope.json: inverse frequencies and attention factors of transformers' `ROPE_INIT_FUNCTIONS`.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24):

    python tests/goldens/make_rope.py
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEAD_DIM = 64
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
CASES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + index / 32 for index in range(32)],
        "long_factor": [1.0 + index for index in range(32)],
    },
    {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
]


def golden(parameters: dict) -> dict:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    initialize = ROPE_INIT_FUNCTIONS.get(parameters["rope_type"], default)
    frequencies, factor = initialize(config)
    # The config as transformers writes it: with what it adds to the parameters.
    return {"config": config.to_dict()["rope_parameters"], "inv_freq": frequencies.tolist(), "attention_factor": factor}


def main() -> None:
    content = {"head_dim": HEAD_DIM, "cases": [golden(parameters) for parameters in CASES]}
    (Path(__file__).parent / "rope.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
