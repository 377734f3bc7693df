"""Make nvfp4.safetensors: a matrix packed and unpacked by compressed-tensors.

pip install compressed-tensors==0.20.0 torch==2.13.0 transformers==5.24.0
python tests/goldens/make_nvfp4.py
"""

from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

BLOCK = 16


def main() -> None:
    """Quantize normal values of several magnitudes, one block of them zeros."""
    torch.manual_seed(0)
    matrix = torch.randn(24, 64) * torch.logspace(-3, 1, 24)[:, None]
    matrix[3, 16:32] = 0
    absmax = matrix.reshape(24, -1, BLOCK).abs().amax(-1)
    divisor = (448 * 6 / absmax.max()).reshape(1)
    scale = (absmax / 6 * divisor).to(torch.float8_e4m3fn).float()
    weights = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=BLOCK)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {"weight": matrix, "weight_scale": scale, "weight_global_scale": divisor}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    values = NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
    tensors = {**packed, "values": values}
    save_file(
        {name: t.detach().contiguous() for name, t in tensors.items()}, Path(__file__).parent / "nvfp4.safetensors"
    )


if __name__ == "__main__":
    main()
