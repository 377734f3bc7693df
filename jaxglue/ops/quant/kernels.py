"""Triton kernels that dequantize weights at memory speed; XLA's code takes about four times as long."""

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _decode(codes):
    """Decode e2m1 in the low four bits to float32; see `mxfp4.decode_e2m1`."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = tl.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, mantissa * (126 << 23))
    return (magnitude | (codes >> 3) << 31).to(tl.float32, bitcast=True)


@triton.jit
def _scale(byte, exponent):
    """Decode e8m0 in float32; NaN where the stored byte says so."""
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return tl.where(byte == 255, NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_kernel(
    blocks, scales, largest, out, COUNT: tl.constexpr, WORDS: tl.constexpr, LIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Dequantize BLOCK of COUNT blocks of 32 values, in words of eight codes; grid (⌈COUNT / BLOCK⌉).

    With WORDS in a matrix, write values · 2^(LIFT − largest exponent of the matrix).
    """
    word = tl.program_id(0).to(tl.int64) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    inside = word < COUNT * 4
    byte = tl.load(scales + word // 4, mask=inside, other=127).to(tl.int32)
    exponent = byte
    if WORDS > 0:
        lifted = byte - tl.load(largest + word // WORDS, mask=inside, other=127) + LIFT + 127
        exponent = tl.maximum(lifted, 0)
    scale = _scale(byte, exponent)
    packed = tl.load(blocks.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)[:, None]
    nibble = tl.arange(0, 8)[None, :]
    values = _decode(((packed >> (4 * nibble)) & 15).to(tl.int32)) * scale[:, None]
    tl.store(out + word[:, None] * 8 + nibble, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def mxfp4_transposed_kernel(
    blocks, scales, largest, out,
    N: tl.constexpr, K: tl.constexpr, LIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write values [E, N, K] · 2^(LIFT − largest exponent of the matrix) to out [E, K, N].

    A program decodes BLOCK_N rows of BLOCK_W words of eight codes; grid (⌈N / BLOCK_N⌉, ⌈K / 8 / BLOCK_W⌉, E).
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words, matrix = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W), tl.program_id(2).to(tl.int64)
    inside = (rows < N)[:, None] & (words < K // 8)[None, :]
    word = (matrix * N + rows[:, None]) * (K // 8) + words[None, :]
    byte = tl.load(scales + word // 4, mask=inside, other=0).to(tl.int32)
    scale = _scale(byte, tl.maximum(byte - tl.load(largest + matrix) + LIFT + 127, 0))
    packed = tl.load(blocks.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    nibble = tl.arange(0, 8)[None, None, :]
    values = _decode(((packed[:, :, None] >> (4 * nibble)) & 15).to(tl.int32)) * scale[:, :, None]
    codes = tl.reshape(values.to(out.dtype.element_ty), (BLOCK_N, BLOCK_W * 8))
    columns = tl.program_id(1) * BLOCK_W * 8 + tl.arange(0, BLOCK_W * 8)
    mask = (columns < K)[:, None] & (rows < N)[None, :]
    tl.store(out + (matrix * K + columns[:, None]) * N + rows[None, :], tl.trans(codes), mask=mask)


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


@triton.jit
def fp8_kernel(
    values, scales, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Dequantize e4m3 [ROWS, COLUMNS], of which SHARED columns of a row have a scale, or all of it where SHARED is 0.

    A program has BLOCK_R rows of BLOCK_C columns; grid (⌈ROWS / BLOCK_R⌉, ⌈COLUMNS / BLOCK_C⌉).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = (row < ROWS) & (column < COLUMNS)
    if SHARED == 0:
        scale = tl.load(scales + row, mask=row < ROWS, other=0.0)
    else:
        scale = tl.load(scales + row * tl.cdiv(COLUMNS, SHARED) + column // SHARED, mask=inside, other=0.0)
    offset = row * COLUMNS + column
    value = tl.load(values + offset, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)
