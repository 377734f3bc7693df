"""Launches of Triton kernels in JAX programs."""

from dataclasses import dataclass
from typing import Any, Self

import jax
from jax_triton import triton_call, triton_lib
from jax_triton.triton_lib import TensorDescMeta

from jaxglue.ops.backend import Capability, triton_capability
from jaxglue.ops.kernel_cache import cached

# jax-triton 0.4.1 requires a key that Triton 3.7 no longer writes, and has a default for it.
TensorDescMeta.__required_keys__ -= {"is_im2col"}
triton_lib.compile_ttir_inplace = cached(triton_lib.compile_ttir_inplace)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Base of every class that launches kernels, on one kind of GPU."""

    compute_capability: int
    """In Triton's form: 90 for 9.0."""

    @classmethod
    def of(cls, capability: Capability, **fields: Any) -> Self:
        """Return the kernels for a GPU of this compute capability."""
        return cls(compute_capability=triton_capability(capability), **fields)

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
        """Launch a kernel; `registers` limits those of a thread."""
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
