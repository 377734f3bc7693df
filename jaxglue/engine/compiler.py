"""XLA options of the programs of a training step."""

from functools import partial

import jax

LIBRARY_MATMULS = {
    # cuBLAS for every matmul: it reads adapters' narrow ones at 90% of copy bandwidth, accumulates into its output, and
    # tunes in 0.1 s; XLA's Triton kernels lose on all three.
    "xla_gpu_enable_triton_gemm": False,
    # Merged matmuls of one input would copy weights together and results apart.
    "xla_gpu_dot_merger_threshold_mb": 0,
}

jit_step = partial(jax.jit, compiler_options=LIBRARY_MATMULS)
"""`jax.jit` for the programs of a training step."""

jit_exchanging = partial(
    jax.jit, compiler_options=LIBRARY_MATMULS | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
)
"""`jit_step` for programs with collectives, of which two may be under way."""
