"""Make peft/: adapters that PEFT saved itself, of features beside plain LoRA, with its logits and gradients.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.23 and peft 0.21.2), after
make_models.py:

    python tests/goldens/make_peft_adapters.py

Contents of `golden.safetensors` as in make_models.py's, gradients of the adapter only, under jaxglue's names.
"""

import json
import re
import shutil

import torch
from make_adapter_logits import load
from make_models import HERE, documents, golden
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

TOKENS = [7, 3, 20]
CASES = {
    "dora_rows": (
        "qwen3_window_bias",
        LoraConfig(
            r=2,
            lora_alpha=3,
            target_modules=["q_proj", "o_proj", "down_proj"],
            use_dora=True,
            use_rslora=True,
            rank_pattern={"down_proj": 1},
            alpha_pattern={"layers.1.self_attn.q_proj": 7},
            trainable_token_indices={"embed_tokens": TOKENS, "lm_head": TOKENS},
        ),
    ),
    "whole": (
        "qwen3_window_bias",
        LoraConfig(
            r=1,
            lora_alpha=2,
            target_modules="model.layers.1.self_attn.v_proj",
            modules_to_save=["embed_tokens", "lm_head"],
        ),
    ),
    "whole_tied": (
        "qwen3_tied",
        LoraConfig(
            r=1,
            lora_alpha=2,
            target_modules="model.layers.0.mlp.up_proj",
            modules_to_save=["embed_tokens"],
            ensure_weight_tying=True,
        ),
    ),
    "untied": (
        "qwen3_tied",
        LoraConfig(
            r=1,
            lora_alpha=2,
            target_modules="model.layers.0.mlp.up_proj",
            modules_to_save=["embed_tokens"],
        ),
    ),
    "untied_both": (
        "qwen3_tied",
        LoraConfig(
            r=1,
            lora_alpha=2,
            target_modules="model.layers.0.mlp.up_proj",
            modules_to_save=["embed_tokens", "lm_head"],
        ),
    ),
    "untied_head": (
        "qwen3_tied",
        LoraConfig(
            r=1,
            lora_alpha=2,
            target_modules="model.layers.0.mlp.up_proj",
            modules_to_save=["lm_head"],
        ),
    ),
    "vocabulary": (
        "qwen3_window_bias",
        LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    ),
    "vocabulary_tied": (
        "qwen3_tied",
        LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj", "embed_tokens"]),
    ),
    "vocabulary_untied": (
        "qwen3_tied",
        LoraConfig(
            r=2,
            lora_alpha=3,
            use_rslora=True,
            rank_pattern={"lm_head": 1},
            target_modules=["v_proj", "embed_tokens", "lm_head"],
        ),
    ),
}


def our_name(name: str) -> str:
    """Return jaxglue's name of one of PEFT's parameters."""
    for part in ("base_model.model.", ".default", ".modules_to_save", ".token_adapter", "embedding_"):
        name = name.replace(part, "", 1)
    return name.removesuffix(".weight") if ".lora_" in name else name


def make(case: str) -> None:
    base, config = CASES[case]
    folder, generator = HERE / "peft" / case, torch.Generator().manual_seed(11)
    model = get_peft_model(load(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(".default" in name)
            if re.search(r"\.lora_(embedding_)?[AB]\.", name):
                parameter.copy_(0.3 * noise)
            elif parameter.requires_grad:
                parameter.mul_(1 + 0.2 * noise)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    raw = json.loads((folder / "adapter_config.json").read_text())
    written = {key: value for key, value in raw.items() if value not in (None, False, {})}
    (folder / "adapter_config.json").write_text(json.dumps(written | {"base_model_name_or_path": base}))
    results = {our_name(name): tensor.contiguous() for name, tensor in golden(model, documents(seed=0)).items()}
    for name in results:
        if name.startswith("grad.") and name.endswith("trainable_tokens_delta"):
            results[name] = results[name][torch.tensor(TOKENS).argsort()]  # jaxglue sorts rows by token
    save_file(results, folder / "golden.safetensors")


if __name__ == "__main__":
    for case in CASES:
        make(case)
