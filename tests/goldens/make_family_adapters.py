"""Make family_adapters/: adapters of all linear layers that PEFT saved, with its logits and probes of their gradients.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2):

    python tests/goldens/make_family_adapters.py [TYPE …]

One for each part that changes adapters' names: fused projections (phi3), shared experts (qwen2_moe). Contents as in
make_families.py's goldens.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from drawn import drawn
from make_families import MODELS, build
from make_models import documents, golden, probed
from make_peft_adapters import our_name
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

HERE = Path(__file__).parent / "family_adapters"


def make(name: str) -> None:
    """Write one family's adapter and golden."""
    _, model = build(name, MODELS[name])
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(drawn(our_name(parameter_name), tuple(parameter.shape))))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    raw = json.loads((folder / "adapter_config.json").read_text())
    written = {key: value for key, value in raw.items() if value not in (None, False, {})}
    written["target_modules"] = sorted(written["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(written | {"base_model_name_or_path": name}))
    tensors = {our_name(key): tensor for key, tensor in golden(model, documents(0)).items()}
    save_file(probed(tensors), folder / "golden.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("phi3", "qwen2_moe"):
        make(name)
