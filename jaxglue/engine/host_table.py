"""An embedding table in host memory, from which a step reads the rows of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxglue.engine import transfer
from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params
from jaxglue.ops.backend import Backend, Capability, Operation, check_triton, triton_capability


@dataclass(frozen=True, kw_only=True)
class TableCall:
    """Meaning of a read of a table's rows."""

    dtype: jnp.dtype


def _check(capability: Capability | None, call: TableCall) -> None:
    check_triton(capability, call.dtype)


def _load(capability: Capability, _call: TableCall) -> Callable[..., Array]:
    from jaxglue.engine.host_table_triton import read_rows

    return partial(read_rows, compute_capability=triton_capability(capability))


TABLE_ROWS = Operation(
    name="read of table rows",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="the GPU reads pinned memory itself",
            reads={TableCall: ("dtype",)},
        )
    },
)


def host_parts(frozen: Params) -> Params:
    """Return the parts for `embeddings_to_host`: table and output projection, and a table of embeddings for each layer.

    Raises:
        ValueError: nothing, as the table trains, or the output projection is tied to it; both need it on the device.
    """
    parts: Params = {}
    if "weight" in frozen["embed_tokens"] and "lm_head" in frozen:
        parts = {"embed_tokens": {"weight": frozen["embed_tokens"]["weight"]}, "lm_head": frozen["lm_head"]}
    if "per_layer" in frozen["embed_tokens"]:
        table = {"per_layer": {"embedding": frozen["embed_tokens"]["per_layer"]["embedding"]}}
        parts["embed_tokens"] = parts.get("embed_tokens", {}) | table
    if not parts:
        raise ValueError(
            "embeddings on the host need a frozen table to which the output projection is not tied, or embeddings for "
            "each layer"
        )
    return parts


def embeddings_to_host(frozen: Params) -> Params:
    """Move the parameters of `host_parts` to host memory; the head's programs get copies of the output projection.

    With the Triton kernel the GPU reads rows from pinned memory during the step. Otherwise a table is a numpy array,
    and rows are selected and copied when the step is dispatched.

    Raises:
        ValueError: there are none.
    """
    parts = host_parts(frozen)
    leaves = jax.tree.leaves(parts["embed_tokens"])
    kernel = all(TABLE_ROWS.load(TableCall(dtype=leaf.dtype)) is not None for leaf in leaves)
    table = transfer.to_host(parts["embed_tokens"]) if kernel else jax.tree.map(np.asarray, parts["embed_tokens"])
    embed = {**frozen["embed_tokens"], **table}
    if "per_layer" in table:
        embed["per_layer"] = {**frozen["embed_tokens"]["per_layer"], **table["per_layer"]}
    head = {"lm_head": transfer.to_host(parts["lm_head"])} if "lm_head" in parts else {}
    return {**frozen, **head, "embed_tokens": embed}


def without_own_table(table: Params) -> Params:
    """Return the embedding's frozen parameters for an output projection, with no rows of a table that it never reads.

    Embeddings for each layer that are on the device stay, as an unread argument costs nothing.
    """
    per_layer = table.get("per_layer")
    if per_layer is None or not _is_on_host(weight := per_layer["embedding"]["weight"]):
        return table
    empty = np.zeros((0, *weight.shape[1:]), weight.dtype)
    return {**table, "per_layer": {**per_layer, "embedding": {"weight": empty}}}


def _is_on_host(weight: Any) -> bool:
    return isinstance(weight, np.ndarray) or transfer.is_on_host(weight)


class TableRows(NamedTuple):
    """Rows of tokens [B, T] in the token embeddings' table, and in that of each layer's embeddings, if any."""

    tokens: Any
    own: Any


def needed_rows(table: Params, tokens: Any) -> tuple[Params, TableRows]:
    """Return the embedding's frozen parameters, of tables on the host the rows of these tokens; and where these are."""
    weight, rows = _needed(table.get("weight"), tokens)
    table = table if weight is None else {**table, "weight": weight}
    if "per_layer" not in table:
        return table, TableRows(rows, None)
    per_layer = table["per_layer"]
    weight, own_rows = _needed(per_layer["embedding"]["weight"], tokens)
    return {**table, "per_layer": {**per_layer, "embedding": {"weight": weight}}}, TableRows(rows, own_rows)


def _needed(weight: Any, tokens: Any) -> tuple[Any, Any]:
    """Return (matrix, rows of the tokens in it), of a table on the host those that are needed."""
    if isinstance(weight, np.ndarray):
        indices = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        return _take(weight, np.asarray(tokens)), indices
    if weight is None or not transfer.is_on_host(weight):
        return weight, tokens
    return _read(_address(weight), tokens, width=weight.shape[1], dtype=weight.dtype)


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
    read_rows = TABLE_ROWS.load(TableCall(dtype=dtype))
    assert read_rows is not None
    rows = read_rows(address, tokens.reshape(-1), width, dtype)
    return rows, jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
