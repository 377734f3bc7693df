"""Several adapter folders on one base at a time: side by side as one adapter, of whose ranks each token uses some."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool

from jaxglue.hf.adapter import Adapter, load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.identity import Identity
from jaxglue.models.decoder import CausalLM
from jaxglue.models.linear import Linear
from jaxglue.models.lora import base_shapes, linear_layers

_LATENT = "kv_b_proj"
"""Projection that decoding of latent attention joins with its adapter."""


def add_adapters(
    model: CausalLM, folders: Mapping[str, Path], base: Identity, name: str
) -> dict[str, Bool[np.ndarray, " R"]]:
    """Add folders' PEFT adapters to the model in place, as one of all their ranks; return the ranks of each.

    Args:
        model: the base, without adapters.
        folders: of the adapters, by their names.
        base: identity of the base.
        name: of the base, for messages.

    Raises:
        ValueError: a folder that is no adapter, an adapter that does not fit the base, or one of another kind than
            LoRA on linear layers.
    """
    shapes, linears = base_shapes(model), dict(linear_layers(model))
    adapters = {key: check_adapter(load_adapter(folder), shapes, base, name) for key, folder in folders.items()}
    for adapter in adapters.values():
        _require_plain(adapter, linears)
    ends = np.cumsum([0, *map(_largest_rank, adapters.values())])
    total = int(ends[-1])
    for path in dict.fromkeys(path for adapter in adapters.values() for path in adapter.modules):
        linear, (rows, columns) = linears[path], shapes[path]
        A, B = np.zeros((total, columns), np.float32), np.zeros((rows, total), np.float32)
        for first, adapter in zip(ends[:-1], adapters.values(), strict=True):
            if (own := adapter.tensors.get(f"{path}.lora_A")) is not None:
                own_ranks = slice(first, first + len(own))
                A[own_ranks], B[:, own_ranks] = own, adapter.config.scale_of(path) * adapter.tensors[f"{path}.lora_B"]
        linear.add_lora(rank=total, scale=1.0, dropout=0.0, name=path, rngs=nnx.Rngs(0))
        linear.lora_A, linear.lora_B = nnx.LoRAParam(jnp.asarray(A)), nnx.LoRAParam(jnp.asarray(B))
    ranks = np.arange(total)
    return {
        key: (first <= ranks) & (ranks < end) for key, first, end in zip(adapters, ends[:-1], ends[1:], strict=True)
    }


def _largest_rank(adapter: Adapter) -> int:
    return max(len(adapter.tensors[f"{path}.lora_A"]) for path in adapter.modules)


def _require_plain(adapter: Adapter, linears: Mapping[str, object]) -> None:
    """Raise ValueError for an adapter whose products are not just added to linear layers'."""
    others = [path for path in adapter.modules if not isinstance(linears.get(path), Linear) or path.endswith(_LATENT)]
    reasons = {
        "magnitudes (DoRA)": adapter.config.dora,
        "trained or new tokens": adapter.trains_vocabulary,
        "a score": adapter.scores,
        f"an adapter on {others[0]}" if others else "": bool(others),
    }
    if reason := next((reason for reason, found in reasons.items() if found), None):
        raise ValueError(
            f"{adapter.folder} has {reason}, which is not served beside others: serve it alone (--adapter), or merge it"
        )
