"""Make adapter.safetensors and merged.safetensors: transformers' and PEFT's results for folders written by jaxglue.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.17 and peft 0.21), after
make_adapter.py:

    python tests/goldens/make_adapter_logits.py

Contents as in make_models.py's `golden.safetensors`, but whole gradients (`grad.<parameter>`), of the adapter only.
"""

from make_models import HERE, documents, golden
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def load(name: str):
    return AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="eager").eval()


if __name__ == "__main__":
    adapted = PeftModel.from_pretrained(load("qwen3_tied"), HERE / "adapter", is_trainable=True).eval()
    save_file(golden(adapted, documents(seed=0)), HERE / "adapter.safetensors")
    merged = load("merged").requires_grad_(False)
    save_file(golden(merged, documents(seed=0)), HERE / "merged.safetensors")
