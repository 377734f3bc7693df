"""Make vision_steps/: ten steps of AdamW on PEFT's adapters of all linear layers, of texts, towers and projectors.

Run with torch, transformers and peft installed (made with torch 2.13, transformers 5.24 and peft 0.21.2):

    python tests/goldens/make_vision_steps.py [TYPE …]

Documents are those of `make_vision.py`, weights and first adapters those of `drawn.py`, B zero; images of step i are
numbered from 100 · i. Each file has losses, and of each matrix the norm and `probes` of its movement, `packed`.

Where a gradient is next to 0 Adam divides it by its own size, so that rounding decides: at a rate of 1e-2 Qwen3.5's
steps in float32 part by 3e-2 of the movement from those in float64, and by 3e-3 from themselves after a change of 1e-7
in the adapters' beginning. Its steps are those of float64 at a lower rate, and `error` is how far float32's are from
them here, of losses and of the movement.
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
RATES = {"qwen3_5": 3e-4}
"""Of those whose steps rounding decides at `RATE`."""


def own_name(path: str) -> str:
    """Return the name here of one of PEFT's parameters."""
    return our_name(without_peft(path)).replace("embed_vision.projection", "embed_vision.embedding_projection")


def steps_of(name: str, dtype: torch.dtype, rate: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the losses of the steps, and how far each matrix moved."""
    torch.manual_seed(0)
    config, model = build(name)
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = [path for path in linears if "lm_head" not in path]
    adapted = get_peft_model(model, LoraConfig(**LORA, target_modules=targets)).eval().to(dtype)
    trained = {own_name(path): parameter for path, parameter in adapted.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for path, parameter in trained.items():
            parameter.copy_(torch.from_numpy(drawn(path, tuple(parameter.shape))) * ("lora_A" in path))
    before = {path: parameter.detach().clone() for path, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss, _ = loss_of(name, config, adapted, first_image=100 * step)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array(losses), {path: (p.detach() - before[path]).numpy() for path, p in trained.items()}


def make(name: str) -> None:
    """Write one family's steps."""
    rate = RATES.get(name, RATE)
    losses, moved = steps_of(name, torch.float64 if name in RATES else torch.float32, rate)
    tensors = {"losses": losses.astype(np.float32)}
    if name in RATES:
        own_losses, own = steps_of(name, torch.float32, rate)
        distance = sum(np.sum((own[path] - moved[path]) ** 2) for path in moved) / sum(
            np.sum(values**2) for values in moved.values()
        )
        error = np.array([np.abs(own_losses / losses - 1).max(), distance**0.5], np.float32)
        tensors |= {"rate": np.array(rate, np.float32), "error": error}
        print(name, "float32's error", error)
    for path, values in moved.items():
        tensors[f"norm.{path}"] = np.float32((values**2).sum() ** 0.5)
        tensors[f"probes.{path}"] = probes(path, values.astype(np.float32))
    HERE.mkdir(exist_ok=True)
    save_file(packed(tensors), HERE / f"{name}.safetensors")
    print(name, losses[0], losses[-1], len(moved))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("qwen3_vl", "qwen3_5", "gemma3", "gemma4_unified", "mistral3"):
        make(name)
