"""Make the golden of Qwen3.5's text model: see make_models.py (made with torch and transformers 5.24, CPU).

    python tests/goldens/make_qwen3_5.py

transformers runs each document alone: its packed path raises or leaks the state from one to the next.
"""

from make_models import HERE, SHAPE, make
from transformers import Qwen3_5TextConfig

MODELS = {
    "qwen3_5": Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 2},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    )
}

if __name__ == "__main__":
    for seed, (name, config) in enumerate(MODELS.items(), start=50):
        make(HERE / name, config, seed)
