"""Write `adam8bit.safetensors`: three steps of bitsandbytes' AdamW with 8-bit states, of some blocks.

Run with torch and bitsandbytes installed (made with torch 2.13 and bitsandbytes 0.50.2 on a CPU):

    TORCHDYNAMO_DISABLE=1 python tests/goldens/make_adam8bit.py

bitsandbytes' PyTorch code is used, see `make_nf4.py`.
"""

from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

with mock.patch("ctypes.cdll.LoadLibrary", side_effect=OSError("not used here")):
    import bitsandbytes as bnb

SHAPE = (40, 130)
"""5,200 values: 20 blocks of 256 and one that is not full. Fewer than 4,096 would not be kept in 8 bits."""
KEPT, BLOCK = 3, 256
"""Full blocks that are written, beside the last one."""


def main() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SHAPE) * 0.02)
    optimizer = bnb.optim.AdamW8bit([parameter], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    tensors = {"parameter": parameter.detach().clone()}
    for step in range(3):
        parameter.grad = torch.randn(SHAPE) * torch.exp(torch.randn(SHAPE[0], 1))
        optimizer.step()
        state = optimizer.state[parameter]
        tensors[f"gradient{step}"] = parameter.grad
        tensors[f"parameter{step}"] = parameter.detach().clone()
        for name, number in (("mean", 1), ("square", 2)):
            tensors[f"{name}{step}"] = state[f"state{number}"].clone()
            tensors[f"{name}_absmax{step}"] = state[f"absmax{number}"].clone()
    tensors = {name: kept_blocks(tensor, 1 if "absmax" in name else BLOCK) for name, tensor in tensors.items()}
    save_file(tensors, Path(__file__).parent / "adam8bit.safetensors")


def kept_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """Return the first blocks and the last one of values, of which a full block has so many."""
    flat = tensor.flatten()
    return torch.cat([flat[: KEPT * block], flat[(flat.numel() - 1) // block * block :]])


if __name__ == "__main__":
    main()
