"""Mamba-2 in llama.cpp's files: decays as numbers, axes of one, and factors that are parts of matrices."""

import re
from collections.abc import Callable

import numpy as np

from jaxglue.models.config import DecoderConfig
from jaxglue.models.falcon_h1 import Factors, SideBySide
from jaxglue.models.mamba import Mamba2Config

_PARTS = re.compile(r".+\.(mamba|mixer)\.(?P<part>conv1d\.weight|A_log|D|norm\.weight)")
INPUT = ".shared_mlp.input_linear.weight"
"""Gate and up of Granite's dense feed-forward, which llama.cpp's files hold apart."""


def find_mamba(config: DecoderConfig) -> Mamba2Config | None:
    """Return the sizes of a model's Mamba-2, alone in a layer or beside attention; None without."""
    beside = config.mixer_of(SideBySide)
    return config.mixer_of(Mamba2Config) if beside is None else beside.mamba


def shape_in_file(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in a file."""
    mamba, match = find_mamba(config), _PARTS.fullmatch(name)
    if mamba is None or match is None:
        return shape
    match match["part"]:
        case "conv1d.weight":
            return shape[0], shape[2]
        case "norm.weight":
            return mamba.heads.groups, shape[0] // mamba.heads.groups
        case _:
            return (*shape, 1)


def in_file(config: DecoderConfig, name: str, array: np.ndarray) -> np.ndarray | None:
    """Return a tensor of a model with Mamba-2 as llama.cpp stores it; None where it is the same."""
    if find_mamba(config) is None:
        return None
    if match := _PARTS.fullmatch(name):
        array = -np.exp(array.astype(np.float32)) if match["part"] == "A_log" else array
        return array.reshape(shape_in_file(config, name, array.shape))
    factor = row_factors(config, name)
    return None if factor is None else (array.astype(np.float32) * factor.reshape(-1, *(1,) * (array.ndim - 1)))


def row_factors(config: DecoderConfig, name: str) -> np.ndarray | None:
    """Return the factors of a matrix' rows that Falcon-H1 applies to values, and llama.cpp does not; None for 1."""
    shape, mamba = config.family_shape, find_mamba(config)
    if not isinstance(shape, Factors) or mamba is None:
        return None
    heads, scale = mamba.heads, config.attention.scale
    assert scale is not None
    widths = heads.value_width, heads.value_width, heads.group_width, heads.group_width, heads.values
    found: dict[str, Callable[[], np.ndarray]] = {
        "mamba.in_proj": lambda: np.repeat(mamba.scales, widths),
        "mamba.out_proj": lambda: np.array([shape.mamba]),
        "self_attn.k_proj": lambda: np.array([scale * config.head_dim**0.5]),
        "self_attn.o_proj": lambda: np.array([shape.attention]),
        "feed_forward.gate_proj": lambda: np.array([shape.gate]),
        "feed_forward.down_proj": lambda: np.array([shape.mlp]),
        "embed_tokens": lambda: np.array([config.scales.embedding]),
        "lm_head": lambda: np.array([1 / config.scales.logit_divisor]),
    }
    module = next((module for module in found if f"{name}.".find(f"{module}.") >= 0), None)
    return None if module is None else found[module]().astype(np.float32)
