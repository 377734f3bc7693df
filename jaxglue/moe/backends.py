"""Which backend serves a grouped matmul, and why."""

from importlib.util import find_spec

import jax.numpy as jnp

from jaxglue.attention.backends import BackendChoice

BACKENDS = ("auto", "reference", "triton")
_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def choose_backend(dtype, *, backend: str = "auto", capability: tuple[int, int] | None = None) -> BackendChoice:
    """The backend for rows of this dtype on a GPU of this compute capability (None: no NVIDIA GPU).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    obstacle = why_not_triton(dtype, capability)
    if backend == "auto":
        return _choose(obstacle)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend='triton' cannot serve this grouped matmul: {obstacle}")
    return BackendChoice(name=backend, reason="asked for")


def why_not_triton(dtype, capability: tuple[int, int] | None) -> str | None:
    """The reason why our kernels cannot serve, or None."""
    if capability is None:
        return "no NVIDIA GPU"
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0 (Ampere) or newer, got {capability[0]}.{capability[1]}"
    if find_spec("jax_triton") is None:
        return "jax-triton is not installed: pip install 'jaxglue[cuda13]'"
    return None if jnp.dtype(dtype) in _HALF else f"dtype must be bfloat16 or float16, got {dtype}"


def _choose(obstacle: str | None) -> BackendChoice:
    if obstacle:
        return BackendChoice(name="reference", reason=f"not triton: {obstacle}")
    return BackendChoice(name="triton", reason="work grows with the rows, not with rows times groups")
