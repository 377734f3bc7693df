"""Which backend norms and rotates queries and keys, and why."""

from jaxglue.ops.backend import BACKENDS, BackendChoice, choose

__all__ = ["BACKENDS", "choose_backend"]


def choose_backend(dtype, *, backend: str = "auto", capability: tuple[int, int] | None = None) -> BackendChoice:
    """The backend for heads of this dtype on a GPU of this compute capability (None: no NVIDIA GPU).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
    """
    return choose(
        "rotation", "queries and keys are read and written once", dtype, backend=backend, capability=capability
    )
