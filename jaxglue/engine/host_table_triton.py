"""Triton kernel that reads rows of a table in pinned host memory."""

import jax
import triton
import triton.language as tl
from jax_triton import triton_call
from jaxtyping import Array, Float, Int, UInt32


def read_rows(
    address: UInt32[Array, " 2"], tokens: Int[Array, " M"], width: int, dtype, *, compute_capability: int
) -> Float[Array, "M D"]:
    """Read the tokens' rows, each of `width` values, of the table at `address` (low and high half).

    The table is passed by address because XLA programs can copy arrays in host memory, not read them. The caller keeps
    it until the program is done.
    """
    return triton_call(
        address,
        tokens,
        kernel=read_rows_kernel,
        out_type=jax.ShapeDtypeStruct((tokens.size, width), dtype),
        grid=(tokens.size,),
        num_warps=8,
        num_stages=1,
        compute_capability=compute_capability,
        D=width,
        BLOCK=triton.next_power_of_2(width),
    )


@triton.jit
def read_rows_kernel(address, tokens, out, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one row per program."""
    low, high = tl.load(address).to(tl.uint64), tl.load(address + 1).to(tl.uint64)
    table = (high << 32 | low).to(tl.int64).to(tl.pointer_type(out.dtype.element_ty))
    columns, row = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    mask = columns < D
    values = tl.load(table + tl.load(tokens + row).to(tl.int64) * D + columns, mask=mask)
    tl.store(out + row * D + columns, values, mask=mask)
