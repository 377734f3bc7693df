"""Make family_steps/: ten steps of AdamW on PEFT's adapters of all linear layers in each family's layers.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2):

    python tests/goldens/make_family_steps.py [TYPE …]

Weights and first adapters are those of `drawn.py`, B zero; the documents of step i are those of seed i. Each file has
losses, the steps' tokens, and of each matrix the norm and `probes` of its movement, `packed`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from drawn import drawn, packed, probes
from make_families import MODELS, build
from make_models import LENGTHS, documents, logits_and_loss
from make_peft_adapters import our_name
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "family_steps"
STEPS, RATE = 10, 1e-2
LORA = {"r": 2, "lora_alpha": 8}


def make(name: str) -> None:
    """Write one family's steps."""
    torch.manual_seed(0)
    _, model = build(name, MODELS[name])
    targets = r".*\.layers\.\d+\.(.+\.)?(\w+_proj|w[123]|per_layer_input_gate|per_layer_projection)"
    model = get_peft_model(model, LoraConfig(**LORA, target_modules=targets)).eval()
    trained = {our_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for path, parameter in trained.items():
            parameter.copy_(torch.from_numpy(drawn(path, tuple(parameter.shape))) * ("lora_A" in path))
    before = {path: parameter.detach().clone() for path, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        _, loss = logits_and_loss(model, documents(step))
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {"losses": torch.stack(losses).numpy(), "lengths": np.array(LENGTHS, np.int32)}
    tensors["tokens"] = torch.stack([torch.cat(documents(step)) for step in range(STEPS)]).int().numpy()
    for path, parameter in trained.items():
        moved = (parameter.detach() - before[path]).numpy()
        tensors[f"norm.{path}"] = (moved**2).sum() ** 0.5
        tensors[f"probes.{path}"] = probes(path, moved)
    HERE.mkdir(exist_ok=True)
    save_file(packed(tensors), HERE / f"{name}.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS.keys() - {"cohere"}:
        make(name)
