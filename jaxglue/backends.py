"""For operations with Triton kernels beside a reference: which of the two serves, and why."""

from importlib.util import find_spec

import jax.numpy as jnp

from jaxglue.attention.backends import BackendChoice

BACKENDS = ("auto", "reference", "triton")
_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


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
    return None if jnp.dtype(dtype) in _HALF else f"dtype must be bfloat16 or float16, got {dtype}"
