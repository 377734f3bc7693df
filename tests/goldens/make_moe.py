"""Make the goldens of the mixture-of-experts families, as make_models.py does for the dense ones.

Run with torch and transformers installed (made with torch 2.13 and transformers 5.17, in float32 on a CPU):

    python tests/goldens/make_moe.py

`gpt_oss_mxfp4` holds random blocks for its experts, as published checkpoints do, and bfloat16 for the rest.
"""

import json
import shutil
from pathlib import Path

import torch
from make_models import HERE, SHAPE, YARN_ROPE, documents, golden, make, randomize
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

YARN = {**YARN_ROPE, "truncate": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GPT_OSS = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_parameters": YARN}
MODELS = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe_mixed": Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[0], tie_word_embeddings=True),
    "gpt_oss": GptOssConfig(**GPT_OSS),
}
MXFP4 = GptOssConfig(**GPT_OSS | {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 3})


def make_mxfp4(folder: Path, seed: int) -> None:
    """Write a folder in the published form, with transformers' logits as its golden."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MXFP4, attn_implementation="eager").float().eval()
    randomize(model, seed)
    tensors = {}
    for name, parameter in model.requires_grad_(False).named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.data.bfloat16()
            parameter.data = tensors[name].float()
            continue
        E, D, F = parameter.shape
        blocks = torch.randint(256, (E, F, D // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 126, (E, F, D // 32), generator=generator, dtype=torch.uint8)
        parameter.data = convert_moe_packed_tensors(blocks, scales).float()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    shutil.rmtree(folder, ignore_errors=True)
    MXFP4.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(golden(model, documents(seed)), folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, config) in enumerate(MODELS.items(), start=20):
        make(HERE / name, config, seed)
    make_mxfp4(HERE / "gpt_oss_mxfp4", seed=30)
