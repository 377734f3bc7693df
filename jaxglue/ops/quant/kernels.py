"""Triton kernels that expand quantized weights. XLA's own takes four times as long as the bytes need."""

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
    """BLOCK of the COUNT blocks of 32 values, a word of 8 codes after the other; grid (⌈COUNT / BLOCK⌉)."""
    word = tl.program_id(0).to(tl.int64) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    inside = word < COUNT * 4
    exponent = tl.load(scales + word // 4, mask=inside, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    scale = tl.where(exponent == 255, NAN, bits).to(tl.float32, bitcast=True)
    packed = tl.load(blocks.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)[:, None]
    place = tl.arange(0, 8)[None, :]
    values = _decode(((packed >> (4 * place)) & 15).to(tl.int32)) * scale[:, None]
    tl.store(out + word[:, None] * 8 + place, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def nf4_kernel(
    codes, scales, scale_absmax, scale_offset, scale_code, values, out,
    FIRST: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the COUNT blocks of 64 values, to out from FIRST on; grid (⌈COUNT / BLOCK⌉).

    A thread takes words of eight codes, each of which becomes 16 bytes of bfloat16.
    """
    lookup = tl.load(values + tl.arange(0, 16))
    word = tl.program_id(0).to(tl.int64) * BLOCK * 8 + tl.arange(0, BLOCK * 8)
    block = word // 8
    inside = block < COUNT
    packed = tl.load(codes.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    scale = tl.load(scale_code + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
    factor = tl.load(scale_absmax + block // GROUP, mask=inside, other=0.0)
    scale = tl.fma(scale, factor, 0.0) + tl.load(scale_offset)  # rounded twice, as bitsandbytes does: not to be fused
    place = tl.arange(0, 8)
    code = ((packed[:, None] >> (4 * (place ^ 1))[None, :]) & 15).to(tl.int32)  # the first of two is in the high half
    value = tl.reshape(tl.gather(lookup, tl.reshape(code, (BLOCK * 64,)), 0), (BLOCK * 8, 8)) * scale[:, None]
    tl.store(out + FIRST + word[:, None] * 8 + place[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])
