"""Make modelopt.safetensors: a matrix in NVFP4 as NVIDIA's ModelOpt quantizes it, with one scale of its scales for all.

pip install nvidia-modelopt==0.47.0 torch==2.13.0 transformers==5.24.0
python tests/goldens/make_modelopt.py
"""

from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file

BLOCK = 16


def main() -> None:
    """Quantize normal values, with blocks of zeros and of small values, and an outlier."""
    torch.manual_seed(0)
    matrix = torch.randn(32, 64) * 0.02
    matrix[0, :BLOCK] = 0
    matrix[1, 3] = 0.5
    matrix[2, :BLOCK] *= 1e-3
    matrix = matrix.to(torch.bfloat16)
    factor = torch.tensor(2.0**-8)
    packed, scale, _ = NVFP4QTensor.quantize(matrix.float(), BLOCK, None, factor)
    values = packed.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: BLOCK})
    tensors = {"matrix": matrix, "weight": packed._quantized_data, "weight_scale": scale, "values": values}
    save_file(tensors | {"weight_scale_2": factor}, Path(__file__).parent / "modelopt.safetensors")


if __name__ == "__main__":
    main()
