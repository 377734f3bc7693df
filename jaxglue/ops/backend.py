"""Which backend of an operation serves, and why: what the choice depends on, and the choice between two."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec

import jax
import jax.numpy as jnp

BACKENDS = ("auto", "reference", "triton")
_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend's name and the reason for it, to be logged at start-up."""

    name: str
    reason: str


_planned_capability: ContextVar[tuple[int, int] | None] = ContextVar("planned_capability", default=None)


@contextmanager
def tracing_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside, programs are traced for a GPU of this compute capability, which need not be here; they cannot run."""
    token = _planned_capability.set(capability)
    try:
        yield
    finally:
        _planned_capability.reset(token)


def compute_capability(device: jax.Device | None = None) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, None for any other device.

    The device is the default one unless given, or that of `tracing_for`.
    """
    if device is None and (planned := _planned_capability.get()) is not None:
        return planned
    device = device or jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def triton_capability(capability: tuple[int, int]) -> int:
    """Compute capability as Triton counts it: 90 for 9.0."""
    return 10 * capability[0] + capability[1]


def choose(operation: str, advantage: str, dtype, *, backend: str, capability: tuple[int, int] | None) -> BackendChoice:
    """The backend of an operation for this dtype on a GPU of this compute capability (None: no NVIDIA GPU).

    Args:
        operation: its name, for messages.
        advantage: why the kernels are chosen where they can serve.
        dtype: of what is computed.
        backend: one of `BACKENDS`.
        capability: as (major, minor).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    obstacle = why_not_triton(dtype, capability)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend='triton' cannot serve this {operation}: {obstacle}")
    if backend != "auto":
        return BackendChoice(name=backend, reason="asked for")
    if obstacle:
        return BackendChoice(name="reference", reason=f"not triton: {obstacle}")
    return BackendChoice(name="triton", reason=advantage)


def why_not_triton(dtype, capability: tuple[int, int] | None) -> str | None:
    """The reason why our kernels cannot serve, or None."""
    if capability is None:
        return "no NVIDIA GPU"
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0 (Ampere) or newer, got {capability[0]}.{capability[1]}"
    if find_spec("jax_triton") is None:
        return "jax-triton is not installed: pip install 'jaxglue[cuda13]'"
    return why_not_half(dtype)


def why_not_half(dtype) -> str | None:
    """The reason why what serves 16-bit floats alone cannot serve, or None."""
    return None if jnp.dtype(dtype) in _HALF else f"dtype must be bfloat16 or float16, got {dtype}"
