"""Triton kernels that dequantize weights at memory speed; XLA's code takes about four times as long."""

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _decode(codes):
    """Decode e2m1 in the low four bits to float32; see `mxfp4._decode`."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = tl.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, mantissa * (126 << 23))
    return (magnitude | (codes >> 3) << 31).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_kernel(blocks, scales, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize BLOCK of COUNT blocks of 32 values, in words of eight codes; grid (⌈COUNT / BLOCK⌉)."""
    word = tl.program_id(0).to(tl.int64) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    inside = word < COUNT * 4
    exponent = tl.load(scales + word // 4, mask=inside, other=127).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    scale = tl.where(exponent == 255, NAN, bits).to(tl.float32, bitcast=True)
    packed = tl.load(blocks.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)[:, None]
    nibble = tl.arange(0, 8)[None, :]
    values = _decode(((packed >> (4 * nibble)) & 15).to(tl.int32)) * scale[:, None]
    tl.store(out + word[:, None] * 8 + nibble, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def nf4_kernel(
    codes, scales, scale_absmax, scale_offset, scale_code, values, out,
    COUNT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCK of COUNT blocks of 64 values, in words of eight codes; grid (⌈COUNT / BLOCK⌉)."""
    lookup = tl.load(values + tl.arange(0, 16))
    word = tl.program_id(0).to(tl.int64) * BLOCK * 8 + tl.arange(0, BLOCK * 8)
    block = word // 8
    inside = block < COUNT
    packed = tl.load(codes.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    scale = tl.load(scale_code + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
    factor = tl.load(scale_absmax + block // GROUP, mask=inside, other=0.0)
    scale = tl.fma(scale, factor, 0.0) + tl.load(scale_offset)  # not fused: bitsandbytes rounds twice
    nibble = tl.arange(0, 8)
    code = ((packed[:, None] >> (4 * (nibble ^ 1))[None, :]) & 15).to(tl.int32)  # the high half comes first
    value = tl.reshape(tl.gather(lookup, tl.reshape(code, (BLOCK * 64,)), 0), (BLOCK * 8, 8)) * scale[:, None]
    tl.store(out + word[:, None] * 8 + nibble[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])
