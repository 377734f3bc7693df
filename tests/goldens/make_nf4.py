"""Write `nf4.safetensors`: a tensor in bitsandbytes' NF4 with double quantization, and its expansion.

Run with torch and bitsandbytes installed (made with torch 2.13 and bitsandbytes 0.50.2 on a CPU):

    TORCHDYNAMO_DISABLE=1 python tests/goldens/make_nf4.py

bitsandbytes' C++ CPU code uses a coarse table that misses the nearest scale for about one in a thousand. Its PyTorch
fallback, used here, agrees with its CUDA kernels.
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
    """Draw float16 normals of uneven spread, with a zero block, outliers and each exact code value."""
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
