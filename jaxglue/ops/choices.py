"""Values of flags that choose an operation's backend or a storage format; importing them loads no JAX."""

from typing import Annotated, Literal, get_args

from jaxglue.settings.config import Choices

Attention = Literal["auto", "cudnn", "hopper", "triton", "reference"]
"""Backends of packed attention."""
QUANTIZE = ["none", "nf4", "int8"]
"""Formats that `--quantize` offers; registering one adds it (`ops.quant.formats`)."""
Quantize = Annotated[str, Choices(QUANTIZE)]
"""Storage of the decoder layers' linear layers, expanded for each product: the model's dtype, NF4, int8, …"""
Matmul = Literal["bf16", "fp8"]
"""Products of the decoder layers' linear layers: in the activations' dtype, or in FP8."""
ServeAs = Literal["none", "nvfp4", "nf4", "mxfp4", "q4_k_m"]
"""Formats to which adapters are merged and rounded while they train."""
KVCache = Literal["auto", "fp8"]
"""Format of a cache of keys and values: the activations' dtype, or e4m3 with a scale for each token and head."""
Storage = str
"""Name of a format of the decoder layers' linear layers in `ops.quant.formats.FORMATS`. `--quantize` names most; fp8 is
multiplied as it is, a folder's fp8_stored expanded for each product, and fp8_trained, in the model's dtype, rounded for
each product."""
MomentFormat = Literal["float32", "bfloat16", "8bit"]
"""Storage of AdamW's moments."""

GgufType = Literal["f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "mxfp4"]
"""Types of a GGUF file's matrices; the sensitive ones among them get more bits in the `_m` mixtures."""


def served_storage(serve_as: str, *, stored: bool = False) -> Storage:
    """Return the storage of weights that are merged with their adapters and rounded to a format.

    Args:
        serve_as: the format.
        stored: the base's folder holds them in it already.
    """
    return f"served_{serve_as}_stored" if stored else f"served_{serve_as}"


STORED = {served_storage(name): served_storage(name, stored=True) for name in ("nvfp4", "nf4")}
"""Storages of `--serve-as` by those of folders in 16 bits; experts in MXFP4 are always stored so."""
SERVED = [*map(served_storage, get_args(ServeAs)[1:]), *STORED.values()]
"""Storages of `--serve-as`."""


def choose_storage(quantize: Quantize, matmul: Matmul, serve_as: ServeAs = "none", *, trains: bool = False) -> Storage:
    """Return the storage that flags ask for, of weights that train or are frozen.

    Raises:
        ValueError: the flags disagree.
    """
    if matmul == "fp8" and quantize != "none":
        raise ValueError(f"--matmul fp8 stores weights in FP8, not {quantize}: leave out --quantize")
    if serve_as != "none" and (quantize != "none" or matmul != "bf16"):
        flag = "--matmul fp8" if quantize == "none" else f"--quantize {quantize}"
        raise ValueError(f"--serve-as {serve_as} rounds merges of weights in 16 bits: leave out {flag}")
    if serve_as != "none":
        return served_storage(serve_as)
    if matmul == "fp8":
        return "fp8_trained" if trains else "fp8"
    return quantize
