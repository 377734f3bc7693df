"""Triton kernels that expand quantised weights. XLA's own takes four times as long as the bytes need."""

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _decode(codes):
    """e2m1 in the low four bits → float32; see `mxfp4._decode`."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = tl.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, mantissa * (126 << 23))
    return (magnitude | (codes >> 3) << 31).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_kernel(blocks, scales, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of the COUNT blocks of 32 values; grid (⌈COUNT / BLOCK⌉)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < COUNT
    packed = tl.load(blocks + index[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)
    packed = packed.to(tl.int32)
    exponent = tl.load(scales + index, mask=inside, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    scale = tl.where(exponent == 255, NAN, bits).to(tl.float32, bitcast=True)[:, None]
    values = tl.join(_decode(packed & 15) * scale, _decode(packed >> 4) * scale)
    values = tl.reshape(values, (BLOCK, 32)).to(out.dtype.element_ty)
    tl.store(out + index[:, None] * 32 + tl.arange(0, 32)[None, :], values, mask=inside[:, None])
