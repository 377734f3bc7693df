"""The type of each tensor in a GGUF file, chosen as llama.cpp's quantizer does."""

from typing import NamedTuple

from jaxglue.ops.choices import GgufType
from jaxglue.ops.quant.k_quants import SUPER_BLOCK
from jaxglue.ops.quant.served import takes_more_bits

BLOCKS = {"q4_0": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "mxfp4": 32}
"""Values of a block for the types that are not K-quants; rows are a multiple of it."""
_BASE = {"q4_k_m": "q4_k", "q5_k_m": "q5_k"}
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types for rows that are no multiple of 256 values."""
_FILE_TYPES = {
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q6_k": "MOSTLY_Q6_K",
    "q5_k_m": "MOSTLY_Q5_K_M",
    "q4_k_m": "MOSTLY_Q4_K_M",
    "q4_0": "MOSTLY_Q4_0",
    "mxfp4": "MOSTLY_MXFP4_MOE",
}
_LAYERS_OF_70B = 80


class Shape(NamedTuple):
    """The model's shape, as far as it decides types."""

    architecture: str
    layers: int
    experts: int
    tied: bool


def file_type(kind: GgufType) -> str:
    """Return the name of a recipe in `gguf.LlamaFileType`."""
    return _FILE_TYPES[kind]


def block_size(type_: str) -> int:
    """Return the values of a type's block; 1 for floats."""
    return SUPER_BLOCK if type_ in _FALLBACKS else BLOCKS.get(type_, 1)


def tensor_type(name: str, shape: tuple[int, ...], kind: GgufType, model: Shape) -> str:
    """Return a tensor's type in lower case, such as `q4_k`.

    Args:
        name: in the GGUF file, such as `blk.0.attn_v.weight`.
        shape: rows last, [out, in].
        kind: what was asked for.
        model: the model's shape.
    """
    # llama.cpp computes norms, biases, sinks, routers and convolutions in float32.
    plain = any(part in name for part in ("_norm.", "ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "shortconv.conv"))
    if len(shape) < 2 or not name.endswith("weight") or plain:
        return "f32"
    if kind in ("f16", "bf16"):
        return kind
    chosen = _preferred(name, shape, kind, model)
    if shape[-1] % block_size(chosen):
        chosen = _FALLBACKS.get(chosen, "f16")
    return "f16" if shape[-1] % block_size(chosen) else chosen


def _preferred(name: str, shape: tuple[int, ...], kind: GgufType, model: Shape) -> str:
    """Return the type for rows of any length: a recipe's, or a better one where the tensor is sensitive."""
    base = _BASE.get(kind, kind)
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        return "q8_0" if base in ("q8_0", "mxfp4") or shape[-1] % block_size(base) else "q6_k"
    if base == "mxfp4":
        return "mxfp4" if "_exps." in name else "q8_0"
    few_experts = model.experts == 8  # of Mixtral's size: attention is a small part of the file
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    better = kind in _BASE and takes_more_bits(layer, model.layers)
    if "attn_v." in name:
        if few_experts:
            return "q8_0"
        is_70b = model.architecture == "llama" and model.layers == _LAYERS_OF_70B
        return "q6_k" if better else "q5_k" if is_70b and base == "q4_k" else base
    if "attn_k." in name and few_experts:
        return "q8_0"
    if "attn_output." in name and few_experts and base == "q4_k":
        return "q5_k"
    return "q6_k" if "ffn_down" in name and better else base
