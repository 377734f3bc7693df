"""An embedding table in host memory, from which a step reads the rows of its tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import Backend, Capability, Operation, check_triton, triton_capability


def _load(capability: Capability, _dtype) -> Callable[..., Array]:
    from jaxglue.engine.host_table_triton import read_rows

    return partial(read_rows, compute_capability=triton_capability(capability))


TABLE_ROWS = Operation(
    name="read of table rows",
    backends={"triton": Backend(check=check_triton, load=_load, advantage="the GPU reads pinned memory itself")},
)


def embeddings_to_host(frozen: Params) -> Params:
    """Move the embedding table and the output projection to host memory; the head's programs get copies of the latter.

    With the Triton kernel the GPU reads rows from pinned memory during the step. Otherwise the table is a numpy array,
    and rows are selected and copied when the step is dispatched.

    Raises:
        ValueError: the table trains, or the output projection is tied to it; both need it on the device.
    """
    if "weight" not in frozen["embed_tokens"] or "lm_head" not in frozen:
        raise ValueError("embeddings on the host need a frozen table to which the output projection is not tied")
    kernel = TABLE_ROWS.load(frozen["embed_tokens"]["weight"].dtype)
    table = transfer.to_host(frozen["embed_tokens"]) if kernel else jax.tree.map(np.asarray, frozen["embed_tokens"])
    return {**frozen, "embed_tokens": table, "lm_head": transfer.to_host(frozen["lm_head"])}


def needed_rows(table: Params, tokens: Any) -> tuple[Params, Any]:
    """Return (table, tokens); for a table on the host its rows of these tokens [B, T], and the rows' indices."""
    weight = table.get("weight")
    if isinstance(weight, np.ndarray):
        indices = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        return {**table, "weight": _take(weight, np.asarray(tokens))}, indices
    if weight is None or not transfer.is_on_host(weight):
        return table, tokens
    rows, indices = _read(_address(weight), tokens, width=weight.shape[1], dtype=weight.dtype)
    return {**table, "weight": rows}, indices


def _take(weight: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Select rows as 16-bit integers: numpy copies bfloat16, a type that it does not know, slowly."""
    bits = weight.view(np.uint16) if weight.itemsize == 2 else weight
    return np.take(bits, tokens.ravel(), axis=0).view(weight.dtype)


def _address(weight: Array) -> np.ndarray:
    """Return a pinned array's address, low and high half; GPUs use the host's addresses.

    The caller keeps the array until the step is done.
    """
    pointer = weight.unsafe_buffer_pointer()
    return np.array([pointer & 0xFFFFFFFF, pointer >> 32], np.uint32)


@partial(jit_step, static_argnames=("width", "dtype"))
def _read(address: Array, tokens: Int[Array, "B T"], *, width: int, dtype) -> tuple[Float[Array, "B*T D"], Array]:
    read_rows = TABLE_ROWS.load(dtype)
    assert read_rows is not None
    rows = read_rows(address, tokens.reshape(-1), width, dtype)
    return rows, jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
