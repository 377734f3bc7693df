"""Make transformers' and PEFT's results for the folders of make_moe_adapter.py.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.17 and peft 0.21), after
make_moe_adapter.py:

    python tests/goldens/make_moe_adapter_logits.py

`golden.safetensors` in an adapter's folder is as make_models.py describes, with the gradients of the adapter;
`merged.safetensors` is the same for the merged folder, without gradients.
"""

import torch
from make_models import HERE, documents, golden
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def load(name: str):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="eager", dtype=torch.float32)
    return model.eval().requires_grad_(False)


if __name__ == "__main__":
    for name in ("qwen3_moe", "gpt_oss"):
        adapted = PeftModel.from_pretrained(load(name), HERE / f"{name}_adapter", is_trainable=True).eval()
        save_file(golden(adapted, documents(seed=0)), HERE / f"{name}_adapter/golden.safetensors")
    for name in ("qwen3_moe", "gpt_oss", "gpt_oss_mxfp4"):
        save_file(golden(load(f"{name}_merged"), documents(seed=0)), HERE / f"{name}_adapter/merged.safetensors")
