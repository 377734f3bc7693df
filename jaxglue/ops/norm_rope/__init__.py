"""Operations on every token by itself, which cost what they read and write: norms and rotation."""

from typing import TYPE_CHECKING

from jaxtyping import Array, Float

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.norm_rope.backends import BACKENDS, choose_backend
from jaxglue.ops.norm_rope.fused import NormSpec, RotateSpec, fused_branch_norm, fused_rotate
from jaxglue.ops.norm_rope.reference import HeadNorms, reference_rotate, rms_norm

if TYPE_CHECKING:
    from jaxglue.ops.norm_rope.triton import TritonBackend

__all__ = ["BACKENDS", "HeadNorms", "branch_norm", "choose_backend", "rms_norm", "rotate_heads"]


def branch_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float, *, backend: str = "auto"
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """(x, `rms_norm` of x): a residual stream and what branches off it; their gradients meet in one pass.

    Raises:
        ValueError: a weight that does not fit, or a named backend that cannot serve.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be of x's last axis, [{x.shape[-1]}], got shape {weight.shape}")
    fused = fused_backend(x.dtype, backend)
    if fused is None:
        return x, rms_norm(x, weight, eps)
    return fused_branch_norm(NormSpec(backend=fused, eps=eps), x, weight)


def rotate_heads(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    norms: HeadNorms | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Queries and keys with the norm of every head, where there are norms, and the rotary embedding.

    Computes in float32 and rounds where transformers does: before the norm's weight, after it, and at the end.

    Args:
        q, k: projections, in one dtype.
        cos, sin: `rope_tables` of the tokens; they get no gradient from a fused backend.
        norms: weights and ε of the norms; None for none.
        backend: one of `BACKENDS`; `auto` is decided by `choose_backend` from the dtype and the default device.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    _check(q, k, cos, sin, norms)
    fused = fused_backend(q.dtype, backend)
    if fused is None:
        return reference_rotate(q, k, cos, sin, norms)
    spec = RotateSpec(backend=fused, eps=0.0 if norms is None else norms.eps)
    return fused_rotate(spec, (q, k), None if norms is None else norms.weights, cos, sin)


def fused_backend(dtype, name: str) -> "TritonBackend | None":
    """The backend's object, None for the reference; imported here, for only GPU installations have what it needs."""
    capability = compute_capability()
    if choose_backend(dtype, backend=name, capability=capability).name == "reference":
        return None
    assert capability is not None
    from jaxglue.ops.norm_rope.triton import TritonBackend

    return TritonBackend.of(capability)


def _check(q, k, cos, sin, norms: HeadNorms | None) -> None:
    """Raises ValueError for arguments that do not fit together."""
    if q.ndim != 4 or q.shape[3] % 2:
        raise ValueError(f"q must be [B, T, N, H] with an even H, got shape {q.shape}")
    B, T, _, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (B, T, H) or k.dtype != q.dtype:
        raise ValueError(f"k must be [B, T, K, H] = [{B}, {T}, K, {H}] {q.dtype} to fit q, got {k.shape} {k.dtype}")
    if cos.shape != (B, T, H // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be [{B}, {T}, {H // 2}] to fit q, got {cos.shape} and {sin.shape}")
    for weight in () if norms is None else norms.weights:
        if weight.shape != (H,):
            raise ValueError(f"norms must have weights of the head dim, [{H}], got shape {weight.shape}")
