"""Make the goldens of model families: config.json, logits, loss, and norms and probes of all gradients.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.24, in float32 on a CPU):

    python tests/goldens/make_families.py [TYPE …]

Weights are those of `drawn.py`. Each file `families/<name>.safetensors` has as metadata the config that transformers
saves, and the tensors of `make_models.py`, but for gradients their norms (`norm.<parameter>`) and `probes.<parameter>`.
"""

import json
import sys
from pathlib import Path

import torch
from drawn import drawn, probes
from make_models import SHAPE, YARN_ROPE, documents, golden
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent / "families"
KINDS = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 4, "layer_types": KINDS}
FULL_YARN = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
MODELS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 4},
    "mistral": {"sliding_window": 4},
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {**SLIDING, "rope_parameters": FULL_YARN},
    "smollm3": {**SLIDING, "use_sliding_window": True, "no_rope_layers": [0, 1], "rope_theta": 100.0},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 12, "rope_parameters": FULL_YARN},
}


def make(name: str, fields: dict) -> None:
    """Write one family's golden."""
    config = AutoConfig.for_model(name, **SHAPE | {"pad_token_id": None} | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(parameter_name, tuple(parameter.shape))))
    tensors = golden(model, documents(0))
    for key in [key for key in tensors if key.startswith("grad.")]:
        gradient, parameter_name = tensors.pop(key).numpy(), key.removeprefix("grad.")
        tensors[f"norm.{parameter_name}"] = torch.tensor(float((gradient**2).sum() ** 0.5))
        tensors[f"probes.{parameter_name}"] = torch.from_numpy(probes(parameter_name, gradient))
    HERE.mkdir(exist_ok=True)
    saved = json.dumps(config.to_dict() | {"architectures": [type(model).__name__]})
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"config": saved})


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name, MODELS[name])
