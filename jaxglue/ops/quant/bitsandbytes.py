"""Entries and errors shared by bitsandbytes' folder formats, which transformers reads too.

Folders may leave modules of decoder layers unquantized, as those of Unsloth's dynamic quantization do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxglue.ops.quant.formats import TensorReader, WeightFormat, names_in

REMEDY = "use the original model folder with --quantize nf4 or int8"
_REQUANTIZE = "quantize the original model again (jaxglue export --quantize)"


def names_bitsandbytes(config: Mapping[str, Any], *, bits: int) -> bool:
    """Return whether `quantization_config` names bitsandbytes with 4 or 8 bits."""
    return config.get("quant_method") == "bitsandbytes" and bool(config.get("load_in_8bit")) == (bits == 8)


class BitsAndBytesFormat(WeightFormat):
    """A format of bitsandbytes' folders."""

    def skips(self, config: Mapping[str, Any]) -> list[str]:
        """Return the modules that stay unquantized."""
        return names_in(config, "llm_int8_skip_modules")


def shared_config(*, bits: int, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the entries of `quantization_config` that both formats have."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "llm_int8_skip_modules": list(unquantized),
    }


def read_typed(files: TensorReader, name: str, dtype: type[np.generic]) -> np.ndarray:
    """Read a tensor; raise ValueError for another dtype."""
    if (stored := files.tensors[name].dtype) != dtype:
        raise refused(files, name, f"its dtype is {stored}, expected {np.dtype(dtype)}")
    return files.read(name)


def refused(files: TensorReader, name: str, why: str) -> ValueError:
    """Return the error of a tensor that cannot be read."""
    return ValueError(f"{name} in {files.tensors[name].file}: {why}: copy the file again, or {_REQUANTIZE}")
