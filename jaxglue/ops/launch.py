"""Launches of Triton and Gluon kernels in JAX programs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax_triton import triton_call, triton_lib
from jax_triton.triton_lib import TensorDescMeta

from jaxglue.ops.backend import Capability, triton_capability
from jaxglue.ops.kernel_cache import cached
from jaxglue.ops.kernel_cost import KernelCost

# jax-triton 0.4.1 requires a key that Triton 3.7 no longer writes, and has a default for it.
TensorDescMeta.__required_keys__ -= {"is_im2col"}
_compile_triton = triton_lib.compile_ttir_inplace
_compile_kernel = triton_lib.TritonFunction._compile_kernel


def _compile(ir, backend, options, gpu) -> triton_lib.CompilationResult:
    """Compile Triton's or Gluon's intermediate representation; jax-triton 0.4.1 knows the passes of Triton alone."""
    if ir.get_int_attr("ttg.num-warps") is None:
        return _compile_triton(ir, backend, options, gpu)
    metadata: dict[str, Any] = {}
    for stage in (backend.gluon_to_ttgir, backend.make_llir, backend.make_ptx):
        ir = stage(ir, metadata, options, gpu.arch)
    return triton_lib.CompilationResult(
        binary=ir,
        name=metadata["name"],
        shared_mem_bytes=metadata["shared"],
        ttgir="",
        llir="",
        tensordesc_meta=metadata["tensordesc_meta"],
    )


def _compile_with_all_warps(self, spec, gpu, backend, options):
    """Compile a kernel; jax-triton 0.4.1 launches the default warps alone, not Gluon's specialized ones."""
    kernel, ir, parsed, result = _compile_kernel(self, spec, gpu, backend, options)
    threads = re.search(r"\.reqntid (\d+)", result.binary)
    if threads and (warps := int(threads[1]) // 32) != options["num_warps"]:
        launched = warps, options["num_ctas"], result.shared_mem_bytes, result.binary, ir, gpu.arch
        kernel = triton_lib.triton_kernel_call_lib.TritonKernel(result.name, *launched)
    return kernel, ir, parsed, result


def _recompute(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], call: Any) -> tuple:
    """Compute a kernel again under `jax.checkpoint`; see `jax.interpreters.partial_eval`.

    JAX would not run again what writes references, as if it had other effects: the copies would stay unwritten.
    """
    del saveable  # policies name values, not kernels
    needed = [value for value, has in zip(call.invars, instantiated, strict=True) if not has]
    count = len(call.outvars)
    if any(unknown):
        return None, call, [True] * count, [True] * count, needed
    return call, call, [False] * count, [True] * count, needed


def _keep(*arguments: Any) -> tuple[list[bool], Any]:
    """Keep a kernel and all its inputs where JAX drops dead code, as it may write references.

    jax-triton 0.4.1 has this rule for JAX up to 0.11, which calls it with (used outputs, call); 0.12 also says, between
    the two, which inputs are alive.
    """
    call = arguments[-1]
    return [True] * len(call.invars), call


partial_eval.partial_eval_jaxpr_custom_rules[triton_lib.triton_kernel_call_p] = _recompute
partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = _keep
triton_lib.compile_ttir_inplace = cached(_compile)
triton_lib.TritonFunction._compile_kernel = _compile_with_all_warps


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Base of every class that launches kernels, on one kind of GPU."""

    compute_capability: int
    """Compute capability in Triton's form: 90 for 9.0."""

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
        *,
        cost: KernelCost,
        registers: int | None = None,
        aliases: dict[int, int] | None = None,
    ):
        """Launch a kernel; `registers` limits those of a thread, `aliases` says which argument becomes which output.

        Kernels of more than a dozen arrays take them by the names of their arguments; see `in_order`. Outputs that are
        arguments come last: jax-triton 0.4.1 passes outputs in order, and these a second time.
        """
        return triton_call(
            *in_order(kernel, arrays),
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=self.compute_capability,
            cost_estimate=cost.estimate(),
            input_output_aliases=aliases,
            backend_options={} if registers is None else {"maxnreg": registers},
            **constants,
        )


def in_order(kernel: Any, arrays: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """Return a kernel's arrays in the order of its first arguments, which a mapping names, each of them."""
    if not isinstance(arrays, Mapping):
        return arrays
    names = kernel.arg_names[: len(arrays)]
    assert set(names) == set(arrays), f"{kernel.__name__}: {sorted(set(names) ^ set(arrays))}"
    return [arrays[name] for name in names]


def dot_precision(dtype) -> str:
    """Return the precision of `tl.dot` for operands of this dtype: float32 is not rounded to tf32."""
    return "ieee" if dtype == jnp.float32 else "tf32"


def shape_dtype_of(x) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of x, for an output like it."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
