"""Writes `nf4.safetensors`: a tensor in bitsandbytes' NF4 with double quantization, and what it expands to.

Run with torch and bitsandbytes installed (made with torch 2.13 and bitsandbytes 0.50.2 on a CPU):

    TORCHDYNAMO_DISABLE=1 python tests/goldens/make_nf4.py

bitsandbytes' C++ code for CPUs looks scales up in a coarse table and takes a neighbor of the nearest for about one in
a thousand. Its PyTorch code, which it has for devices without kernels, does as its CUDA kernels do: it is used here.
"""

from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

with mock.patch("ctypes.cdll.LoadLibrary", side_effect=OSError("not used here")):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

SHAPE = (130, 128)
"""260 blocks of 64, so that the second group of 256 scales is not full."""


def weight() -> torch.Tensor:
    """Normal values of uneven spread in float16, with a block of zeros, outliers, and each code's own value."""
    torch.manual_seed(0)
    values = torch.randn(SHAPE) * torch.exp(torch.randn(SHAPE[0], 1)) * 0.02
    values[3, :64] = 0
    values[5, 7], values[129, 100] = 4, -3
    values[7, :64] = torch.linspace(-1, 1, 64)
    return values.half()


def main() -> None:
    original = weight()
    codes, state = quantize_4bit(original.float(), blocksize=64, quant_type="nf4", compress_statistics=True)
    expanded = dequantize_4bit(codes, state)
    state.dtype = torch.bfloat16
    tensors = {
        "weight": original,
        "codes": codes.reshape(SHAPE[0], -1),
        "scales": state.absmax.reshape(SHAPE[0], -1),
        "scale_absmax": state.state2.absmax,
        "scale_offset": state.offset,
        "scale_code": state.state2.code,
        "first_rows": expanded[:8].clone(),
        "last_rows": expanded[-8:].clone(),
        "first_rows_bfloat16": dequantize_4bit(codes, state)[:8].view(torch.uint16).clone(),
    }
    save_file(tensors, Path(__file__).parent / "nf4.safetensors")


if __name__ == "__main__":
    main()
