"""Which backend serves a grouped matmul, and why."""

from jaxglue.ops.backend import BACKENDS, BackendChoice, choose

__all__ = ["BACKENDS", "choose_backend"]


def choose_backend(dtype, *, backend: str = "auto", capability: tuple[int, int] | None = None) -> BackendChoice:
    """The backend for rows of this dtype on a GPU of this compute capability (None: no NVIDIA GPU).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
    """
    advantage = "work grows with the rows, not with rows times groups"
    return choose("grouped matmul", advantage, dtype, backend=backend, capability=capability)
