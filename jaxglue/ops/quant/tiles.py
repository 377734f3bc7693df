"""Blocks that one program of 128 threads dequantizes."""

MXFP4_BLOCKS = 128
"""Blocks of 32 values: a thread reads 16 bytes and writes 64."""
NF4_BLOCKS = 64
"""Blocks of 64 values: a thread reads 16 bytes and writes 64."""
MXFP4_TRANSPOSED_TILE = (64, 16)
"""Rows, and words of eight codes, in a program that writes FP8 transposed."""
