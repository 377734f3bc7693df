"""Norms and rotary embedding: each value read and written once."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton
from jaxglue.ops.norm_rope.reference import (
    LAYER_NORM,
    LLAMA_NORM,
    HeadNorms,
    NormStyle,
    ReferenceNorm,
    reference_norm,
    reference_rotate,
    rms_norm,
    style_of,
)
from jaxglue.ops.norm_rope.vjp import (
    NormRopeBackend,
    NormSpec,
    RotateSpec,
    fused_norm,
    fused_rotate,
    fused_stream_norm,
)
from jaxglue.ops.rope import RopeTables, Rotary

__all__ = [
    "LAYER_NORM",
    "LLAMA_NORM",
    "NORM_ROPE",
    "HeadNorms",
    "NormCall",
    "NormStyle",
    "fp8_stream_norm",
    "norm",
    "norm_and_rotate",
    "reference_norm",
    "rms_norm",
    "rotate_heads",
    "scale_queries",
    "stream_norm",
    "style_of",
]


@dataclass(frozen=True, kw_only=True)
class NormCall:
    """Meaning of a norm, of a rotation of heads, or of both."""

    dtype: jnp.dtype
    style: NormStyle = LLAMA_NORM
    """Of the norm; the default where heads have none."""
    interleaved: bool = False
    """Neighboring dimensions turn."""


def _check_call(capability: Capability | None, call: NormCall) -> None:
    check_triton(capability, call.dtype)
    if call.interleaved:
        raise NotImplementedError("XLA turns neighboring dimensions faster")
    if call.style.centered or call.style.bias:
        raise NotImplementedError("layer norms and biases are XLA's")


def _load(capability: Capability, call: NormCall) -> NormRopeBackend:
    from jaxglue.ops.norm_rope.triton import TritonNormRope

    return TritonNormRope.of(capability)


NORM_ROPE = Operation(
    name="norm and rotation",
    backends={
        "triton": Backend(
            check=_check_call,
            load=_load,
            advantage="queries and keys are read and written once",
            reads={NormCall: ("dtype", "style"), NormStyle: ("offset", "rounds_first")},
        )
    },
)


def stream_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    eps: float,
    style: NormStyle = LLAMA_NORM,
    bias: Float[Array, " D"] | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Return a residual stream x and its `reference_norm`, whose gradients are added in one pass.

    Raises:
        ValueError: a weight that does not fit, or a named backend that cannot serve.
    """
    _check_norm(x, weight, style, bias)
    kernels = NORM_ROPE.load(NormCall(dtype=x.dtype, style=style), backend=backend)
    if kernels is None:
        return x, reference_norm(x, weight, eps, style, bias)
    stream, normed = fused_stream_norm(NormSpec(backend=kernels, eps=eps, style=style), x, weight)
    return stream, normed


def norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    eps: float,
    style: NormStyle = LLAMA_NORM,
    bias: Float[Array, " D"] | None = None,
    *,
    stream: Float[Array, "*B D"] | None = None,
    backend: str = "auto",
) -> Float[Array, "*B D"]:
    """Return `reference_norm` of x, plus a residual stream if there is one.

    Raises:
        ValueError: a weight that does not fit, or a named backend that cannot serve.
    """
    _check_norm(x, weight, style, bias)
    kernels = NORM_ROPE.load(NormCall(dtype=x.dtype, style=style), backend=backend)
    if kernels is None:
        normed = reference_norm(x, weight, eps, style, bias)
        return normed if stream is None else stream + normed
    return fused_norm(NormSpec(backend=kernels, eps=eps, style=style), x, weight, stream)


def fp8_stream_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float, style: NormStyle = LLAMA_NORM
) -> tuple[
    Float[Array, "*B D"], Float[Array, "*B D"], Float[Array, "*B D"], Float[Array, "*B 1"], Float[Array, "*B 1"]
]:
    """Return a residual stream x twice, e4m3 values of its norm, their scales, and 1 / x's root mean square.

    The gradient of the second x is by convention that to the norm, which is not written.

    Args:
        x, weight, eps, style: as in `reference_norm`, without mean and bias.

    Raises:
        ValueError: a weight that does not fit.
    """
    assert not style.centered and not style.bias
    _check_norm(x, weight, style, None)
    kernels = NORM_ROPE.load(NormCall(dtype=x.dtype, style=style)) or ReferenceNorm()
    stream, again, values, scales, inverse = fused_stream_norm(
        NormSpec(backend=kernels, eps=eps, style=style, fp8=True), x, weight
    )
    return stream, again, values, scales, inverse


def _check_norm(x, weight, style: NormStyle, bias) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be of x's last axis, [{x.shape[-1]}], got shape {weight.shape}")
    if style.bias != (bias is not None) or (bias is not None and bias.shape != weight.shape):
        expected = f"a bias {list(weight.shape)}" if style.bias else "no bias"
        raise ValueError(f"this style of norm has {expected}, got {'none' if bias is None else list(bias.shape)}")


def rotate_heads(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    norms: HeadNorms | None = None,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Norm every head, where there are norms, and apply the rotary embedding.

    Compute in float32 and round where transformers does: before the norm's weight, after it, and at the end.

    Args:
        q, k: projections, in one dtype.
        cos, sin: `rope_tables` of the tokens, for the first dimensions of a head; no gradient from a fused backend.
        norms: weights and ε of the norms; None for none.
        interleaved: neighboring dimensions turn; see `apply_rope`.
        backend: `auto`, `reference` or `triton`; see `NORM_ROPE.choose`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    _check(q, k, cos, sin, norms)
    call = NormCall(dtype=q.dtype, style=style_of(norms), interleaved=interleaved)
    kernels = NORM_ROPE.load(call, backend=backend)
    if kernels is None:
        return reference_rotate(q, k, cos, sin, norms, interleaved=interleaved)
    if norms is None:
        return fused_rotate(RotateSpec(backend=kernels, eps=None), (q, k), None, cos, sin)
    spec = RotateSpec(backend=kernels, eps=norms.eps, style=norms.style)
    return fused_rotate(spec, (q, k), norms.weights, cos, sin)


def norm_and_rotate(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    tables: RopeTables,
    rotary: Rotary | None,
    *,
    norms: HeadNorms | None = None,
    factor: float = 1.0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Do as `rotate_heads` with a batch's tables, then multiply queries; no rotary embedding leaves the norms alone."""
    if rotary is not None:
        q, k = rotate_heads(q, k, *tables.of(rotary), norms=norms, interleaved=rotary.config.interleaved)
    elif norms is not None:
        q, k = norms(q, k)
    return scale_queries(q, tables, rotary, factor), k


def scale_queries(
    q: Float[Array, "B T N H"], tables: RopeTables, rotary: Rotary | None, factor: float
) -> Float[Array, "B T N H"]:
    """Return rotated queries times the factors of their positions, if any, and the model's."""
    q = q if rotary is None else tables.scale_queries(q, rotary)
    return q if factor == 1.0 else (q * factor).astype(q.dtype)


def _check(q, k, cos, sin, norms: HeadNorms | None) -> None:
    if q.ndim != 4 or q.shape[3] % 2:
        raise ValueError(f"q must be [B, T, N, H] with an even H, got shape {q.shape}")
    B, T, _, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (B, T, H) or k.dtype != q.dtype:
        raise ValueError(f"k must be [B, T, K, H] = [{B}, {T}, K, {H}] {q.dtype} to fit q, got {k.shape} {k.dtype}")
    if cos.shape[:2] != (B, T) or not 0 < 2 * cos.shape[-1] <= H or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be [{B}, {T}, {H // 2}] or narrower to fit q, got {cos.shape} and {sin.shape}"
        )
    for weight in () if norms is None else norms.weights:
        if weight.shape != (H,):
            raise ValueError(f"norms must have weights of the head dim, [{H}], got shape {weight.shape}")
