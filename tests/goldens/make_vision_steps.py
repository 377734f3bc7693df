"""Make vision_steps/: ten steps of AdamW on PEFT's adapters of all linear layers, of texts, towers and projectors.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2):

    python tests/goldens/make_vision_steps.py [TYPE …]

Documents are those of `make_vision.py`, weights and first adapters those of `drawn.py`, B zero; images of step i are
numbered from 100 · i. Each file has losses, and of each matrix the norm and `probes` of its movement, `packed`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from drawn import drawn, packed, probes
from make_family_steps import LORA, RATE, STEPS
from make_peft_adapters import our_name as without_peft
from make_vision import build, loss_of, our_name
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "vision_steps"
FROZEN = {"qwen3_vl": "visual"}
"""Parts without adapters."""


def make(name: str) -> None:
    """Write one family's steps."""
    torch.manual_seed(0)
    config, model = build(name)
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    without = "lm_head", *([FROZEN[name]] if name in FROZEN else [])
    targets = [path for path in linears if not any(part in path for part in without)]
    adapted = get_peft_model(model, LoraConfig(**LORA, target_modules=targets)).eval()
    trained = {
        our_name(without_peft(path)): parameter
        for path, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for path, parameter in trained.items():
            parameter.copy_(torch.from_numpy(drawn(path, tuple(parameter.shape))) * ("lora_A" in path))
    before = {path: parameter.detach().clone() for path, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss, _ = loss_of(name, config, adapted, first_image=100 * step)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {"losses": torch.stack(losses).numpy()}
    for path, parameter in trained.items():
        moved = (parameter.detach() - before[path]).numpy()
        tensors[f"norm.{path}"] = np.float32((moved**2).sum() ** 0.5)
        tensors[f"probes.{path}"] = probes(path, moved)
    HERE.mkdir(exist_ok=True)
    save_file(packed(tensors), HERE / f"{name}.safetensors")
    print(name, losses[0].item(), losses[-1].item(), len(trained))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("qwen3_vl", "gemma3", "mistral3"):
        make(name)
