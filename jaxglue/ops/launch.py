"""Launches of Triton kernels in JAX programs."""

from dataclasses import dataclass

import jax
from jax_triton import triton_call
from jax_triton.triton_lib import TensorDescMeta

# jax-triton 0.4.1 insists on a key that Triton 3.7 does not write, though it has a default for it.
TensorDescMeta.__required_keys__ -= {"is_im2col"}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Launches kernels on one kind of GPU; what runs kernels of ours derives from it."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    def _launch(
        self,
        kernel,
        arrays,
        out_type,
        grid,
        constants,
        num_warps: int = 4,
        num_stages: int = 1,
        flops: int = 0,
        registers: int | None = None,
    ):
        """`registers` is the most that a thread may take; None for as many as the compiler likes."""
        return triton_call(
            *arrays,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=self.compute_capability,
            cost_estimate={"flops": flops},
            backend_options={} if registers is None else {"maxnreg": registers},
            **constants,
        )


def shape_dtype_of(x) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of x, for an output like it."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
