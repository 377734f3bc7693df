"""Linear attention in llama.cpp's files: value heads in another order, and decays as numbers."""

import numpy as np

from jaxglue.models.config import DecoderConfig
from jaxglue.models.delta_net import DeltaConfig
from jaxglue.models.qwen3_next import JoinedDeltaConfig

_PART = ".linear_attn."
_COLUMNS = "out_proj.weight"


def value_order(delta: DeltaConfig, width: int) -> np.ndarray:
    """Return llama.cpp's order of rows of value heads, each of so many.

    Heads of one key head are neighbors in Hugging Face's files; in llama.cpp's the first of every key head come first,
    then the second ones.
    """
    K, N = delta.num_key_heads, delta.num_value_heads
    return np.arange(N * width).reshape(K, N // K, width).swapaxes(0, 1).ravel()


def in_file(config: DecoderConfig, name: str, array: np.ndarray) -> np.ndarray | None:
    """Return a tensor of linear attention as llama.cpp stores it; None for those of other parts."""
    delta, part = config.mixer_of(DeltaConfig), name.rpartition(_PART)[2]
    if delta is None or _PART not in name:
        return None
    if isinstance(delta, JoinedDeltaConfig):  # whose value heads stay where they are
        if part == "A_log":
            return -np.exp(array.astype(np.float32))
        return array[:, 0] if part == "conv1d.weight" else array
    per_head, per_value = value_order(delta, 1), value_order(delta, delta.value_dim)
    channels = np.concatenate([np.arange(2 * delta.key_width), 2 * delta.key_width + per_value])
    match part:
        case "in_proj_qkv.weight":
            return array[channels]
        case "conv1d.weight":
            return array[channels, 0]
        case "in_proj_z.weight":
            return array[per_value]
        case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
            return array[per_head]
        case "A_log":
            return -np.exp(array.astype(np.float32))[per_head]
        case "out_proj.weight":
            return array[:, per_value]
        case _:
            return array


def moves_columns(config: DecoderConfig, name: str) -> bool:
    """Tell whether a matrix has its columns in another order in a file."""
    delta = config.mixer_of(DeltaConfig)
    return delta is not None and not isinstance(delta, JoinedDeltaConfig) and name.endswith(f"{_PART}{_COLUMNS}")


def shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in a file: a convolution has no axis of inputs."""
    return (shape[0], *shape[2:]) if name.endswith(f"{_PART}conv1d.weight") else shape


def module_in_file(name: str) -> str:
    """Return the name by which the gguf package knows a tensor."""
    return name.replace(f"{_PART}dt_bias", f"{_PART}dt_proj.bias")


def matrices_in_file(config: DecoderConfig, module: str, A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an adapter's matrices [R, in] and [out, R] in the order of a file's inputs and outputs."""
    weight = f"{module}.weight"
    changed = in_file(config, weight, A if weight.endswith(_COLUMNS) else B)
    if changed is None:
        return A, B
    return (changed, B) if weight.endswith(_COLUMNS) else (A, changed)


def inputs_in_file(config: DecoderConfig, module: str, values: np.ndarray) -> np.ndarray:
    """Return a value for each input of a module's matrix in a file's order."""
    delta, moved = config.mixer_of(DeltaConfig), f".{module}.weight".endswith(f"{_PART}{_COLUMNS}")
    joined = isinstance(delta, JoinedDeltaConfig)
    return values[value_order(delta, delta.value_dim)] if moved and delta and not joined else values
