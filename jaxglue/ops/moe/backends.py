"""Backends of the grouped matmul."""

from typing import Any

from jaxglue.ops.backend import Backend, BackendChoice, Capability, Operation, check_triton

__all__ = ["BACKENDS", "choose_backend"]


def _load(capability: Capability, dtype) -> Any:
    from jaxglue.ops.moe.triton import TritonBackend

    return TritonBackend.of(capability)


GROUPED_MATMUL = Operation(
    name="grouped matmul",
    backends={
        "triton": Backend(
            check=check_triton, load=_load, advantage="work grows with the rows, not with rows times groups"
        )
    },
)
BACKENDS = GROUPED_MATMUL.names


def choose_backend(dtype, *, backend: str = "auto", capability: Capability | None = None) -> BackendChoice:
    """The backend for rows of this dtype on a GPU of this compute capability (None: no NVIDIA GPU).

    Raises:
        ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
    """
    return GROUPED_MATMUL.choose(capability, dtype, backend=backend)
