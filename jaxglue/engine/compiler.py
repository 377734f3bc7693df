"""What XLA is told when it compiles a training step."""

from functools import partial

import jax

LIBRARY_MATMULS = {
    # Every matmul to cuBLAS, which reads the narrow ones of adapters at 90% of copy bandwidth, adds a product to what
    # is there, and is tuned in a tenth of a second; XLA's own kernels lose on all three.
    "xla_gpu_enable_triton_gemm": False,
    # Matmuls of one input stay apart: merged, their weights are copied next to each other and their results apart.
    "xla_gpu_dot_merger_threshold_mb": 0,
}

jit_step = partial(jax.jit, compiler_options=LIBRARY_MATMULS)
"""`jax.jit` for the parts of a training step."""

jit_exchanging = partial(
    jax.jit, compiler_options=LIBRARY_MATMULS | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
)
"""The same for programs in which devices exchange: the next collective may start before the last one is done."""
