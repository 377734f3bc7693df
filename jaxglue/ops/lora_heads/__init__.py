"""Queries, keys and values between adapters: one matmul to queries, keys and all ranks, one pass for the rotation."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.lora import LORA
from jaxglue.ops.lora.joined import is_worth_joining
from jaxglue.ops.lora_heads.vjp import HeadsSpec, LoraHeadsBackend, joined_heads
from jaxglue.ops.norm_rope import HeadNorms

__all__ = ["LORA_HEADS", "lora_heads"]

_check = partial(check_triton_rank, largest=64)


def _load(capability: Capability, dtype, rank: int) -> LoraHeadsBackend:
    from jaxglue.ops.lora_heads.triton import TritonLoraHeads

    return TritonLoraHeads.of(capability)


LORA_HEADS = Operation(
    name="projection to heads between adapters",
    backends={"triton": Backend(check=_check, load=_load, advantage="adapters' products take no pass of their own")},
)


def lora_heads(
    x: Float[Array, "B T D"],
    weights: Sequence[Float[Array, "out D"]],
    downs: Sequence[Float[Array, "R D"]],
    ups: Sequence[Float[Array, "out R"]],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    norms: HeadNorms | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]] | None:
    """Return rotated queries and keys, and values; None where separate operations serve better.

    Args:
        x: the layer's normed input.
        weights, downs, ups: of queries, keys and values: frozen, and the adapters' float32 matrices.
        cos, sin: `rope_tables` of the tokens.
        norms: of the heads; None for none.
    """
    (B, T, D), H, ranks = x.shape, 2 * cos.shape[-1], {*map(len, downs)}
    if len(ranks) > 1 or not is_worth_joining(weights):
        return None
    call = x.dtype, min(ranks)
    backend, lora = LORA_HEADS.load(*call), LORA.load(*call)
    if backend is None or lora is None:
        return None
    spec = HeadsSpec(backend=backend, lora=lora, head_dim=H, eps=0.0 if norms is None else norms.eps)
    tables = (table.reshape(B * T, -1) for table in (cos, sin))
    arrays = x.reshape(B * T, D), tuple(weights), tuple(downs), tuple(ups), None if norms is None else norms.weights
    q, k, v = joined_heads(spec, *arrays, *tables)
    return q.reshape(B, T, -1, H), k.reshape(B, T, -1, H), v.reshape(B, T, -1, H)
