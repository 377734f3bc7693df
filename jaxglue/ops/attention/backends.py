"""Which backend serves a call, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import jax.numpy as jnp

from jaxglue.ops.backend import BackendChoice, why_not_half

BACKENDS = ("auto", "reference", "cudnn", "triton")
HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the choice of a backend depends on; all of it is known when a step is traced."""

    dtype: jnp.dtype
    head_dim: int
    query_heads: int
    kv_heads: int
    segment_slots: int
    """S of `PackedSegments`: 1 when every row is one segment."""
    window: int | None = None

    def __post_init__(self):
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads, got {self.query_heads} and {self.kv_heads}"
            )


def why_not_cudnn(shape: AttentionShape, capability: tuple[int, int] | None) -> str | None:
    """The reason why cuDNN cannot serve this shape, or None."""
    if capability is None or capability < (9, 0):
        return f"packed rows need compute capability 9.0 (Hopper) or newer, got {_gpu(capability)}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"head dim must be a multiple of 8 up to 256, got {shape.head_dim}"
    return why_not_half(shape.dtype)


def why_not_triton(shape: AttentionShape, capability: tuple[int, int] | None) -> str | None:
    """The reason why our kernels cannot serve this shape, or None."""
    if capability is None or capability < (8, 0):
        return f"the kernels need compute capability 8.0 (Ampere) or newer, got {_gpu(capability)}"
    if find_spec("jax_triton") is None:
        return "jax-triton is not installed: pip install 'jaxglue[cuda13]'"
    if shape.head_dim not in HEAD_DIMS:
        return f"head dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {shape.head_dim}"
    return why_not_half(shape.dtype)


_OBSTACLES: dict[str, Callable[[AttentionShape, tuple[int, int] | None], str | None]] = {
    "reference": lambda shape, capability: None,
    "cudnn": why_not_cudnn,
    "triton": why_not_triton,
}


def choose_backend(
    shape: AttentionShape, *, backend: str = "auto", capability: tuple[int, int] | None = None
) -> BackendChoice:
    """The backend for a shape on a GPU of this compute capability (None: no NVIDIA GPU).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve the shape.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return _choose(shape, capability)
    if obstacle := _OBSTACLES[backend](shape, capability):
        raise ValueError(f"backend={backend!r} cannot serve this attention: {obstacle}")
    return BackendChoice(name=backend, reason="asked for")


def _choose(shape: AttentionShape, capability: tuple[int, int] | None) -> BackendChoice:
    if capability is None:
        return BackendChoice(name="reference", reason="no NVIDIA GPU")
    no_cudnn, no_triton = why_not_cudnn(shape, capability), why_not_triton(shape, capability)
    if no_cudnn is None and (shape.segment_slots == 1 and shape.window is None):
        return BackendChoice(name="cudnn", reason="one segment in a row: nothing to skip")
    if no_triton is None:
        return BackendChoice(name="triton", reason="skips what is outside a segment or window")
    if no_cudnn is None:
        return BackendChoice(name="cudnn", reason=f"not triton: {no_triton}")
    return BackendChoice(name="reference", reason=f"not triton: {no_triton}; not cudnn: {no_cudnn}")


def _gpu(capability: tuple[int, int] | None) -> str:
    return "no NVIDIA GPU" if capability is None else f"{capability[0]}.{capability[1]}"
