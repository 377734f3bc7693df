"""Packed attention for Hopper: launches of the Gluon kernels, whose warps have different tasks."""

from dataclasses import dataclass

import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float
from triton.experimental.gluon.language import NVMMASharedLayout

from jaxglue.ops.attention.hopper.forward import forward_kernel
from jaxglue.ops.attention.triton import KernelSizes, TritonAttention
from jaxglue.ops.launch import shape_dtype_of

_ROWS = 128
"""Rows of a program's queries, and of a tile of keys."""
_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class HopperAttention(TritonAttention):
    """`AttentionBackend` for long documents: a forward pass in Gluon, the backward pass of `TritonAttention`."""

    def forward(self, q, k, v, sinks, segments, *, window):
        """Return (out, lse)."""
        sizes = KernelSizes.of(q, k)
        constants = {"T": sizes.T, "K": sizes.K, "G": sizes.G, "P": sizes.P, "H": sizes.H, "SCALE": sizes.H**-0.5}
        return self._launch(
            forward_kernel,
            (q, _rows(k), _rows(v), q if sinks is None else sinks, segments.starts),
            (shape_dtype_of(q), sizes.statistics()),
            (triton.cdiv(sizes.T, _ROWS // sizes.P) * sizes.packs, sizes.B),
            constants | {"WINDOW": window or 0, "HAS_SINKS": sinks is not None, "STAGES": _STAGES},
        )


def _rows(x: Float[Array, "B T K H"]) -> TensorDescriptor:
    """Describe tiles of one head's keys or values."""
    B, T, K, H = x.shape
    layout = NVMMASharedLayout(128, x.dtype.itemsize * 8, rank=2)
    return TensorDescriptor.from_array(x.reshape(B * T, K * H), (_ROWS, H), layout)
